"""The source model run layer by layer through its own transformers classes, one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mla_convert.cache_dir import cache_root
from mla_convert.convert.checkpoint import EMBEDDING, TIED_HEAD, SourceCheckpoint
from mla_convert.convert.heap import give_back
from mla_convert.convert.phases import Seconds
from mla_convert.convert.states import MEMORY_BUDGET_BYTES, StateStore
from mla_convert.convert.tensor_files import row_blocks
from mla_convert.progress import track

# Windows that go through a layer at once, fewer where they are long: what an MLP makes of them is the largest
# activation there is.
BATCH, BATCH_TOKENS = 4, 2048


@dataclass(frozen=True)
class BatchPass:
    """One layer's forward over some windows, float32.

    Attributes:
        layer: Index.
        windows: Which.
        attention_input: (B, T, D), after the layer's input norm.
        attention_output: (B, T, D), before the residual is added.
        hidden: (B, T, D), the layer's output.
    """

    layer: int
    windows: slice
    attention_input: Tensor
    attention_output: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class LayerPass:
    """One layer about to run.

    Attributes:
        layer: Index.
        batches: Runs the layer as it is read, once; what is left unread is run before the next layer.
    """

    layer: int
    batches: Iterator[BatchPass]


class StreamedSource:
    """Runs a source in float32 with its own layer classes, loading each layer's weights when it is reached.

    Args:
        checkpoint: An opened source.
        budget_bytes: Most bytes of hidden states to hold in memory; past it they go to a file in the cache folder.

    Attributes:
        forward_seconds: Time spent in embedding and layers so far.
    """

    def __init__(self, checkpoint: SourceCheckpoint, budget_bytes: int = MEMORY_BUDGET_BYTES) -> None:
        self._checkpoint = checkpoint
        self._budget = budget_bytes
        self.forward_seconds = Seconds()
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
        """Run the decoder over `token_ids` (N, T), yielding each layer with its batches still to be run."""
        count, length = token_ids.shape
        width = int(self._checkpoint.config.hidden_size)
        positions = torch.arange(length)[None]
        with StateStore(count, length, width, self._budget, cache_root()) as states:
            self.embed_into(states, token_ids)
            rope = self.rotary(length)
            for index in track(range(self._checkpoint.num_layers), label):
                with closing(self._run_layer(index, states, positions, rope)) as batches:
                    yield LayerPass(index, batches)
                    for _ in batches:
                        pass
                give_back()

    def rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first `length` positions, as the layers take them."""
        made: tuple[Tensor, Tensor] = self._rotary(torch.empty(1, dtype=torch.float32), torch.arange(length)[None])
        return made

    def embed_into(self, states: StateStore, token_ids: Tensor) -> None:
        """Write the embeddings of (N, T) tokens into `states`."""
        started = Seconds.now()
        table = self._checkpoint.tensor(EMBEDDING)
        for windows in batches_of(states):
            states.write(windows, nn.functional.embedding(token_ids[windows], table))
        self.forward_seconds += Seconds.now() - started

    @torch.inference_mode()
    def _run_layer(
        self, index: int, states: StateStore, positions: Tensor, rope: tuple[Tensor, Tensor]
    ) -> Generator[BatchPass, None, None]:
        started = Seconds.now()
        seen: list[Tensor] = []

        def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            seen[:] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], result[0]

        with self.layer(index) as layer:
            hook = layer.self_attn.register_forward_hook(record, with_kwargs=True)
            try:
                for windows in batches_of(states):
                    hidden = layer(
                        states.read(windows), attention_mask=None, position_ids=positions, position_embeddings=rope
                    )
                    states.write(windows, hidden)
                    self.forward_seconds += Seconds.now() - started
                    yield BatchPass(index, windows, seen[0], seen[1], hidden)
                    started = Seconds.now()
            finally:
                hook.remove()

    @contextmanager
    def layer(self, index: int) -> Iterator[Any]:
        """One decoder layer with its weights in float32, which go when the block ends."""
        layer: nn.Module = self._model.layers[index]
        prefix = f"model.layers.{index}."
        state = {name: self._checkpoint.tensor(prefix + name).float() for name in layer.state_dict()}
        layer.load_state_dict(state, strict=True, assign=True)
        del state
        try:
            yield layer
        finally:
            layer.to("meta")

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., D), float32: the model's last norm."""
        return self.normed(hidden)

    def normed(self, hidden: Tensor) -> Tensor:
        """The same, for a gradient to pass."""
        norm: nn.Module = self._model.norm
        norm.load_state_dict({"weight": self._checkpoint.tensor("model.norm.weight").float()}, strict=True, assign=True)
        return norm(hidden)  # type: ignore[no-any-return]

    def head(self) -> Iterator[Tensor]:
        """The (V, D) output head in float32, some rows at a time."""
        stored = self._checkpoint.tensor(EMBEDDING if self._checkpoint.tied else TIED_HEAD)
        for rows in row_blocks(stored):
            yield rows.float()

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, T, D) output of the last layer -> (N, T, V) float32."""
        return torch.cat(list(self.logit_blocks(hidden)), dim=-1)

    def logit_blocks(self, hidden: Tensor) -> Iterator[Tensor]:
        """The same for some rows of the vocabulary at a time: (N, T, rows) float32."""
        normed = self.final_norm(hidden)
        for rows in self.head():
            yield normed @ rows.T


def batches_of(states: StateStore) -> Iterator[slice]:
    """The windows of one forward after the other."""
    count, length, _ = states.shape
    size = max(1, min(BATCH, BATCH_TOKENS // length))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
