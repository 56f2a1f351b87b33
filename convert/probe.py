"""A small probe batch carried through the source and the float64 reference while layers are converted.

What it records is what the written files must reproduce after they are loaded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.activations import ACT2FN

from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.source_model import StreamedSource
from mla_convert.mla.reference import AttentionTrace, BlockWeights, decoder_layer, rms_norm
from mla_convert.mla.weights import MLALayerWeights

SEQUENCES = 2
TOKENS = 40


def probe_ids(vocab_size: int, seed: int) -> Tensor:
    """(2, 40) random token ids."""
    return torch.randint(0, vocab_size, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(seed))


def block_weights(source: SourceCheckpoint, layer: int) -> BlockWeights:
    """Norms and MLP of a source layer as stored."""
    prefix = f"model.layers.{layer}."
    activation: Callable[[Tensor], Tensor] = ACT2FN[source.config.hidden_act]
    return BlockWeights(
        input_norm=source.tensor(prefix + "input_layernorm.weight"),
        post_attention_norm=source.tensor(prefix + "post_attention_layernorm.weight"),
        gate=source.tensor(prefix + "mlp.gate_proj.weight"),
        up=source.tensor(prefix + "mlp.up_proj.weight"),
        down=source.tensor(prefix + "mlp.down_proj.weight"),
        norm_eps=float(source.config.rms_norm_eps),
        activation=activation,
    )


@dataclass
class ReferenceProbe:
    """The float64 reference's state after the layers converted so far.

    Attributes:
        source: The source.
        folder: Where each layer's stages are kept (float32).
        ids: (B, T).
        hidden: (B, T, D) float64.
    """

    source: SourceCheckpoint
    folder: Path
    ids: Tensor
    hidden: Tensor

    @classmethod
    def start(cls, source: SourceCheckpoint, streamed: StreamedSource, folder: Path, seed: int) -> ReferenceProbe:
        """Embed the probe batch."""
        ids = probe_ids(int(source.config.vocab_size), seed)
        return cls(source, folder, ids, streamed.embed(ids).double())

    def advance(self, layer: int, weights: MLALayerWeights) -> None:
        """Run the reference through one converted layer and keep its stages."""
        before = self.hidden
        self.hidden, trace = decoder_layer(block_weights(self.source, layer), weights, before)
        save_file(_stages(before, trace, self.hidden), self.folder / f"layer_{layer:04d}.safetensors")

    def logits(self, streamed: StreamedSource) -> Tensor:
        """(B, T, V) float32, computed in float64 from the reference's last hidden state."""
        weight = self.source.tensor("model.norm.weight").double()
        normed = rms_norm(self.hidden, weight, float(self.source.config.rms_norm_eps))
        return torch.cat([(normed @ rows.double().T).float() for rows in streamed.head()], dim=-1)


def _stages(before: Tensor, trace: AttentionTrace, after: Tensor) -> dict[str, Tensor]:
    stages = {
        "input": before,
        "query_content": trace.query_content,
        "query_rope": torch.view_as_real(trace.query_rope.resolve_conj()),
        "latent": trace.latent,
        "key_rope": torch.view_as_real(trace.key_rope.resolve_conj()),
        "key_content": trace.key_content,
        "value": trace.value,
        "heads": trace.heads,
        "output": trace.output,
        "hidden": after,
    }
    return {name: value.float().contiguous() for name, value in stages.items()}
