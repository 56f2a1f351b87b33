"""Percentile intervals by resampling windows, the same resample for every figure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DEFAULT_RESAMPLES = 2000
DEFAULT_CONFIDENCE = 0.95

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class WindowScores:
    """Sums over the scored tokens of each window; every array is (N,) float64.

    Attributes:
        tokens: Number of scored tokens.
        source_nll: Negative log-likelihood under the source, nats.
        target_nll: The same under the target.
        kl: `KL(source ‖ target)` over the whole vocabulary, nats.
        agreement: Tokens where both put the same token first.
    """

    tokens: Floats
    source_nll: Floats
    target_nll: Floats
    kl: Floats
    agreement: Floats


@dataclass(frozen=True)
class Figures:
    """The figures of one pair of models on one set of windows.

    Attributes:
        source_perplexity: exp of the mean negative log-likelihood per token.
        target_perplexity: The same of the target.
        ratio: Target over source.
        kl: Mean `KL(source ‖ target)` per token, nats.
        top1_agreement: Share of tokens.
    """

    source_perplexity: float
    target_perplexity: float
    ratio: float
    kl: float
    top1_agreement: float


@dataclass(frozen=True)
class Interval:
    """Both ends of an interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Intervals:
    """Percentile intervals of `Figures`.

    Attributes:
        resamples: How often the windows were drawn again.
        confidence: Share of the resamples inside each interval.
        seed: Of the draws.
    """

    source_perplexity: Interval
    target_perplexity: Interval
    ratio: Interval
    kl: Interval
    top1_agreement: Interval
    resamples: int
    confidence: float
    seed: int


def figures(scores: WindowScores) -> Figures:
    """The figures over all windows, every token weighing the same."""
    values = _weighted(scores, np.ones((1, len(scores.tokens))))
    return Figures(**{name: float(value[0]) for name, value in values.items()})


def bootstrap(
    scores: WindowScores,
    seed: int,
    resamples: int = DEFAULT_RESAMPLES,
    confidence: float = DEFAULT_CONFIDENCE,
) -> Intervals | None:
    """Draw as many windows as there are, with replacement, and take percentiles of each figure.

    Windows, not tokens, are drawn, because tokens of one window depend on each other. The source and the
    target are drawn together, so the interval of the ratio is that of a paired comparison.

    Args:
        scores: Sums by window.
        seed: Of the draws.
        resamples: Number of draws.
        confidence: Share inside the interval.

    Returns:
        None for a single window, whose spread is unknown.
    """
    count = len(scores.tokens)
    if count < 2:
        return None
    weights = draw_weights(count, seed, resamples)
    bounds = {name: percentiles(values, confidence) for name, values in _weighted(scores, weights).items()}
    return Intervals(**bounds, resamples=resamples, confidence=confidence, seed=seed)


def bootstrap_mean(
    values: Floats,
    seed: int,
    resamples: int = DEFAULT_RESAMPLES,
    confidence: float = DEFAULT_CONFIDENCE,
) -> Interval | None:
    """The interval of a mean, its terms drawn with replacement; of differences it is that of a paired comparison.

    Args:
        values: (N,) terms.
        seed: Of the draws.
        resamples: Number of draws.
        confidence: Share inside the interval.

    Returns:
        None for a single term, whose spread is unknown.
    """
    count = len(values)
    return None if count < 2 else percentiles(draw_weights(count, seed, resamples) @ values / count, confidence)


def draw_weights(count: int, seed: int, resamples: int) -> Floats:
    """(R, N): how often each of `count` windows is in each resample; every row sums to `count`."""
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    return weights.astype(np.float64)


def percentiles(values: Floats, confidence: float) -> Interval:
    """The interval that holds the middle `confidence` of (R,) resampled values."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return Interval(float(low), float(high))


def _weighted(scores: WindowScores, weights: Floats) -> dict[str, Floats]:
    """Each figure for each row of (R, N) window weights, (R,)."""
    tokens = weights @ scores.tokens
    source, target = (weights @ nll / tokens for nll in (scores.source_nll, scores.target_nll))
    return {
        "source_perplexity": np.exp(source),
        "target_perplexity": np.exp(target),
        "ratio": np.exp(target - source),
        "kl": weights @ scores.kl / tokens,
        "top1_agreement": weights @ scores.agreement / tokens,
    }
