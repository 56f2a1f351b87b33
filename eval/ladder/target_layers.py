"""The factors of a converted folder's layers, read from its files, with the rotation that its manifest states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mla_convert.convert.latent_norm import LATENT_NORM_EPS
from mla_convert.convert.written import WrittenCheckpoint
from mla_convert.manifests.models import ConversionManifest
from mla_convert.mla.attention import MLAFactors, Rope
from mla_convert.mla.stock_factors import StockShape, stock_factors


@dataclass(frozen=True)
class TargetLayers:
    """A converted folder, one layer at a time.

    Attributes:
        written: Its files and the class that transformers makes of them.
        manifest: What it says of itself.
    """

    written: WrittenCheckpoint
    manifest: ConversionManifest

    @classmethod
    def open(cls, folder: Path, manifest: ConversionManifest) -> TargetLayers:
        """Read headers only.

        Raises:
            InputRefused: For weight files that cannot be read.
        """
        return cls(WrittenCheckpoint.open(folder), manifest)

    @property
    def residual_scale(self) -> float:
        """Factor on the residual stream beside the source's."""
        return self.manifest.method.residual_scale

    @property
    def rope(self) -> Rope:
        """The rotation, from the manifest and not from the configuration that the runtime reads."""
        position = self.manifest.identity.position
        frequencies = torch.tensor(position.frequencies, dtype=torch.float64)
        return Rope(frequencies, position.pairing_layout == "interleaved", position.attention_scaling)

    def factors(self, index: int) -> MLAFactors:
        """The factors of one layer in float64.

        Raises:
            InputRefused: If a tensor is missing or of another shape.
        """
        architecture, prefix = self.manifest.identity.architecture, f"model.layers.{index}.self_attn."
        names = [name for name in self.written.files.infos if name.startswith(prefix)]
        state: dict[str, Tensor] = {name.removeprefix(prefix): self.written.files.read(name).double() for name in names}
        shape = StockShape(architecture.num_attention_heads, architecture.qk_nope_head_dim, self.rope, LATENT_NORM_EPS)
        return stock_factors(state, shape)
