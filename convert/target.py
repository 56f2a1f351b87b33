"""The written checkpoint: which tensor goes where, in which dtype, and the files copied beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla_convert.convert.checkpoint import EMBEDDING, TIED_HEAD, SourceCheckpoint
from mla_convert.convert.checkpoint_writer import ShardWriter
from mla_convert.convert.latent_norm import NeutralNorm
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.stock_layout import stock_layer
from mla_convert.convert.tensor_files import all_finite, row_blocks
from mla_convert.errors import InputRefused
from mla_convert.mla.weights import MLALayerWeights

# Tensors that write to the residual stream, beside the attention's output.
STREAM_WRITERS = ("mlp.down_proj.weight", "mlp.down_proj.bias")


@dataclass
class TargetWriter:
    """Writes one stock checkpoint, layer by layer.

    Attributes:
        source: Where unchanged tensors come from.
        plan: Dtypes, scales.
        shards: Where tensors go.
        latent_norms: Constants of each layer so far.
        rerounded: Source tensors whose stored values changed only by the residual scale's rounding.
    """

    source: SourceCheckpoint
    plan: ConversionPlan
    shards: ShardWriter
    latent_norms: list[NeutralNorm] = field(default_factory=list)
    rerounded: list[str] = field(default_factory=list)

    def write_embedding(self) -> None:
        """Embedding first: its scale is part of the residual stream."""
        self._copy(EMBEDDING, scale=self.plan.residual_scale)

    def write_layer(self, layer: int, weights: MLALayerWeights) -> None:
        """Attention in stock form, everything else of the layer as it is."""
        prefix = f"model.layers.{layer}."
        norm_weight = self.source.tensor(prefix + "input_layernorm.weight")
        stock = stock_layer(weights, self.plan, norm_weight)
        self.latent_norms.append(stock.latent_norm)
        dtype = getattr(torch, self.plan.attention_dtype)
        for name, value in stock.tensors.items():
            full = f"{prefix}self_attn.{name}"
            self.shards.add(full, cast(value, dtype, full))
        for row in self.source.family.layer_tensors:
            name = row.name.format(layer=layer)
            if ".self_attn." not in name and name in self.source.files.names:
                writes = name.endswith(STREAM_WRITERS)
                self._copy(name, scale=self.plan.residual_scale if writes else 1.0)

    def write_head(self) -> None:
        """Final norm, and the head where the target does not tie it to the embedding."""
        self._copy("model.norm.weight", scale=1.0)
        if not self.plan.tie_word_embeddings:
            stored = EMBEDDING if self.source.tied else TIED_HEAD
            value = self.source.tensor(stored)
            self.shards.add(TIED_HEAD, cast(value, self._dtype(value), TIED_HEAD))
        self.shards.finish()

    def _dtype(self, value: Tensor) -> torch.dtype:
        if self.plan.dtype == "source":
            return value.dtype
        chosen: torch.dtype = getattr(torch, self.plan.dtype)
        return chosen

    def _copy(self, name: str, scale: float) -> None:
        value = self.source.tensor(name)
        dtype = self._dtype(value)
        if scale != 1.0:
            self.rerounded.append(name)
            scaled = torch.empty(value.shape, dtype=dtype)
            for target, rows in zip(row_blocks(scaled), row_blocks(value), strict=True):
                target.copy_(cast(rows.double() * scale, dtype, name))
            self.shards.add(name, scaled)
        else:
            self.shards.add(name, cast(value, dtype, name))


def cast(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Round once to the output dtype.

    Raises:
        InputRefused: If a value overflows there.
    """
    rounded = value.to(dtype)
    if not all_finite(rounded):
        raise InputRefused(
            f"a value does not fit {str(dtype).removeprefix('torch.')}",
            expected=f"at most {torch.finfo(dtype).max:g}",
            found=f"{float(value.abs().max()):g}",
            where=name,
            remedy="Choose --dtype float32 or bfloat16.",
        )
    return rounded
