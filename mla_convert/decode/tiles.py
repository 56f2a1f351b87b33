"""Tile of a decode kernel by architecture and shape: one pure rule for the launcher and the compile-time gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "float16", "bfloat16"]

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that one block may take (CUDA C++ Programming Guide, compute capabilities)."""

SMALL_MEMORY = 128 * 1024
"""Bytes that part the architectures of workstations (99 KB) from those of servers (163 KB and more)."""

MIN_DOT = 16
"""Smallest side of a tensor-core dot in Triton."""

SMALL, MIDDLE, LARGE, WIDE = 300, 500, 600, 900
"""Widths of a padded row where tiles change: 256+32 is the largest small one, 512+64 the largest before the wide."""


SCATTERED_PAGE = 32
"""Rows of the smallest page that holds all rows of a step of 512+64."""


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


def tile_config(
    arch: int, rows: int, d_c: int, d_r: int, dtype: Dtype, scaled: bool = False, scattered: bool = False
) -> TileConfig:
    """The tile for `rows` packed rows on compute capability `arch` (80, 86, …).

    The accumulator, block_m · d_c float32 numbers, must stay in registers; query, keys and weights go to shared
    memory. The numbers were found by compiling (triton_aot.py): nothing spills at 512+64, and no launch asks for more
    shared memory than the architecture has.

    Args:
        arch: Compute capability.
        rows: Queries times heads that share their keys.
        d_c: Latent width.
        d_r: Rotary width.
        dtype: Of the query.
        scaled: Whether rows are FP8; what they become needs registers on its way to shared memory.
        scattered: Whether rows of one step do not lie side by side: sparse calls and pages of fewer than
            `SCATTERED_PAGE` rows. Their addresses need registers too.
    """
    width = latent_blocks(d_c, d_r).width
    if dtype == "float32":
        return TileConfig(16, 16, 8, 1)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if scattered and MIDDLE < width <= LARGE:
        return TileConfig(16, 32, 8, 2) if scaled else TileConfig(min(block_m, 32), 32, 8, 2)
    if scaled:
        if block_m == 64 and arch == 90 and width <= LARGE:
            return TileConfig(64, 32, 8, 2)
        return TileConfig(16, 32, 4, 2) if width <= LARGE else TileConfig(16, 16, 8, 2)
    narrow = shared_memory_limit(arch) < SMALL_MEMORY
    if width > LARGE:
        return TileConfig(16 if block_m == 16 or (narrow and width > WIDE) else 32, 16, 8, 2)
    if width <= SMALL:
        return TileConfig(block_m, 64, 4 if block_m == 16 else 8, 3)
    if block_m < 64:
        return TileConfig(block_m, 32, 4 if block_m == 16 else 8, 3)
    if narrow and width > MIDDLE:
        return TileConfig(64, 16, 8, 2)
    return TileConfig(64, 32, 8, 2 if arch >= 90 else 3)


def tile_bytes(tile: TileConfig, d_c: int, d_r: int, dtype: Dtype, scaled: bool = False) -> int:
    """Shared memory that a tile takes at least: the query, the keys of one step, and the weights between the dots.

    FP8 latents change owners once as float32, between their scaling and the dot.
    """
    size = 4 if dtype == "float32" else 2
    blocks = latent_blocks(d_c, d_r)
    keys = blocks.head * (4 if scaled else size) + blocks.rope * size
    keys += 0 if scaled else blocks.tail * size
    return size * blocks.width * tile.block_m + keys * tile.block_n + size * tile.block_m * tile.block_n


def shared_memory_limit(arch: int) -> int:
    """Bytes one block may take; of the nearest known architecture that is not newer."""
    known = [known for known in SHARED_MEMORY_LIMIT if known <= arch]
    return SHARED_MEMORY_LIMIT[max(known)] if known else min(SHARED_MEMORY_LIMIT.values())


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
