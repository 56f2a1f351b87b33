"""Every architecture's code is compiled here, without a GPU, and must fit its registers and shared memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mla_convert.decode.ladder import LadderCase
from mla_convert.decode.rows import RowFormat
from mla_convert.decode.tiles import (
    SHARED_MEMORY_LIMIT,
    Dtype,
    LatentBlocks,
    TileConfig,
    latent_blocks,
    shared_memory_limit,
    tile_bytes,
    tile_config,
)
from mla_convert.decode.triton_aot import (
    ARCHITECTURES,
    CompiledCell,
    Resources,
    compile_cell,
    compile_merge,
    decode_geometry,
)
from mla_convert.decode.triton_launch import plan_launch

triton = pytest.importorskip("triton")

WIDE = RowFormat.plain(512, 64, "bfloat16")
FP8 = LadderCase(fp8=True, d_c=512, d_r=64).form


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path) -> object:
    """Compile anew instead of reading what an earlier run left in the user's cache."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield


@cache
def wide(arch: int, heads: int) -> CompiledCell:
    return compile_cell(decode_geometry(WIDE, heads=heads), arch)


def test_the_limits_are_the_architectures() -> None:
    assert tuple(SHARED_MEMORY_LIMIT) == ARCHITECTURES
    assert [limit // 1024 for limit in SHARED_MEMORY_LIMIT.values()] == [163, 99, 99, 227, 227, 99]
    assert shared_memory_limit(103) == shared_memory_limit(100)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("heads", [16, 128])
def test_512_64_spills_nothing_and_fits(arch: int, heads: int) -> None:
    cell = wide(arch, heads)

    assert cell.faults() == []
    assert cell.resources.registers <= 255
    assert cell.resources.asynchronous_copies
    assert tile_bytes(cell.plan.tile, 512, 64, "bfloat16") <= cell.resources.shared_memory


@pytest.mark.parametrize(("arch", "unit"), [(90, "wgmma"), (100, "tcgen05.mma"), (80, "mma.sync")])
def test_many_heads_use_the_architectures_matrix_unit(arch: int, unit: str) -> None:
    assert wide(arch, 128).resources.matrix_unit == unit


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_the_656_byte_row_spills_nothing_and_fits(arch: int) -> None:
    assert compile_cell(decode_geometry(FP8, heads=32), arch).faults() == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"spill_stores": 4}, "4+0 bytes spilled"),
        ({"spill_loads": 4}, "0+4 bytes spilled"),
        ({"shared_memory": 163 * 1024 + 1}, "166913 bytes of shared memory of 166912"),
    ],
)
def test_the_gate_sees_each_resource(changes: dict[str, int], fault: str) -> None:
    right = Resources(200, 0, 0, 163 * 1024, "mma.sync", True)
    plan = plan_launch(decode_geometry(WIDE, heads=16), 80, 108)
    assert CompiledCell(80, plan, right).faults() == []
    assert CompiledCell(80, plan, replace(right, **changes)).faults() == [fault]


@pytest.mark.parametrize("rows", ["bfloat16", "fp8"])
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        (80, {"page_size": 1}),
        (80, {"page_size": 16}),
        (90, {"page_size": 16}),
        (80, {"sparse": True, "extra_page_size": 64, "sinks": True}),
        (90, {"sparse": True, "extra_page_size": 64, "sinks": True}),
        (90, {"sparse": True}),
        (100, {"sparse": True, "extra_page_size": 64, "sinks": True}),
        (120, {"sparse": True, "extra_page_size": 64, "sinks": True}),
    ],
)
def test_scattered_rows_of_512_64_spill_nothing_and_fit(arch: int, changes: dict[str, int | bool], rows: str) -> None:
    geometry = decode_geometry(WIDE if rows == "bfloat16" else FP8, heads=128)
    geometry = replace(geometry, **changes)  # type: ignore[arg-type]

    cell = compile_cell(geometry, arch)

    assert cell.faults() == []
    assert cell.resources.spill_stores == cell.resources.spill_loads == 0


