"""Spearman's rank correlation: whether one measure puts plans in the same order as another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def average_ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 1 on, equal values sharing the mean of the ranks that they take up."""
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return ranks


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's correlation of the average ranks (Spearman 1904).

    Args:
        first: Values of one measure.
        second: Values of the other, in the same order.

    Returns:
        -1 to 1; None for fewer than two values or where one measure has no order at all.

    Raises:
        ValueError: For lists of different lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values beside {len(second)}")
    if len(first) < 2:
        return None
    a, b = (ranks - ranks.mean() for ranks in (average_ranks(first), average_ranks(second)))
    size = float(np.sqrt((a @ a) * (b @ b)))
    return None if size == 0 else float(a @ b) / size
