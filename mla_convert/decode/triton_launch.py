"""From a decode call to the constants, the grid and the workspace of its Triton launch, without Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_convert.decode.abi import DecodeCall
from mla_convert.decode.rows import RowFormat
from mla_convert.decode.tiles import (
    SCATTERED_PAGE,
    Dtype,
    LatentBlocks,
    TileConfig,
    latent_blocks,
    power_of_two,
    tile_config,
)

MAX_SPLITS = 128
"""The merge holds the splits of a row in one tile."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs that the launch aims at for each multiprocessor: one computes while the other waits for memory."""

MERGE_TILE, MERGE_WARPS = 4096, 4
"""Numbers in one tile of the merge, and its warps: 32 float32 registers a thread."""


@dataclass(frozen=True)
class Geometry:
    """Everything of a call's shape that a kernel is compiled for, and its number of groups and keys.

    Attributes:
        batch: B.
        tokens: s_q.
        heads: H.
        form: Of the rows.
        dtype: Of the query.
        page_size: P.
        extra_page_size: P' of the second pool, 0 without one.
        causal: As in the call.
        sparse: Whether rows are named one by one.
        sinks: Whether heads have sinks.
        capacity: Keys that a group can hold at most, by the shape.
    """

    batch: int
    tokens: int
    heads: int
    form: RowFormat
    dtype: Dtype
    page_size: int
    extra_page_size: int
    causal: bool
    sparse: bool
    sinks: bool
    capacity: int

    @property
    def scattered(self) -> bool:
        """Whether the rows of one step lie in several places."""
        return self.sparse or self.page_size < SCATTERED_PAGE

    @classmethod
    def of(cls, call: DecodeCall) -> Geometry:
        """Of a call that `check_call` accepts, with a query in float32, float16 or bfloat16."""
        batch, tokens, heads, _ = call.q.shape
        capacity = call.block_table.shape[1] * call.page_size
        extra_page = 0
        if call.sparse is not None:
            capacity = call.sparse.indices.shape[2]
            if call.sparse.extra_pool is not None and call.sparse.extra_indices is not None:
                extra_page = call.sparse.extra_pool.shape[1]
                capacity += call.sparse.extra_indices.shape[2]
        return cls(
            batch,
            tokens,
            heads,
            call.format,
            dtype_name(call.q.dtype),
            call.page_size,
            extra_page,
            call.causal and tokens > 1,
            call.sparse is not None,
            call.sinks is not None,
            capacity,
        )

    @property
    def groups(self) -> int:
        """Sets of rows that share their keys: a sequence, or, where sparse, one of its queries."""
        return self.batch * (self.tokens if self.sparse else 1)

    @property
    def rows(self) -> int:
        """Packed rows of a group, queries times heads."""
        return self.heads * (1 if self.sparse else self.tokens)

    @property
    def blocks(self) -> LatentBlocks:
        """Blocks of the widths."""
        return latent_blocks(self.form.latent_width, self.form.rope_width)

    @property
    def scale_group(self) -> int:
        """Latents under one scale as the kernel sees them, a power of two; 0 for plain rows."""
        if self.form.scale_group is None:
            return 0
        return power_of_two(min(self.form.scale_group, self.form.latent_width))


