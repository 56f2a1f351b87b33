"""Intervals over windows: bounds, pairing, determinism and coverage."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_convert.eval.bootstrap import Interval, WindowScores, bootstrap, figures
from tests.tolerances import FLOAT64_ALGEBRA

NAMES = ("source_perplexity", "target_perplexity", "ratio", "kl", "top1_agreement")


def make_scores(windows: int, seed: int = 0, spread: float = 0.3, shift: float = 0.2) -> WindowScores:
    """Windows of a text whose difficulty varies much more than what the conversion costs."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(200, 512, windows).astype(np.float64)
    difficulty = rng.normal(3.0, spread, windows)
    cost = rng.normal(shift, spread / 10, windows)
    return WindowScores(
        tokens=tokens,
        source_nll=tokens * difficulty,
        target_nll=tokens * (difficulty + cost),
        kl=tokens * np.abs(cost),
        agreement=np.floor(tokens * rng.uniform(0.6, 0.9, windows)),
    )


def test_figures_weigh_tokens_not_windows() -> None:
    scores = WindowScores(
        tokens=np.array([1.0, 3.0]),
        source_nll=np.array([2.0, 3.0]),
        target_nll=np.array([2.0, 6.0]),
        kl=np.array([0.0, 1.0]),
        agreement=np.array([1.0, 1.0]),
    )
    found = figures(scores)

    assert found.source_perplexity == pytest.approx(math.exp(5 / 4), rel=FLOAT64_ALGEBRA)
    assert found.target_perplexity == pytest.approx(math.exp(8 / 4), rel=FLOAT64_ALGEBRA)
    assert found.ratio == pytest.approx(math.exp(3 / 4), rel=FLOAT64_ALGEBRA)
    assert (found.kl, found.top1_agreement) == (0.25, 0.5)


@given(windows=st.integers(2, 30), seed=st.integers(0, 1000))
def test_intervals_are_ordered_and_inside_the_range_of_the_windows(windows: int, seed: int) -> None:
    scores = make_scores(windows, seed)
    intervals = bootstrap(scores, seed, resamples=200)

    assert intervals is not None
    for name in NAMES:
        interval = getattr(intervals, name)
        alone = [getattr(figures(one(scores, index)), name) for index in range(windows)]
        slack = 1 + FLOAT64_ALGEBRA
        assert min(alone) / slack <= interval.low <= interval.high <= max(alone) * slack


def one(scores: WindowScores, index: int) -> WindowScores:
    return WindowScores(**{name: values[index : index + 1] for name, values in vars(scores).items()})


@given(seed=st.integers(0, 1000))
def test_equal_windows_have_no_spread(seed: int) -> None:
    single = one(make_scores(1, seed), 0)
    scores = WindowScores(**{name: np.repeat(values, 7) for name, values in vars(single).items()})
    intervals, found = bootstrap(scores, seed, resamples=50), figures(scores)

    assert intervals is not None
    for name in NAMES:
        value, interval = getattr(found, name), getattr(intervals, name)
        assert interval.low == pytest.approx(value, rel=FLOAT64_ALGEBRA)
        assert interval.high == pytest.approx(value, rel=FLOAT64_ALGEBRA)


def test_a_model_against_itself_has_ratio_one_however_hard_the_text_varies() -> None:
    scores = make_scores(12, spread=1.0)
    intervals = bootstrap(replace(scores, target_nll=scores.source_nll), seed=0)

    assert intervals is not None
    assert intervals.ratio == Interval(1.0, 1.0)


def test_the_ratio_is_paired() -> None:
    """Drawn apart, the two perplexities' spreads would add up instead of cancelling."""
    intervals = bootstrap(make_scores(20, spread=0.5), seed=0)

    assert intervals is not None
    width = intervals.ratio.high / intervals.ratio.low
    alone = intervals.source_perplexity.high / intervals.source_perplexity.low
    assert width - 1 < (alone - 1) / 5


def test_the_seed_decides() -> None:
    scores = make_scores(10)

    assert bootstrap(scores, 1) == bootstrap(scores, 1) != bootstrap(scores, 2)


def test_a_single_window_has_no_interval() -> None:
    assert bootstrap(make_scores(1), seed=0) is None


def test_more_confidence_is_wider() -> None:
    narrow, wide = (bootstrap(make_scores(10), 0, confidence=share) for share in (0.5, 0.99))

    assert narrow is not None
    assert wide is not None
    assert wide.ratio.low < narrow.ratio.low < narrow.ratio.high < wide.ratio.high


def test_intervals_cover_the_true_value_about_as_often_as_they_say() -> None:
    """300 texts of 40 windows, true cost 0.2 nat; percentile intervals of few windows are a bit narrow."""
    covered = 0
    for seed in range(300):
        intervals = bootstrap(make_scores(40, seed), seed, resamples=400)
        assert intervals is not None
        covered += intervals.ratio.low <= math.exp(0.2) <= intervals.ratio.high

    assert 0.89 <= covered / 300 <= 0.99
