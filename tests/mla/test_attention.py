"""Expanded and absorbed attention: the test table of seed 2, and its named pitfalls as faults that must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.gradcheck import GradcheckError

from mla_convert.errors import InputRefused
from tests.convert.support import SEEDED, normal
from tests.mla.attention_checks import CHECKS, chunked
from tests.mla.attention_mutants import PITFALLS, REAL, SOURCES, damaged, imported
from tests.mla.attention_stock import LENGTH, SIZES, difference, factors_of, stock_layer
from tests.tolerances import ABSORBED_FLOAT64

FACTORS = REAL.attention.MLAFactors(
    q_down=None,
    q_down_bias=None,
    q_norm=None,
    q_up=torch.ones(3, 12, 16),
    kv_down=torch.ones(12, 16),
    kv_down_bias=None,
    latent_norm=None,
    w_uk=torch.ones(3, 8, 8),
    w_uv=torch.ones(3, 6, 8),
    w_o=torch.ones(3, 16, 6),
    output_bias=None,
    rope=REAL.attention.Rope(torch.ones(2), True),
    scale=1.0,
)


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


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "rows of the query": (
        lambda: replace(FACTORS, q_up=FACTORS.q_up[:, 1:]),
        "q_up: a tensor of another size; expected (3, 12, 16); found (3, 11, 16)",
    ),
    "rows of keys and values": (
        lambda: replace(FACTORS, kv_down=FACTORS.kv_down[1:]),
        "kv_down: a tensor of another size; expected (12, 16); found (11, 16)",
    ),
    "values": (
        lambda: replace(FACTORS, w_uv=FACTORS.w_uv[..., 1:]),
        "w_uv: a tensor of another size; expected (3, 6, 8); found (3, 6, 7)",
    ),
    "heads of the output": (
        lambda: replace(FACTORS, w_o=FACTORS.w_o[1:]),
        "w_o: a tensor of another size; expected (3, 16, 6); found (2, 16, 6)",
    ),
    "scale": (
        lambda: replace(FACTORS, scale=-1.0),
        "scale: a softmax scale; expected a positive number; found -1.0",
    ),
    "rows of one chunk": (
        lambda: REAL.attention.LatentRows(torch.ones(1, 2, 8), torch.ones(1, 2, 4)).append(
            REAL.attention.LatentRows(torch.ones(1, 3, 8), torch.ones(1, 2, 4))
        ),
        "cache: latent and rotary rows of one chunk; expected 3 tokens each; found 2 rotary rows",
    ),
    "more queries than keys": (
        lambda: REAL.attention.visibility(3, 2, None),
        "visibility: queries without keys; expected at most 2; found 3",
    ),
    "padding mask": (
        lambda: REAL.attention.visibility(2, 3, torch.ones(1, 2)),
        "keep: a padding mask; expected (B, 3) bool; found (1, 2) torch.float32",
    ),
    "positions": (
        lambda: REAL.attention.expanded(FACTORS, torch.ones(1, 3, 16), torch.arange(2)[None]),
        "positions: a tensor of another size; expected (1, 3); found (1, 2)",
    ),
    "tensors of a layer": (
        lambda: REAL.stock.stock_factors(
            {"o_proj.weight": torch.ones(1, 1), "a": torch.ones(1)},
            REAL.stock.StockShape(3, 8, FACTORS.rope, 1e-6),
        ),
        (
            "the tensors of an MLA layer; expected kv_a_layernorm.weight, kv_a_proj_with_mqa.weight, "
            "kv_b_proj.weight, o_proj.weight, q_proj.weight; found a, o_proj.weight"
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_what_was_expected_and_found(name: str) -> None:
    attempt, says = REFUSALS[name]
    with pytest.raises(InputRefused) as caught:
        attempt()
    assert str(caught.value) == says