@dataclass(frozen=True)
class LaunchPlan:
    """A launch of the split kernel and of the merge behind it.

    Attributes:
        geometry: What is computed.
        tile: Of the split kernel.
        splits: Runs that each group's keys are cut into, at most; 1 means no merge.
        interpret: Whether Triton's interpreter runs it.
    """

    geometry: Geometry
    tile: TileConfig
    splits: int
    interpret: bool

    @property
    def grid(self) -> tuple[int]:
        """Programs of the split kernel; no length is in it."""
        tiles = -(-self.geometry.rows // self.tile.block_m)
        return (self.geometry.groups * self.splits * tiles,)

    @property
    def merge_block(self) -> int:
        """Output numbers of one merge program."""
        width = power_of_two(self.geometry.form.latent_width)
        return max(16, min(MERGE_TILE // power_of_two(self.splits), width))

    @property
    def merge_grid(self) -> tuple[int, int]:
        """Programs of the merge kernel."""
        return (self.geometry.groups * self.geometry.rows, -(-self.geometry.form.latent_width // self.merge_block))

    @property
    def workspace_bytes(self) -> int:
        """Of the partial outputs and their LSE."""
        if self.splits == 1:
            return 0
        return 4 * self.geometry.groups * self.splits * self.geometry.rows * (self.geometry.form.latent_width + 1)

    @property
    def padded_numbers(self) -> int:
        """Columns of a tile that hold no number of a row."""
        blocks = self.geometry.blocks
        return blocks.width - self.geometry.form.latent_width - self.geometry.form.rope_width

    def split_constants(self) -> dict[str, object]:
        """Keyword constants of `split_kernel`, dtypes by name."""
        geometry, form, blocks = self.geometry, self.geometry.form, self.geometry.blocks
        emulate = self.interpret and geometry.dtype == "bfloat16"
        return {
            "H": geometry.heads,
            "S_Q": 1 if geometry.sparse else geometry.tokens,
            "TOKENS": geometry.tokens if geometry.sparse else 1,
            "CAUSAL": geometry.causal,
            "SPARSE": geometry.sparse,
            "EXTRA": geometry.extra_page_size > 0,
            "HAS_SINKS": geometry.sinks,
            "D_C": form.latent_width,
            "D_R": form.rope_width,
            "BLOCK_C": blocks.head,
            "BLOCK_T": blocks.tail,
            "BLOCK_R": blocks.rope,
            "GROUP": geometry.scale_group,
            "SCALES": form.scales,
            "SCALES_AT": form.scale_offset,
            "ROPE_AT": form.rope_offset,
            "ROUND": form.rope_dtype,
            "INTERPRET": self.interpret,
            "EMULATE": emulate,
            "PAGE": geometry.page_size,
            "EXTRA_PAGE": max(geometry.extra_page_size, 1),
            "SPLITS": self.splits,
            "BLOCK_M": self.tile.block_m,
            "BLOCK_N": self.tile.block_n,
            "STAGES": self.tile.stages,
            "ROPE": form.rope_dtype,
            "COMPUTE": "float32" if emulate else geometry.dtype,
        }

    def merge_constants(self) -> dict[str, object]:
        """Keyword constants of `merge_kernel`."""
        return {
            "H": self.geometry.heads,
            "D_C": self.geometry.form.latent_width,
            "SPLITS": self.splits,
            "HAS_SINKS": self.geometry.sinks,
            "BLOCK_S": power_of_two(self.splits),
            "BLOCK_D": self.merge_block,
        }


def plan_launch(
    geometry: Geometry,
    arch: int,
    processors: int,
    *,
    interpret: bool = False,
    tile: TileConfig | None = None,
    splits: int | None = None,
) -> LaunchPlan:
    """The launch for a shape on a device; a function of nothing else, so that a captured graph keeps its grid.

    Args:
        geometry: Of the call.
        arch: Compute capability, 90 for sm_90.
        processors: Multiprocessors of the device.
        interpret: Whether the interpreter will run it.
        tile: Instead of the chosen one.
        splits: Instead of the chosen number, 1 to `MAX_SPLITS`.
    """
    form = geometry.form
    if tile is None:
        scaled = form.scale_group is not None
        widths = form.latent_width, form.rope_width
        tile = tile_config(arch, geometry.rows, *widths, geometry.dtype, scaled, geometry.scattered)
    if splits is None:
        programs = geometry.groups * -(-geometry.rows // tile.block_m)
        splits = split_count(programs, geometry.capacity, tile.block_n, processors)
    return LaunchPlan(geometry, tile, splits, interpret)


def split_count(programs: int, capacity: int, block_n: int, processors: int) -> int:
    """Runs to cut each group's keys into, so that the device is full: by the shape alone.

    Args:
        programs: Of the launch without a split.
        capacity: Keys of a group at most.
        block_n: Keys of one step.
        processors: Multiprocessors.
    """
    wanted = processors * PROGRAMS_PER_PROCESSOR // max(programs, 1)
    return max(1, min(wanted, -(-capacity // block_n), MAX_SPLITS))


def dtype_name(dtype: torch.dtype) -> Dtype:
    """Name of a dtype that the kernels compute in.

    Raises:
        KeyError: For any other.
    """
    names: dict[torch.dtype, Dtype] = {
        torch.float32: "float32",
        torch.float16: "float16",
        torch.bfloat16: "bfloat16",
    }
    return names[dtype]
