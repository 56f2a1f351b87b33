"""Tile of a decode kernel by architecture and shape: one pure rule for the launcher and the compile-time gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "float16", "bfloat16"]

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that one block may take (CUDA C++ Programming Guide, compute capabilities)."""

MIN_DOT = 16
"""Smallest side of a tensor-core dot in Triton."""


@dataclass(frozen=True)
class TileConfig:
    """Sizes of one program of the split kernel.

    Attributes:
        block_m: Packed rows, queries times heads.
        block_n: Cached rows of one step.
        warps: Of one program.
        stages: Steps whose loads are in flight together.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class LatentBlocks:
    """How `d_c` and `d_R` fall into blocks that are powers of two.

    Attributes:
        head: Block of the first latents.
        tail: Block of the latents behind them, 0 where one block holds all: 144 is 128 + 16 instead of 256.
        rope: Block of the rotary part; unused where `d_R` is 0.
    """

    head: int
    tail: int
    rope: int

    @property
    def width(self) -> int:
        """Numbers of one row in a tile, padding included."""
        return self.head + self.tail + self.rope


def latent_blocks(d_c: int, d_r: int) -> LatentBlocks:
    """Blocks for a latent and rotary width."""
    rope = power_of_two(max(d_r, MIN_DOT)) if d_r else 0
    whole = power_of_two(max(d_c, MIN_DOT))
    head = whole // 2
    if d_c >= whole or head < MIN_DOT:
        return LatentBlocks(whole, 0, rope)
    tail = power_of_two(max(d_c - head, MIN_DOT))
    return LatentBlocks(head, tail, rope) if tail < head else LatentBlocks(whole, 0, rope)


def tile_config(arch: int, rows: int, d_c: int, d_r: int, dtype: Dtype) -> TileConfig:
    """The tile for `rows` packed rows on compute capability `arch` (80, 86, …).

    The accumulator, block_m · d_c float32 numbers, must stay in registers, and query, keys in flight and the staging
    of the weights in shared memory. An architecture without an entry takes the largest known one below it.
    """
    limit = shared_memory_limit(arch)
    width = latent_blocks(d_c, d_r).width
    if dtype == "float32":
        return TileConfig(MIN_DOT, MIN_DOT if width > 600 else 32, 4 if width <= 300 else 8, 1)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if width > 700:
        block_m = min(block_m, 32)
    warps = 4 if block_m * width <= 16 * 700 else 8
    for block_n, stages in ((64, 2), (32, 3), (32, 2), (16, 3), (16, 2), (32, 1)):
        if width * 2 * (block_m + block_n * stages) + 2 * block_m * block_n * 4 <= limit:
            return TileConfig(block_m, block_n, warps, stages)
    return TileConfig(MIN_DOT, MIN_DOT, 8, 1)


def shared_memory_limit(arch: int) -> int:
    """Bytes one block may take; of the nearest known architecture that is not newer."""
    known = [known for known in SHARED_MEMORY_LIMIT if known <= arch]
    return SHARED_MEMORY_LIMIT[max(known)] if known else min(SHARED_MEMORY_LIMIT.values())


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
