"""Exact merge of attention over parts of a history (seed 1, 0x0C): partial softmax states, never averages.

A part is either a state `(m, l, o)` (running maximum, denominator and numerator under it) or what it comes to,
`(out, lse)`. A part that saw nothing has `m = lse = −inf` and counts for nothing, whatever its numerator holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.errors import InputRefused

EMPTY = float("-inf")


@dataclass(frozen=True)
class PartialState:
    """Softmax attention over a part of the keys, before normalisation.

    Attributes:
        m: (...,) largest scaled score; −inf where no key was seen.
        l: (...,) sum of exp(score − m).
        o: (..., d) sum of exp(score − m) · value.
    """

    m: Tensor
    l: Tensor  # noqa: E741  the field's letter
    o: Tensor

    @classmethod
    def empty(cls, shape: Sequence[int], width: int, dtype: torch.dtype, device: torch.device) -> PartialState:
        """The state of `shape` rows that saw nothing."""
        return cls(
            torch.full(tuple(shape), EMPTY, dtype=dtype, device=device),
            torch.zeros(tuple(shape), dtype=dtype, device=device),
            torch.zeros((*shape, width), dtype=dtype, device=device),
        )

    @classmethod
    def of_scores(cls, scores: Tensor, values: Tensor) -> PartialState:
        """Of scaled `scores` (..., M, n), −inf where hidden, over `values` (..., n, d).

        A hidden score weighs 0, and 0 times a number that is not finite is NaN: hidden values must be finite.
        """
        if scores.shape[-1] == 0:
            return cls.empty(scores.shape[:-1], values.shape[-1], scores.dtype, scores.device)
        m = scores.amax(-1)  # (..., M)
        weights = torch.exp(scores - _finite(m)[..., None])  # (..., M, n)
        return cls(m, weights.sum(-1), weights @ values)

    @classmethod
    def of_output(cls, out: Tensor, lse: Tensor) -> PartialState:
        """Of a normalised `out` (..., d) and its natural `lse` (...,)."""
        seen = lse != EMPTY
        return cls(lse, seen.to(out.dtype), out)

    def normalised(self) -> tuple[Tensor, Tensor]:
        """`(out (..., d), lse (...,))`: o / l and m + ln l; 0 and −inf where nothing was seen."""
        seen = self.m != EMPTY
        divisor = torch.where(seen, self.l, 1)
        out = torch.where(seen[..., None], self.o / divisor[..., None], 0)
        return out, torch.where(seen, self.m + torch.log(divisor), EMPTY)


def merge_states(parts: Sequence[PartialState]) -> PartialState:
    """State of all parts: m = max m_r; l = Σ exp(m_r − m) l_r; o = Σ exp(m_r − m) o_r (seed 1, 0x0C).

    Raises:
        InputRefused: No parts, or parts of different shapes.
    """
    if not parts or any(part.o.shape != parts[0].o.shape for part in parts):
        raise InputRefused(
            "partial states that do not fit together",
            expected="one or more of one shape",
            found=str([tuple(part.o.shape) for part in parts]),
        )
    m = parts[0].m
    for part in parts[1:]:
        m = torch.maximum(m, part.m)
    scaled = [rescaled(part, m) for part in parts]
    total, numerator = scaled[0]
    for part_total, part_numerator in scaled[1:]:
        total = total + part_total
        numerator = numerator + part_numerator
    return PartialState(m, total, numerator)


def merge_outputs(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge of normalised parts `(out (..., d), lse (...,))`, float32 or float64."""
    return merge_states([PartialState.of_output(out, lse) for out, lse in parts]).normalised()


def rescaled(part: PartialState, m: Tensor) -> tuple[Tensor, Tensor]:
    """`l` and `o` of a part under a maximum `m` that is no smaller than its own; 0 where the part saw nothing."""
    seen = part.m != EMPTY
    factor = torch.exp(part.m - _finite(m))  # 0 where the part's own maximum is −inf
    numerator = torch.where(seen[..., None], part.o * factor[..., None], 0)
    return torch.where(seen, part.l * factor, 0), numerator


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Give a sink's logit its share: out · e^lse / (e^lse + e^sink), which is out · sigmoid(lse − sink).

    Once, after every merge: the LSE leaves the sink out.

    Args:
        out: (..., H, d).
        lse: (..., H).
        sinks: (H,); −inf takes nothing, +inf everything.

    Returns:
        (..., H, d).
    """
    sink = sinks.to(lse.dtype)
    share = torch.where((lse == EMPTY) & (sink == EMPTY), 0, torch.sigmoid(lse - sink))
    return out * share[..., None].to(out.dtype)


def _finite(m: Tensor) -> Tensor:
    """A maximum to subtract: −inf − −inf would be NaN."""
    return torch.where(m == EMPTY, 0, m)
