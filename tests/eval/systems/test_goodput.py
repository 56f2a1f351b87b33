"""Medians, throughput and goodput by hand, and that goodput is never more than throughput."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_convert.eval.systems.goodput import Timing, goodput, objective, speed_rows, tokens_per_second
from mla_convert.eval.systems.sizes import Cell, Sizes
from mla_convert.manifests.evaluation.systems import ObjectiveLimit
from tests.tolerances import FLOAT64_ALGEBRA

LIMIT = ObjectiveLimit(prompt_tokens=16, ttft_s=1.0, tpot_s=0.1)
# In time; late to the first token; slow afterwards; exactly at both limits.
GOOD, LATE, SLOW, EDGE = (
    Timing(0.5, 0.05, 1.0, 10),
    Timing(1.5, 0.05, 2.0, 40),
    Timing(0.5, 0.20, 3.0, 20),
    Timing(1.0, 0.1, 2.0, 30),
)


def test_goodput_counts_the_tokens_in_time_over_all_seconds() -> None:
    runs = (GOOD, LATE, SLOW, EDGE)

    assert tokens_per_second(runs, 24) == 4 * 24 / 8
    assert goodput(runs, 24, LIMIT) == 2 * 24 / 8
    assert goodput((LATE, SLOW), 24, LIMIT) == 0


def test_the_objective_is_a_multiple_of_the_sources_medians_at_batch_one() -> None:
    source = {Cell(16, 1, 3): (GOOD, LATE, LATE), Cell(16, 8, 1): (SLOW,), Cell(9, 1, 2): (GOOD, SLOW)}

    found = objective(source, withheld=False)

    nine, sixteen = found.limits
    assert (nine.prompt_tokens, nine.ttft_s, nine.tpot_s) == (9, 0.75, pytest.approx(1.5 * 0.125, rel=FLOAT64_ALGEBRA))
    assert (sixteen.prompt_tokens, sixteen.ttft_s) == (16, 2.25)
    assert str(found.factor) in found.rule
    assert objective(source, withheld=True).limits == ()


def test_a_row_has_medians_of_times_and_the_most_of_memory() -> None:
    cells = (Cell(16, 1, 1), Cell(16, 2, 3))
    sizes = Sizes(cells, new_tokens=8)
    runs = {cells[0]: (EDGE,), cells[1]: (GOOD, LATE, SLOW)}

    _, row = speed_rows("target", runs, sizes, objective({cells[0]: (EDGE,)}, withheld=False))

    assert (row.ttft_s, row.tpot_s, row.peak_bytes) == (0.5, 0.05, 40)
    assert row.tokens_per_s == 2 * 8 * 3 / 6
    # Limits of 1.5 and 0.15 seconds: only the slow one misses them.
    assert row.goodput_tokens_per_s == 2 * 8 * 2 / 6


seconds = st.floats(min_value=1e-6, max_value=1e4, allow_nan=False)


@given(
    st.lists(st.builds(Timing, seconds, seconds, seconds, st.just(0)), min_size=1, max_size=9),
    st.integers(1, 512),
    seconds,
    seconds,
)
def test_goodput_is_never_above_throughput(runs: list[Timing], tokens: int, ttft: float, tpot: float) -> None:
    limit = ObjectiveLimit(prompt_tokens=1, ttft_s=ttft, tpot_s=tpot)

    found, all_tokens = goodput(runs, tokens, limit), tokens_per_second(runs, tokens)

    assert 0 <= found <= all_tokens
    in_time = [run.ttft_s <= ttft and run.tpot_s <= tpot for run in runs]
    assert (found == all_tokens) == all(in_time)
    assert (found == 0) == (not any(in_time))
