"""Figures from sums by window: calibration error and buckets by hand, intervals, what is not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_convert.errors import CheckFailed
from mla_convert.eval.bootstrap import WindowScores, bootstrap, figures
from mla_convert.eval.token_scores import TokenScores, score_tokens
from mla_convert.eval.window_table import ECE_BINS, WindowTable, bucket_bounds, position_buckets
from mla_convert.manifests.evaluation.figure import Resampling
from tests.tolerances import FLOAT64_ALGEBRA

RESAMPLING = Resampling(resamples=200, confidence=0.95, seed=3)


def scored(tokens: int, seed: int, vocabulary: int = 9) -> TokenScores:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(tokens, vocabulary, generator=generator) * 3
    target = source + torch.randn(tokens, vocabulary, generator=generator)
    return score_tokens(source, target, torch.randint(vocabulary, (tokens,), generator=generator))


def ece_by_hand(confidence: list[float], right: list[bool]) -> float:
    """Bin by bin as the definition has it: weights times |accuracy − mean confidence|."""
    total = 0.0
    for number in range(15):
        low, high = number / 15, (number + 1) / 15
        rows = [i for i, x in enumerate(confidence) if low <= x < high or (number == 14 and x == 1)]
        if rows:
            accuracy = sum(right[i] for i in rows) / len(rows)
            mean = sum(confidence[i] for i in rows) / len(rows)
            total += len(rows) / len(confidence) * abs(accuracy - mean)
    return total


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_the_calibration_error_is_that_of_all_tokens_in_fifteen_bins(sizes: list[int], seed: int) -> None:
    windows = [scored(size, seed + number) for number, size in enumerate(sizes)]
    found = WindowTable.of(windows).figures("text", RESAMPLING)

    for side in ("source", "target"):
        confidence = [x for window in windows for x in getattr(window, f"{side}_confidence").tolist()]
        right = [x for window in windows for x in getattr(window, f"{side}_right").tolist()]
        assert found[f"ece_{side}"].value == pytest.approx(
            ece_by_hand(confidence, right), rel=FLOAT64_ALGEBRA, abs=FLOAT64_ALGEBRA
        )


def test_errors_of_two_windows_in_one_bin_cancel_as_they_would_among_tokens() -> None:
    """Half right at confidence 0.5 is calibrated, though neither window is by itself."""
    one, other = scored(1, 0), scored(1, 1)
    half = torch.tensor([0.5], dtype=torch.float64)
    windows = [
        TokenScores(**{**vars(one), "source_confidence": half, "source_right": torch.tensor([True])}),
        TokenScores(**{**vars(other), "source_confidence": half, "source_right": torch.tensor([False])}),
    ]
    table = WindowTable.of(windows)

    assert table.figures("text", RESAMPLING)["ece_source"].value == 0
    assert table.take([0]).figures("text", RESAMPLING)["ece_source"].value == 0.5
    assert table.source_gap.shape == (2, ECE_BINS)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 1.0 + 2**-52])
def test_the_ends_of_probability_have_a_bin(confidence: float) -> None:
    window = TokenScores(**{**vars(scored(1, 0)), "source_confidence": torch.tensor([confidence]).double()})

    assert np.isfinite(WindowTable.of([window]).source_gap).all()


def test_figures_and_intervals_are_those_of_the_plain_evaluation() -> None:
    windows = [scored(20, seed) for seed in range(6)]
    table = WindowTable.of(windows)
    plain = WindowScores(table.tokens, table.source_nll, table.target_nll, table.kl, table.top1)
    expected, ends = figures(plain), bootstrap(plain, RESAMPLING.seed, RESAMPLING.resamples)
    found = table.figures("text", RESAMPLING)

    assert ends is not None
    for ours, theirs in (
        ("source_perplexity", "source_perplexity"),
        ("target_perplexity", "target_perplexity"),
        ("ratio", "ratio"),
        ("kl", "kl"),
        ("top1", "top1_agreement"),
    ):
        interval = getattr(ends, theirs)
        assert vars(found[ours]) == {"value": getattr(expected, theirs), "low": interval.low, "high": interval.high}
    assert found["top1"].value <= found["top5"].value


def test_a_single_window_has_no_interval() -> None:
    for figure in WindowTable.of([scored(20, 0)]).figures("text", RESAMPLING).values():
        assert (figure.low, figure.high) == (None, None)


def test_a_perplexity_beyond_all_numbers_is_refused_with_the_text() -> None:
    window = scored(4, 0)
    broken = TokenScores(**{**vars(window), "target_nll": torch.full((4,), 800.0, dtype=torch.float64)})

    with pytest.raises(CheckFailed, match="wiki: the target perplexity is not finite"):
        WindowTable.of([broken]).figures("wiki", RESAMPLING)


@pytest.mark.parametrize(
    ("length", "bounds"),
    [
        (2, [(1, 1)]),
        (16, [(1, 15)]),
        (17, [(1, 15), (16, 16)]),
        (100, [(1, 15), (16, 31), (32, 63), (64, 99)]),
    ],
)
def test_buckets_are_powers_of_two_up_to_the_last_position(length: int, bounds: list[tuple[int, int]]) -> None:
    assert bucket_bounds(length) == bounds


@given(length=st.integers(2, 70), stride=st.integers(1, 70), seed=st.integers(0, 100))
def test_each_bucket_has_the_tokens_at_its_positions(length: int, stride: int, seed: int) -> None:
    later = max(1, length - min(stride, length))
    firsts = [1, later, later]
    windows = [scored(length - first, seed + number) for number, first in enumerate(firsts)]
    found = {bucket.first: bucket for bucket in position_buckets(windows, firsts, length, "text", RESAMPLING)}

    assert sum(bucket.tokens for bucket in found.values()) == sum(length - first for first in firsts)
    for first, last in bucket_bounds(length):
        rows = [
            (float(window.source_nll[at - start]), float(window.target_nll[at - start]), float(window.kl[at - start]))
            for window, start in zip(windows, firsts, strict=True)
            for at in range(max(first, start), last + 1)
        ]
        bucket, count = found[first], len(rows)
        source, target, kl = (math.fsum(row[part] for row in rows) / count for part in range(3))
        assert (bucket.last, bucket.tokens) == (last, count)
        assert [bucket.source_perplexity, bucket.target_perplexity, bucket.ratio.value, bucket.kl.value] == (
            pytest.approx([math.exp(source), math.exp(target), math.exp(target - source), kl], rel=FLOAT64_ALGEBRA)
        )


def test_a_bucket_that_one_window_alone_scores_has_no_interval() -> None:
    windows = [scored(39, 0), scored(8, 1)]
    early, middle, late = position_buckets(windows, [1, 32], 40, "text", RESAMPLING)

    assert (early.ratio.low, middle.kl.high) == (None, None)
    assert late.ratio.low is not None
    assert position_buckets(windows[1:], [32], 40, "text", RESAMPLING)[0].first == 32
