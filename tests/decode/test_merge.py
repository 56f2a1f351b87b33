from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_convert.decode.merge import PartialState, apply_sinks, merge_outputs, merge_states
from mla_convert.decode.rows import RowFormat
from mla_convert.decode.torch_backend import TorchBackend
from mla_convert.errors import InputRefused
from tests.decode.calls import Shape, make_call
from tests.tolerances import DECODE_FLOAT32, DECODE_LSE, FLOAT64_ALGEBRA


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=6),
    st.sampled_from([1.0, 50.0, 2000.0]),
    st.integers(0, 99),
)
def test_any_split_gives_the_softmax_of_the_whole(sizes: list[int], spread: float, seed: int) -> None:
    """Float64, scores up to thousands apart, empty parts anywhere."""
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(3, sum(sizes), generator=generator, dtype=torch.float64)
    values = torch.randn(sum(sizes), 5, generator=generator, dtype=torch.float64)
    parts = [
        PartialState.of_scores(part, rows)
        for part, rows in zip(scores.split(sizes, dim=-1), values.split(sizes), strict=True)
    ]

    out, lse = merge_states(parts).normalised()
    also_out, also_lse = merge_outputs([part.normalised() for part in parts])

    if sum(sizes):
        assert torch.allclose(out, torch.softmax(scores, -1) @ values, rtol=0, atol=FLOAT64_ALGEBRA)
        assert torch.allclose(lse, torch.logsumexp(scores, -1), rtol=FLOAT64_ALGEBRA, atol=FLOAT64_ALGEBRA)
    else:
        assert torch.equal(out, torch.zeros(3, 5, dtype=torch.float64))
        assert bool(torch.isneginf(lse).all())
    assert torch.allclose(also_out, out, rtol=0, atol=FLOAT64_ALGEBRA)
    assert torch.equal(torch.isneginf(also_lse), torch.isneginf(lse))


def test_an_empty_part_counts_for_nothing_whatever_it_holds() -> None:
    full = PartialState(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([[3.0]]))
    empty = PartialState(torch.tensor([-math.inf]), torch.tensor([math.nan]), torch.tensor([[math.nan]]))

    for parts in ([full, empty], [empty, full]):
        merged = merge_states(parts)
        assert (merged.m.item(), merged.l.item(), merged.o.item()) == (1, 2, 3)
    out, lse = merge_states([empty, empty]).normalised()
    assert (out.item(), lse.item()) == (0, -math.inf)


def test_parts_of_a_paged_history_merge_to_the_whole_call() -> None:
    """(out, lse) of any two backends' calls over disjoint pages."""
    whole = make_call(Shape(RowFormat.plain(96, 24, "float32"), (129,), 9, page_size=16))
    backend = TorchBackend()
    parts = []
    for first, last in ((0, 2), (2, 2), (2, 9)):
        held = max(0, min(129 - 16 * first, 16 * (last - first)))
        table, lengths = whole.block_table[:, first:last], torch.tensor([held])
        part = backend.run(replace(whole, block_table=table, seq_lens=lengths, causal=False))
        parts.append((part.out, part.lse))

    out, lse = merge_outputs(parts)

    expected = backend.run(whole)
    assert torch.allclose(out, expected.out, rtol=0, atol=DECODE_FLOAT32)
    assert torch.allclose(lse, expected.lse, rtol=0, atol=DECODE_LSE)
    mean = torch.stack([part_out for part_out, _ in parts]).mean(0)
    assert float((mean - expected.out).abs().max()) > 1e3 * DECODE_FLOAT32


def test_parts_that_do_not_fit_are_refused() -> None:
    one = PartialState.empty((2,), 3, torch.float32, torch.device("cpu"))

    with pytest.raises(InputRefused, match="do not fit"):
        merge_states([])
    with pytest.raises(InputRefused, match="do not fit"):
        merge_states([one, PartialState.empty((2,), 4, torch.float32, torch.device("cpu"))])


def test_a_sink_is_one_more_logit_without_a_value() -> None:
    scores, values = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    sinks = torch.tensor([0.3, 100.0, -100.0, -math.inf])
    out, lse = PartialState.of_scores(scores, values).normalised()

    found = apply_sinks(out, lse, sinks)

    extended = torch.softmax(torch.cat([scores, sinks[:, None].double()], -1), -1)[:, :-1] @ values
    assert torch.allclose(found, extended, rtol=0, atol=FLOAT64_ALGEBRA)
    nothing = apply_sinks(torch.zeros(1, 5), torch.tensor([-math.inf]), torch.tensor([-math.inf]))
    assert torch.equal(nothing, torch.zeros(1, 5))
