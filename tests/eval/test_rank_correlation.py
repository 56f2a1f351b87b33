from __future__ import annotations

import pytest

from mla_convert.eval.rank_correlation import average_ranks, spearman


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    assert average_ranks([10.0, 0.0, 10.0, 30.0, 10.0]).tolist() == [3.0, 1.0, 3.0, 5.0, 3.0]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3], [10, 100, 1000], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        # 1 - 6 Σd² / n(n² - 1) with d = (0, 1, 1, 0)
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
        # By hand, with ties: ranks (1, 2.5, 2.5, 4) and (1, 2, 3, 4).
        ([1, 2, 2, 3], [1, 2, 3, 4], 4.5 / (4.5 * 5) ** 0.5),
        ([1, 1, 1], [1, 2, 3], None),
        ([1], [1], None),
        ([], [], None),
    ],
)
def test_correlation_of_ranks(first: list[float], second: list[float], expected: float | None) -> None:
    assert spearman(first, second) == (None if expected is None else pytest.approx(expected, abs=1e-12))
    assert spearman(second, first) == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_lists_of_different_lengths_are_a_fault() -> None:
    with pytest.raises(ValueError, match="3 values beside 2"):
        spearman([1, 2, 3], [1, 2])
