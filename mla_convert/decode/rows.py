"""What one cached row looks like in memory, and how numbers become a row and come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from mla_convert.errors import CheckFailed, InputRefused

FloatName = Literal["float32", "float16", "bfloat16"]
FLOAT_NAMES: tuple[FloatName, ...] = get_args(FloatName)

FLASHMLA_FP8 = "flashmla-fp8-656"
GROUPED_FP8 = "fp8-e4m3-group128"
FP8_MAX = 448.0
"""Largest finite E4M3 number (Micikevicius et al., FP8 Formats for Deep Learning, table 1)."""
SCALE_FLOOR = torch.finfo(torch.float32).tiny
"""Smallest normal float32: a group of zeros, or one whose scale would underflow, is divided by this."""
ALIGNMENT = 4
"""Bytes: a scale is a float32, which a GPU loads from multiples of its size only."""


@dataclass(frozen=True)
class RowFormat:
    """Layout of one row `[normalised c_kv | rotated k_rope]` of one layer.

    A scaled row is bytes: the latent's codes, filled up to a multiple of 4, its float32 scales, the rotary part,
    filled up to a multiple of 4.

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

    def __post_init__(self) -> None:
        if self.latent_width < 1 or self.rope_width < 0 or (self.scale_group is not None and self.scale_group < 1):
            raise InputRefused(
                "a row format without room",
                expected="d_c >= 1, d_R >= 0, scale_group >= 1",
                found=f"d_c={self.latent_width}, d_R={self.rope_width}, scale_group={self.scale_group}",
                where=self.name,
            )
        if self.scale_group is None and self.latent_dtype != self.rope_dtype:
            raise InputRefused(
                "a plain row of two dtypes",
                expected="one dtype for latent and rotary part",
                found=f"{self.latent_dtype} and {self.rope_dtype}",
                where=self.name,
            )
        if (self.latent_dtype == "float8_e4m3fn") != (self.scale_group is not None):
            raise InputRefused(
                "only FP8 rows have scales, and they always do",
                found=f"latent_dtype={self.latent_dtype}, scale_group={self.scale_group}",
                where=self.name,
            )
        fields = (self.version, self.latent_width, self.rope_width, self.rope_dtype, self.scale_group)
        if self.name == FLASHMLA_FP8 and fields != (1, 512, 64, "bfloat16", 128):
            raise InputRefused(
                f"{FLASHMLA_FP8} is one exact row",
                expected="version 1, 512 E4M3 + 4 scales + 64 bfloat16",
                found=repr(self),
                remedy="Other widths are RowFormat.grouped_fp8.",
            )

    @classmethod
    def plain(cls, latent_width: int, rope_width: int, dtype: FloatName) -> RowFormat:
        """Latent and rotary part side by side in one dtype."""
        return cls(f"{dtype}-row", 1, latent_width, rope_width, dtype, dtype)

    @classmethod
    def flashmla_fp8(cls) -> RowFormat:
        """FlashMLA's "FP8 with scale" row of 656 bytes: 512 E4M3, four float32 scales, 64 bf16 (seed 1, 0x0B)."""
        return cls(FLASHMLA_FP8, 1, 512, 64, "float8_e4m3fn", "bfloat16", 128)

    @classmethod
    def grouped_fp8(cls, latent_width: int, rope_width: int) -> RowFormat:
        """The same idea for any widths: E4M3 with a scale for each 128 numbers, the last group as short as it is.

        At 512 + 64 the bytes are FlashMLA's; the name, and so the format, is not.
        """
        return cls(GROUPED_FP8, 1, latent_width, rope_width, "float8_e4m3fn", "bfloat16", 128)

    @property
    def is_plain(self) -> bool:
        """Whether a row is `d_c + d_R` numbers of one dtype, and a pool a tensor of that dtype."""
        return self.scale_group is None

    @property
    def scales(self) -> int:
        """Float32 scales in a row."""
        return 0 if self.scale_group is None else -(-self.latent_width // self.scale_group)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the latent and the rotary part of one row."""
        return (
            self.latent_width * _dtype(self.latent_dtype).itemsize + self.rope_width * _dtype(self.rope_dtype).itemsize
        )

    @property
    def scale_offset(self) -> int:
        """Byte of a row at which the scales begin."""
        width = self.latent_width * _dtype(self.latent_dtype).itemsize
        return width if self.is_plain else _aligned(width)

    @property
    def rope_offset(self) -> int:
        """Byte of a row at which the rotary part begins."""
        return self.scale_offset + 4 * self.scales

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: latent, then scales, then rotary part."""
        end = self.rope_offset + self.rope_width * _dtype(self.rope_dtype).itemsize
        return end if self.is_plain else _aligned(end)

    @property
    def pool_dtype(self) -> torch.dtype:
        """Of a pool of such rows; a scaled row is bytes."""
        return _dtype(self.latent_dtype) if self.is_plain else torch.uint8

    @property
    def pool_width(self) -> int:
        """Last size of a pool of such rows, in elements of `pool_dtype`."""
        return self.latent_width + self.rope_width if self.is_plain else self.row_bytes

    def require(self, found: RowFormat, where: str) -> None:
        """Refuse rows of another format, though their bytes may have the same length.

        Raises:
            InputRefused: `found` differs in anything, the name and version included.
        """
        if found != self:
            raise InputRefused("rows of another format", expected=repr(self), found=repr(found), where=where)


def encode(form: RowFormat, c_kv: Tensor, k_rope: Tensor) -> Tensor:
    """Rows of `form`.

    A scale is `amax / 448` of its group in float32, so that the largest number becomes the largest E4M3 number.

    Args:
        form: Of the rows.
        c_kv: (..., d_c) normalised latent, any floating dtype.
        k_rope: (..., d_R) rotated rotary key, any floating dtype.

    Returns:
        (..., form.pool_width) of `form.pool_dtype`.

    Raises:
        InputRefused: Other widths.
        CheckFailed: A number is not finite, or is not once it has the row's dtype.
    """
    if c_kv.shape != (*k_rope.shape[:-1], form.latent_width) or k_rope.shape[-1] != form.rope_width:
        raise InputRefused(
            "these are no rows of this format",
            expected=f"(..., {form.latent_width}) and (..., {form.rope_width})",
            found=f"{tuple(c_kv.shape)} and {tuple(k_rope.shape)}",
            where=form.name,
        )
    if form.is_plain:
        rows = torch.cat([c_kv.to(form.pool_dtype), k_rope.to(form.pool_dtype)], dim=-1)  # (..., d_c + d_R)
        _refuse_infinite(form, rows)
        return rows
    latent = c_kv.to(torch.float32)  # (..., d_c)
    rope = k_rope.to(_dtype(form.rope_dtype)).contiguous()  # (..., d_R)
    # A latent that its scale can hold may still overflow in the dtype that it is computed in after it is read.
    _refuse_infinite(form, latent.to(rope.dtype), rope)
    codes, scales = _quantise(form, latent)
    rows = torch.zeros(*latent.shape[:-1], form.row_bytes, dtype=torch.uint8, device=latent.device)
    rows[..., : form.latent_width] = codes.view(torch.uint8)
    rows[..., form.scale_offset : form.rope_offset] = scales.view(torch.uint8)
    if form.rope_width:
        rope_bytes = rope.view(torch.uint8)  # (..., 2·d_R)
        rows[..., form.rope_offset : form.rope_offset + rope_bytes.shape[-1]] = rope_bytes
    return rows


def decode(form: RowFormat, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that attention computes with.

    A scaled latent is code · scale in float32, rounded to `form.rope_dtype`: FlashMLA's kernels compute in bf16, and
    every backend here reads the same numbers.

    Args:
        form: Of the rows.
        rows: (..., form.pool_width) of `form.pool_dtype`.
        dtype: float32 or float64.

    Returns:
        (..., d_c + d_R) `[c_kv | k_rope]`.

    Raises:
        InputRefused: Rows of another width or dtype.
    """
    if rows.shape[-1] != form.pool_width or rows.dtype != form.pool_dtype:
        raise InputRefused(
            "these are no rows of this format",
            expected=f"(..., {form.pool_width}) {form.pool_dtype}",
            found=f"{tuple(rows.shape)} {rows.dtype}",
            where=form.name,
        )
    if form.scale_group is None:
        return rows.to(dtype)
    codes = _from_e4m3(rows[..., : form.latent_width])  # (..., d_c)
    scales = rows[..., form.scale_offset : form.rope_offset].contiguous().view(torch.float32)  # (..., scales)
    for group in range(form.scales):
        first = group * form.scale_group
        codes[..., first : first + form.scale_group].mul_(scales[..., group : group + 1])
    kept = _dtype(form.rope_dtype)
    latent = codes.to(kept).to(dtype)  # (..., d_c)
    if not form.rope_width:
        return latent
    rope_end = form.rope_offset + form.rope_width * kept.itemsize
    rope = rows[..., form.rope_offset : rope_end].contiguous().view(kept)  # (..., d_R)
    return torch.cat([latent, rope.to(dtype)], dim=-1)


def _from_e4m3(codes: Tensor) -> Tensor:
    """Bytes (..., n) -> float32. On the CPU by table: torch's own cast takes six times as long there."""
    if codes.device.type != "cpu":
        return codes.view(torch.float8_e4m3fn).to(torch.float32)
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _quantise(form: RowFormat, latent: Tensor) -> tuple[Tensor, Tensor]:
    """(..., d_c) float32 -> codes (..., d_c) E4M3 and scales (..., scales) float32."""
    group = form.scale_group or form.latent_width
    missing = form.scales * group - form.latent_width
    groups = functional.pad(latent, (0, missing)).unflatten(-1, (form.scales, group))  # (..., scales, group)
    scales = (groups.abs().amax(-1) / FP8_MAX).clamp_min(SCALE_FLOOR)  # (..., scales)
    # Rounding of the division may leave the largest number a little above 448.
    codes = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2)[..., : form.latent_width], scales


def _refuse_infinite(form: RowFormat, *fields: Tensor) -> None:
    if not all(bool(torch.isfinite(field).all()) for field in fields):
        raise CheckFailed(
            "a number that a row cannot hold",
            expected=f"finite numbers, within the range of {form.rope_dtype}",
            found="NaN, infinity, or a number that becomes infinite",
            where=form.name,
        )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def float_name(dtype: torch.dtype) -> FloatName | None:
    """Name of a dtype that plain rows can have, None for another."""
    return next((name for name in FLOAT_NAMES if _dtype(name) == dtype), None)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