@pytest.mark.parametrize(
    ("d_c", "d_r", "heads", "tokens", "arch"),
    [(144, 48, 9, 1, 90), (384, 32, 32, 2, 89), (256, 32, 16, 4, 90), (1024, 128, 64, 1, 89)],
)
def test_other_shapes_fit(d_c: int, d_r: int, heads: int, tokens: int, arch: int) -> None:
    geometry = decode_geometry(RowFormat.plain(d_c, d_r, "bfloat16"), heads=heads, tokens=tokens)

    assert compile_cell(geometry, arch).faults() == []


def test_a_sparse_call_with_a_second_pool_and_sinks_compiles_without_a_spill() -> None:
    geometry = replace(decode_geometry(FP8, heads=16), sparse=True, sinks=True, extra_page_size=64, causal=False)

    assert compile_cell(geometry, 90).resources.spill_stores == 0


@pytest.mark.parametrize("splits", [2, 128])
def test_the_merge_fits_without_a_spill(splits: int) -> None:
    resources = compile_merge(replace(decode_geometry(WIDE, heads=9), sinks=True), 90, splits)

    assert (resources.spill_stores, resources.spill_loads) == (0, 0)
    assert resources.registers <= 128
    assert resources.shared_memory <= 8 * 1024


@pytest.mark.parametrize(("dtype", "spill"), [("float32", 16), ("float16", 0)])
def test_the_other_dtypes_compile_and_fit(dtype: Dtype, spill: int) -> None:
    """Float32 has no tensor cores here (its bar is 4e-6) and no gate; some bytes spill."""
    cell = compile_cell(decode_geometry(RowFormat.plain(512, 64, dtype), heads=9, dtype=dtype), 86)

    assert cell.resources.shared_memory <= shared_memory_limit(86)
    assert cell.resources.spill_stores <= spill


def test_the_gate_sees_a_tile_that_is_too_large() -> None:
    cell = compile_cell(decode_geometry(WIDE, heads=128), 89, TileConfig(64, 64, 8, 2))

    assert len(cell.faults()) == 2
    assert "spilled" in cell.faults()[0]
    assert "shared memory" in cell.faults()[1]


def test_only_the_wgmma_tile_may_spill_and_only_sixteen_bytes() -> None:
    cell = wide(90, 128)

    def spilled(size: int, unit: str) -> CompiledCell:
        return replace(cell, resources=replace(cell.resources, spill_stores=size, matrix_unit=unit))

    assert spilled(16, "wgmma").faults() == []
    assert spilled(17, "wgmma").faults() != []
    assert spilled(4, "mma.sync").faults() != []


@pytest.mark.parametrize(
    ("d_c", "d_r", "blocks"),
    [
        (512, 64, LatentBlocks(512, 0, 64)),
        (144, 48, LatentBlocks(128, 16, 64)),
        (384, 32, LatentBlocks(256, 128, 32)),
        (72, 0, LatentBlocks(64, 16, 0)),
        (255, 8, LatentBlocks(256, 0, 16)),
        (16, 24, LatentBlocks(16, 0, 32)),
    ],
)
def test_blocks_hold_the_row_with_little_padding(d_c: int, d_r: int, blocks: LatentBlocks) -> None:
    assert latent_blocks(d_c, d_r) == blocks


def test_every_half_precision_tile_can_be_launched_on_every_architecture() -> None:
    for arch in ARCHITECTURES:
        for d_c in (16, 64, 72, 96, 128, 144, 152, 256, 384, 512, 576, 768, 1024):
            for d_r in (0, 8, 24, 64, 128):
                for rows in (1, 9, 16, 28, 32, 64, 512):
                    tile = tile_config(arch, rows, d_c, d_r, "bfloat16")
                    assert tile_bytes(tile, d_c, d_r, "bfloat16") <= shared_memory_limit(arch), (arch, d_c, d_r, rows)
