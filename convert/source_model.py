"""The source model run layer by layer through its own transformers classes, one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mla_convert.convert.checkpoint import EMBEDDING, TIED_HEAD, SourceCheckpoint
from mla_convert.progress import track

BATCH = 4


@dataclass(frozen=True)
class LayerPass:
    """One layer's forward over all sequences, float32.

    Attributes:
        layer: Index.
        attention_input: (N, T, D), after the layer's input norm.
        attention_output: (N, T, D), before the residual is added.
        hidden: (N, T, D), the layer's output.
    """

    layer: int
    attention_input: Tensor
    attention_output: Tensor
    hidden: Tensor


class StreamedSource:
    """Runs a source in float32 with its own layer classes, loading each layer's weights when it is reached.

    Args:
        checkpoint: An opened source.
    """

    def __init__(self, checkpoint: SourceCheckpoint) -> None:
        self._checkpoint = checkpoint
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(checkpoint.config, attn_implementation="sdpa")
        self._model = skeleton.eval().model
        # The skeleton's own rotary buffer is on the meta device.
        self._rotary = type(self._model.rotary_emb)(checkpoint.config)

    def embed(self, token_ids: Tensor) -> Tensor:
        """(N, T) token ids -> (N, T, D) float32."""
        table = self._checkpoint.tensor(EMBEDDING)
        return nn.functional.embedding(token_ids, table).float()

    def layers(self, token_ids: Tensor, label: str) -> Iterator[LayerPass]:
        """Run the decoder over `token_ids` (N, T), yielding each layer as it is done."""
        hidden = self.embed(token_ids)
        positions = torch.arange(token_ids.shape[1])[None]
        rope = self._rotary(hidden, positions)
        for index in track(range(self._checkpoint.num_layers), label):
            done = self._run_layer(index, hidden, positions, rope)
            hidden = done.hidden
            yield done

    @torch.inference_mode()
    def _run_layer(self, index: int, hidden: Tensor, positions: Tensor, rope: tuple[Tensor, Tensor]) -> LayerPass:
        layer: nn.Module = self._model.layers[index]
        prefix = f"model.layers.{index}."
        state = {name: self._checkpoint.tensor(prefix + name).float() for name in layer.state_dict()}
        layer.load_state_dict(state, strict=True, assign=True)
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            inputs.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
            outputs.append(result[0])

        attention: nn.Module = layer.self_attn  # type: ignore[assignment]
        hook = attention.register_forward_hook(record, with_kwargs=True)
        try:
            done = [
                layer(batch, attention_mask=None, position_ids=positions, position_embeddings=rope)
                for batch in hidden.split(BATCH)
            ]
        finally:
            hook.remove()
            layer.to("meta")
        return LayerPass(index, torch.cat(inputs), torch.cat(outputs), torch.cat(done))

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., D), float32: the model's last norm."""
        norm: nn.Module = self._model.norm
        norm.load_state_dict({"weight": self._checkpoint.tensor("model.norm.weight").float()}, strict=True, assign=True)
        return norm(hidden)  # type: ignore[no-any-return]

    def head(self) -> Tensor:
        """(V, D) float32 output head."""
        return self._checkpoint.tensor(EMBEDDING if self._checkpoint.tied else TIED_HEAD).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, T, D) output of the last layer -> (N, T, V) float32."""
        return self.final_norm(hidden) @ self.head().T
