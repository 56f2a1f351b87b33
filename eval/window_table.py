"""Sums over the scored tokens of each window, and the figures with intervals that come of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from mla_convert.errors import CheckFailed
from mla_convert.eval.bootstrap import Floats, draw_weights, percentiles
from mla_convert.eval.token_scores import TokenScores
from mla_convert.manifests.evaluation.figure import Figure, Resampling
from mla_convert.manifests.evaluation.quality import PositionBucket

ECE_BINS = 15
FIRST_BUCKET_END = 15


@dataclass(frozen=True)
class WindowTable:
    """Sums of N windows, float64.

    Attributes:
        tokens: (N,) scored tokens.
        source_nll: (N,) negative log-likelihood under the source, nats.
        target_nll: (N,) the same under the target.
        kl: (N,) `KL(source ‖ target)`, nats.
        top1: (N,) tokens that both put first alike.
        top5: (N,) tokens whose likeliest under the source is among the target's five.
        source_gap: (N, `ECE_BINS`) right choices less confidence, by bin of the source's confidence.
        target_gap: (N, `ECE_BINS`) the same of the target.
    """

    tokens: Floats
    source_nll: Floats
    target_nll: Floats
    kl: Floats
    top1: Floats
    top5: Floats
    source_gap: Floats
    target_gap: Floats

    @classmethod
    def of(cls, windows: Iterable[TokenScores]) -> WindowTable:
        """The sums of each window."""
        rows = [
            (
                float(len(scores.kl)),
                *(float(part.sum()) for part in (scores.source_nll, scores.target_nll, scores.kl)),
                *(float(part.sum()) for part in (scores.top1, scores.top5)),
                confidence_gaps(scores.source_confidence.numpy(), scores.source_right.numpy()),
                confidence_gaps(scores.target_confidence.numpy(), scores.target_right.numpy()),
            )
            for scores in windows
        ]
        return cls(*(np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)))

    def take(self, rows: Sequence[int] | NDArray[np.intp]) -> WindowTable:
        """Some of the windows."""
        return WindowTable(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def values(self, weights: Floats) -> dict[str, Floats]:
        """Each figure for each row of (R, N) window weights, (R,); names are those of `TextQuality`.

        The expected calibration error (Guo et al., arXiv 1706.04599, equation 3) is `Σ_b |right_b − confidence_b| / n`
        with sums over the tokens of bin b.
        """
        tokens = weights @ self.tokens
        source, target = (weights @ nll / tokens for nll in (self.source_nll, self.target_nll))
        # Where exp overflows the model is broken beyond a figure; `_figure` refuses what is not finite.
        with np.errstate(over="ignore"):
            perplexities = {
                "source_perplexity": np.exp(source),
                "target_perplexity": np.exp(target),
                "ratio": np.exp(target - source),
            }
        return {
            **perplexities,
            "kl": weights @ self.kl / tokens,
            "top1": weights @ self.top1 / tokens,
            "top5": weights @ self.top5 / tokens,
            "ece_source": np.abs(weights @ self.source_gap).sum(-1) / tokens,
            "ece_target": np.abs(weights @ self.target_gap).sum(-1) / tokens,
        }

    def figures(self, where: str, resampling: Resampling) -> dict[str, Figure]:
        """Each figure over all windows, with its percentile interval; none for a single window.

        Windows are drawn as `bootstrap` draws them. A calibration error is a sum of absolute values, so its resamples
        lie above its value more often than below.

        Raises:
            CheckFailed: If a figure is not finite.
        """
        count = len(self.tokens)
        whole = self.values(np.ones((1, count)))
        if count < 2:
            return {name: _figure(name, where, float(value[0])) for name, value in whole.items()}
        drawn = self.values(draw_weights(count, resampling.seed, resampling.resamples))
        found = {}
        for name, value in whole.items():
            ends = percentiles(drawn[name], resampling.confidence)
            found[name] = _figure(name, where, float(value[0]), ends.low, ends.high)
        return found


def confidence_gaps(confidence: Floats, right: NDArray[np.bool_]) -> Floats:
    """(`ECE_BINS`,) sums of right − confidence over the tokens of each bin.

    Args:
        confidence: (S,) probabilities of the likeliest token; bin b holds `[b / 15, (b + 1) / 15)`, the last 1 as well.
        right: (S,) whether that token came.
    """
    # Rounding may leave a probability of one a little above it.
    bins = np.minimum((confidence * ECE_BINS).astype(np.intp), ECE_BINS - 1)
    return np.bincount(bins, weights=right - confidence, minlength=ECE_BINS).astype(np.float64)


def bucket_bounds(length: int) -> list[tuple[int, int]]:
    """First and last position of each bucket of a window of `length` tokens: 1-15, 16-31, 32-63 and so on."""
    bounds, first, last = [], 1, FIRST_BUCKET_END
    while first < length:
        bounds.append((first, min(last, length - 1)))
        first, last = last + 1, 2 * last + 1
    return bounds


def position_buckets(
    windows: Sequence[TokenScores], first_scored: Sequence[int], length: int, where: str, resampling: Resampling
) -> tuple[PositionBucket, ...]:
    """Figures by position in the window; a position that no window scores has no bucket.

    Args:
        windows: Scores of each window's scored tokens, the last `length - first_scored` of it.
        first_scored: (N,) position of each window's first scored token.
        length: Tokens of a window.
        where: What is measured, for errors.
        resampling: Of the windows that score in the bucket.
    """
    found = []
    for first, last in bucket_bounds(length):
        parts = [
            scores.part(max(0, first - start), last + 1 - start)
            for scores, start in zip(windows, first_scored, strict=True)
            if start <= last
        ]
        if not parts:
            continue
        table = WindowTable.of(parts)
        figures = table.figures(f"{where}, positions {first} to {last}", resampling)
        found.append(
            PositionBucket(
                first=first,
                last=last,
                tokens=int(table.tokens.sum()),
                source_perplexity=figures["source_perplexity"].value,
                target_perplexity=figures["target_perplexity"].value,
                ratio=figures["ratio"],
                kl=figures["kl"],
            )
        )
    return tuple(found)


def _figure(name: str, where: str, *values: float) -> Figure:
    if not np.isfinite(values).all():
        raise CheckFailed(f"the {name.replace('_', ' ')} is not finite", where=where)
    return Figure(value=values[0], low=values[1], high=values[2]) if len(values) > 1 else Figure(value=values[0])
