"""The Triton kernels in Triton's interpreter beside a float64 oracle: any shape, any split, poison all around."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_convert.decode.abi import DecodeCall, DecodeOutput, check_call
from mla_convert.decode.ladder import LSE_LIMIT, OUT_LIMIT, LadderCase, build, deviation, exact, ladder, pack_rows
from mla_convert.decode.rows import RowFormat
from mla_convert.decode.tiles import TileConfig
from mla_convert.decode.triton_backend import TritonBackend
from tests import tolerances

pytest.importorskip("triton")

CASES = ladder()
LONG = LadderCase(dtype="float32", lengths=(100_000,), heads=1, d_c=16, d_r=8, page_size=64, splits=2)
BARS = {
    "float32": tolerances.KERNEL_FLOAT32,
    "float16": tolerances.KERNEL_FLOAT16,
    "bfloat16": tolerances.KERNEL_BFLOAT16,
}


def run(call: DecodeCall, splits: int | None = None) -> DecodeOutput:
    backend = TritonBackend(interpret=True, splits=splits)
    check_call(call)
    assert backend.unfit(call) is None
    return backend.run(call)


def worst(found: DecodeOutput, expected: DecodeOutput) -> float:
    return (found.out.double() - expected.out.double()).abs().max().item()


def test_the_ladder_covers_what_conversions_produce() -> None:
    assert len(CASES) >= 24
    assert len({case.name for case in CASES}) == len(CASES)
    assert {9, 14, 28} <= {case.heads for case in CASES}
    assert {64, 72, 96, 144, 152, 384, 512, 1024} <= {case.d_c for case in CASES}
    assert {0, 8, 16, 24, 32, 40, 48, 64, 128} <= {case.d_r for case in CASES}
    assert {1, 16, 64} <= {case.page_size for case in CASES}
    assert {1, 2, 3, 4, 8} <= {case.tokens for case in CASES}
    assert BARS == OUT_LIMIT
    assert tolerances.KERNEL_LSE == LSE_LIMIT


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernels_equal_the_oracle(case: LadderCase) -> None:
    call = build(case)
    found, expected = run(call, case.splits), exact(call)

    assert found.out.dtype == call.q.dtype
    assert found.lse.dtype == torch.float32
    assert deviation(found, expected).out <= BARS[case.dtype]
    assert deviation(found, expected).lse <= tolerances.KERNEL_LSE


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_query_that_sees_nothing_gives_zero_and_minus_infinity(tokens: int) -> None:
    found = run(build(LadderCase(dtype="float32", lengths=(0, 1), tokens=tokens, sinks=True)), splits=2)

    assert torch.all(found.out[0] == 0)
    assert torch.all(found.lse[0] == float("-inf"))
    assert torch.all(found.lse[1, :-1] == float("-inf"))
    assert torch.all(found.lse[1, -1].isfinite())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_number_of_splits_changes_nothing_beyond_rounding(dtype: str) -> None:
    case = LadderCase(dtype=dtype, heads=9, tokens=2, lengths=(0, 5, 70, 129))  # type: ignore[arg-type]
    call = build(case)
    one = run(call, splits=1)

    for splits in (2, 3, 7):
        other = run(call, splits=splits)
        assert worst(other, one) <= tolerances.KERNEL_RESPLIT[dtype]
        assert torch.equal(other.lse.isinf(), one.lse.isinf())
        assert torch.allclose(other.lse, one.lse, rtol=0, atol=tolerances.KERNEL_LSE)


def test_the_places_of_the_pages_change_not_one_bit() -> None:
    call = build(LadderCase(heads=5, lengths=(0, 40, 65)))
    order = torch.randperm(len(call.pool), generator=torch.Generator().manual_seed(7))
    table = call.block_table.clone()
    named = table >= 0
    table[named] = order[table[named].long()].to(torch.int32)
    pool = torch.empty_like(call.pool)
    pool[order] = call.pool

    moved, found = run(replace(call, pool=pool, block_table=table), splits=2), run(call, splits=2)

    assert torch.equal(moved.out, found.out)
    assert torch.equal(moved.lse, found.lse)


def test_a_hundred_thousand_keys() -> None:
    call = build(LONG)
    backend = TritonBackend(interpret=True, splits=LONG.splits, tile=TileConfig(16, 512, 4, 1))  # few, long steps

    assert deviation(backend.run(call), exact(call)).within("float32")


def test_a_row_beyond_two_to_the_31st_byte_is_found() -> None:
    """Three pages a GiB apart; memory that nobody touches costs nothing."""
    form = LadderCase(fp8=True, d_c=16, d_r=8).form
    pool = torch.empty_strided((3, 2, form.row_bytes), (2**30, form.row_bytes, 1), dtype=torch.uint8)
    rows = torch.randn(2, 24, generator=torch.Generator().manual_seed(0))
    pool[2] = pack_rows(form, rows)
    table = torch.tensor([[2]], dtype=torch.int32)
    q = torch.randn(1, 1, 2, 24, generator=torch.Generator().manual_seed(1))
    call = DecodeCall(q, pool, form, table, torch.tensor([2], dtype=torch.int32), 0.2)

    assert deviation(run(call), exact(call)).within("float32")


def test_a_sink_without_end_takes_everything_and_none_takes_nothing() -> None:
    call = build(LadderCase(dtype="float32", heads=2, lengths=(20,)))
    sinks = torch.tensor([float("inf"), float("-inf")])
    plain = run(call)
    found = run(replace(call, sinks=sinks))

    assert torch.all(found.out[:, :, 0] == 0)
    assert torch.equal(found.out[:, :, 1], plain.out[:, :, 1])
    assert torch.equal(found.lse, plain.lse)


def test_strided_queries_and_wide_tables_are_read_as_they_are() -> None:
    call = build(LadderCase(dtype="float32", heads=3, lengths=(20, 33)))
    q = torch.full((2, 1, 3, 2 * call.q.shape[-1]), float("nan"))[..., ::2]
    q.copy_(call.q)
    table = torch.stack([call.block_table.long(), call.block_table.long()], dim=-1)[..., 0]

    found = run(replace(call, q=q, block_table=table, seq_lens=call.seq_lens.long()))

    assert torch.equal(found.out, run(call).out)


def test_the_interpreter_rounds_weights_as_the_tensor_cores_get_them() -> None:
    """Two keys, of which head h weighs the first with exp(−x_h) : 1; the weight alone is rounded, not the sum."""
    rows = torch.zeros(1, 2, 16)
    rows[0, 0, 0] = rows[0, 1, 1] = 1.0
    x = torch.linspace(0.25, 4.0, 32).bfloat16()
    q = torch.zeros(1, 1, 32, 16, dtype=torch.bfloat16)
    q[0, 0, :, 0] = -x
    one = torch.zeros(1, 1, dtype=torch.int32)
    form = RowFormat.plain(16, 0, "bfloat16")
    call = DecodeCall(q, rows.bfloat16(), form, one, torch.tensor([2], dtype=torch.int32), 1.0)
    weight = torch.exp(-x.double())
    rounded = (weight.bfloat16().double() / (1 + weight)).bfloat16()
    exactly = (weight / (1 + weight)).bfloat16()

    assert (rounded != exactly).sum() >= 4
    assert torch.equal(run(call, splits=1).out[0, 0, :, 0], rounded)


def test_fp8_rows_are_rounded_to_their_own_dtype_before_a_float32_query_sees_them() -> None:
    form = RowFormat("half", 1, 16, 8, "float8_e4m3fn", "float16", 128)
    case = LadderCase(dtype="float32", d_c=16, d_r=8, lengths=(33,), page_size=64)
    rows = torch.randn(1, 64, 24, generator=torch.Generator().manual_seed(3))
    table = torch.zeros(1, 1, dtype=torch.int32)
    call = replace(build(case), pool=pack_rows(form, rows), format=form, block_table=table)

    assert deviation(run(call), exact(call)).within("float32")
