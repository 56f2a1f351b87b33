"""Expanded and absorbed attention: the test table of seed 2, and its named pitfalls as faults that must be found."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.gradcheck import GradcheckError

from tests.convert.support import SEEDED, normal
from tests.mla.attention_checks import CHECKS, chunked
from tests.mla.attention_mutants import PITFALLS, REAL, SOURCES, damaged, imported
from tests.mla.attention_stock import LENGTH, SIZES, difference, factors_of, stock_layer
from tests.tolerances import ABSORBED_FLOAT64


@pytest.mark.parametrize("name", CHECKS)
def test_of_the_table(name: str) -> None:
    CHECKS[name](REAL)


@pytest.mark.parametrize(("pitfall", "check"), [(n, c) for n, found in PITFALLS.items() for c in found.caught_by])
def test_a_named_pitfall_is_found(pitfall: str, check: str) -> None:
    with imported(damaged(PITFALLS[pitfall])) as modules, pytest.raises((AssertionError, GradcheckError)):
        CHECKS[check](modules)


def test_an_undamaged_copy_passes() -> None:
    with imported(SOURCES) as modules:
        for name in {check for found in PITFALLS.values() for check in found.caught_by}:
            CHECKS[name](modules)


def test_all_eleven_pitfalls_are_here() -> None:
    assert [name[:3] for name in PITFALLS] == [f"s{number:02d}" for number in range(1, 12)]


@SEEDED
@given(cuts=st.sets(st.integers(1, LENGTH - 1)), pads=st.integers(0, LENGTH), bottleneck=st.booleans())
def test_any_chunking_with_any_left_padding(cuts: set[int], pads: int, bottleneck: bool) -> None:
    factors = factors_of(REAL, stock_layer(bottleneck=bottleneck, bias=True))
    edges = [0, *sorted(cuts), LENGTH]
    chunks = tuple(after - before for before, after in pairwise(edges))
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    keep[0, :pads] = False

    whole, _ = chunked(REAL, factors, (LENGTH,), "expanded", keep)

    for form in ("expanded", "absorbed", "contracted"):
        found, _ = chunked(REAL, factors, chunks, form, keep)
        assert difference(found, whole) < ABSORBED_FLOAT64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_of_the_factors_is_kept(dtype: torch.dtype) -> None:
    att = REAL.attention
    state = {name: tensor.to(dtype) for name, tensor in stock_layer().state_dict().items()}
    rope = att.Rope(torch.ones(SIZES["rope"] // 2, dtype=torch.float64), True)
    factors = REAL.stock.stock_factors(state, REAL.stock.StockShape(SIZES["heads"], SIZES["nope"], rope, 1e-6))
    inputs = normal(1, 3, SIZES["hidden"], seed=3).to(dtype)

    step = att.absorbed(factors, inputs, torch.arange(3)[None])

    assert {step.output.dtype, step.held.latent.dtype, step.held.rope.dtype, step.weights.dtype} == {dtype}
