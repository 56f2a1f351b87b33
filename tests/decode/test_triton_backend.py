"""What the Triton backend says about itself: what it cannot run, and what a launch takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_convert.decode.abi import DecodeCall
from mla_convert.decode.ladder import LadderCase, build
from mla_convert.decode.rows import RowFormat
from mla_convert.decode.scheduling import Schedule, ScheduleKey
from mla_convert.decode.tiles import TileConfig
from mla_convert.decode.triton_backend import TritonBackend, compiled_kernels, interpreted_kernels
from mla_convert.decode.triton_launch import MAX_SPLITS, Geometry, plan_launch
from mla_convert.errors import InputRefused

triton = pytest.importorskip("triton")

INTERPRETED = TritonBackend(interpret=True)


def small(**changes: object) -> DecodeCall:
    return build(LadderCase(**{"dtype": "float32", "heads": 2, "lengths": (5, 20), **changes}))  # type: ignore[arg-type]


def test_the_names() -> None:
    assert (TritonBackend().name, INTERPRETED.name) == ("triton", "triton-interpret")


def test_a_cpu_call_is_no_call_for_the_compiled_kernels() -> None:
    assert TritonBackend().unfit(small()) == "the tensors are on cpu"
    assert INTERPRETED.unfit(small()) is None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (replace(small(), q=small().q.double()), "float64"),
        (replace(small(), q=small().q.bfloat16()), "rounded"),
        (small(d_c=1040, d_r=0, lengths=(1,)), "more than 1024"),
        (small(d_c=16, d_r=136, lengths=(1,)), "more than 1024+128"),
        (small(dtype="float32", d_c=1024, d_r=128, heads=64, lengths=(1,)), None),
    ],
)
def test_reasons(call: DecodeCall, reason: str | None) -> None:
    found = INTERPRETED.unfit(call)

    assert found == reason or (found is not None and reason is not None and reason in found)


def test_fp8_rows_whose_scales_no_pointer_reaches_are_named() -> None:
    call = small(fp8=True, d_c=144, d_r=16)
    uneven = RowFormat("uneven", 1, 144, 16, "float8_e4m3fn", "bfloat16", 48)

    assert "no power of two" in str(INTERPRETED.unfit(replace(call, format=uneven)))
    shifted = torch.zeros(call.pool.numel() + 1, dtype=torch.uint8)[1:].view(call.pool.shape)
    assert "4-byte words" in str(INTERPRETED.unfit(replace(call, pool=shifted)))


def test_too_many_splits_are_named() -> None:
    assert "splits" in str(TritonBackend(interpret=True, splits=MAX_SPLITS + 1).unfit(small()))


def test_the_interpreted_copy_leaves_the_compiled_kernels_alone() -> None:
    INTERPRETED.run(small())

    assert type(compiled_kernels().split_kernel).__name__ == "JITFunction"
    assert type(interpreted_kernels().split_kernel).__name__ == "InterpretedFunction"
    assert not triton.knobs.runtime.interpret


def test_the_grid_knows_no_length() -> None:
    one = small(lengths=(5, 20))
    other = replace(one, seq_lens=torch.tensor([0, 1], dtype=torch.int32))

    assert INTERPRETED.plan(one) == INTERPRETED.plan(other)


def test_splits_fill_the_device_and_no_more() -> None:
    def splits(batch: int, length: int, heads: int = 16) -> int:
        form = RowFormat.plain(512, 64, "bfloat16")
        geometry = Geometry(batch, 1, heads, form, "bfloat16", 64, 0, False, False, False, length)
        return plan_launch(geometry, 90, 132).splits

    assert splits(1, 16384) == MAX_SPLITS
    assert splits(1, 64) == 2
    assert splits(128, 4096) == 2
    assert splits(4096, 4096) == 1


def test_the_report_of_an_interpreted_launch() -> None:
    report = TritonBackend(interpret=True, splits=2).describe(small(d_c=144, d_r=48))

    assert (report.backend, report.arch, report.splits, report.page_size) == ("triton-interpret", "interpreter", 2, 16)
    assert report.padded_bytes == 4 * 16  # 48 rotary numbers in a block of 64; 144 = 128 + 16 needs none
    assert report.workspace_bytes == 4 * 2 * 2 * 2 * 145
    assert report.resources is None


def test_a_schedule_of_other_lengths_is_refused() -> None:
    call = small()
    schedule = Schedule(ScheduleKey.of(call), 2, TileConfig(16, 16, 4, 1))
    longer = replace(call, seq_lens=call.seq_lens + 1)

    assert INTERPRETED.run(call, schedule).out.shape == (2, 1, 2, 64)
    with pytest.raises(InputRefused, match="lengths"):
        INTERPRETED.run(longer, schedule)
