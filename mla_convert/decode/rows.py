"""What one cached row looks like in memory: its fields, their types and their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

FloatName = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class RowFormat:
    """Layout of one row `[normalised c_kv | rotated k_rope]` of one layer.

    Attributes:
        name: Of the layout; two layouts with other bytes have other names.
        version: Raised when the bytes of a name change.
        latent_width: Numbers of `c_kv`, `d_c`.
        rope_width: Numbers of `k_rope`, `d_R`.
        latent_dtype: Of the stored latent.
        rope_dtype: Of the stored rotary part; also what a scaled latent is computed in after it is read.
        scale_group: Numbers of the latent that share one float32 scale; None for a latent without scales.
    """

    name: str
    version: int
    latent_width: int
    rope_width: int
    latent_dtype: FloatName | Literal["float8_e4m3fn"]
    rope_dtype: FloatName
    scale_group: int | None = None

    @classmethod
    def plain(cls, latent_width: int, rope_width: int, dtype: FloatName) -> RowFormat:
        """Latent and rotary part side by side in one dtype."""
        return cls(f"{dtype}-row", 1, latent_width, rope_width, dtype, dtype)

    @property
    def is_plain(self) -> bool:
        """Whether a row is `d_c + d_R` numbers of one dtype, and a pool a tensor of that dtype."""
        return self.scale_group is None

    @property
    def scales(self) -> int:
        """Float32 scales in a row."""
        return 0 if self.scale_group is None else -(-self.latent_width // self.scale_group)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: latent, then scales, then rotary part."""
        return (
            self.latent_width * self._size(self.latent_dtype)
            + 4 * self.scales
            + self.rope_width * self._size(self.rope_dtype)
        )

    @property
    def pool_dtype(self) -> torch.dtype:
        """Of a pool of such rows; a scaled row is bytes."""
        return _dtype(self.latent_dtype) if self.is_plain else torch.uint8

    @property
    def pool_width(self) -> int:
        """Last size of a pool of such rows, in elements of `pool_dtype`."""
        return self.latent_width + self.rope_width if self.is_plain else self.row_bytes

    @staticmethod
    def _size(name: str) -> int:
        return _dtype(name).itemsize


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
