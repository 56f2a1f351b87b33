"""What is asked of a source's and a target's prediction of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

TOP = 5


@dataclass(frozen=True)
class TokenScores:
    """Scores of S tokens; every tensor is (S,).

    Attributes:
        source_nll: float64, negative log-likelihood of the token that comes under the source, nats.
        target_nll: The same under the target.
        kl: float64, `KL(source ‖ target)` over the whole vocabulary, nats.
        top1: bool, both put the same token first.
        top5: bool, the source's first is among the target's `TOP`.
        source_confidence: float64, probability of the source's first.
        target_confidence: The same of the target's.
        source_right: bool, the source's first is the token that comes.
        target_right: The same of the target's.
    """

    source_nll: Tensor
    target_nll: Tensor
    kl: Tensor
    top1: Tensor
    top5: Tensor
    source_confidence: Tensor
    target_confidence: Tensor
    source_right: Tensor
    target_right: Tensor

    @classmethod
    def join(cls, parts: Sequence[TokenScores]) -> TokenScores:
        """Parts one after the other."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def part(self, first: int, end: int) -> TokenScores:
        """The scores of tokens `first` to `end`, which is not included."""
        return TokenScores(**{field.name: getattr(self, field.name)[first:end] for field in fields(self)})

    @property
    def sums(self) -> Tensor:
        """(4,) float64: source NLL, target NLL, KL, equal first choices."""
        return torch.stack([self.source_nll.sum(), self.target_nll.sum(), self.kl.sum(), self.top1.sum().double()])


def score_tokens(source: Tensor, target: Tensor, wanted: Tensor) -> TokenScores:
    """Compare predictions token by token.

    The logarithms are taken in float64: in float32 each row's normaliser is off by about 1e-6, which enters
    the divergence unsquared and would hide that of a lossless conversion.

    Args:
        source: (S, V) logits.
        target: (S, V) logits.
        wanted: (S,) int64, the tokens that come.
    """
    p, q = source.double().log_softmax(-1), target.double().log_softmax(-1)  # (S, V)
    index = wanted[:, None]
    first, theirs = source.argmax(-1, keepdim=True), target.argmax(-1, keepdim=True)  # (S, 1)
    before = (target > target.gather(1, first)).sum(-1)  # (S,) tokens that the target likes better
    return TokenScores(
        source_nll=-p.gather(1, index)[:, 0],
        target_nll=-q.gather(1, index)[:, 0],
        kl=(p.exp() * (p - q)).sum(-1),
        top1=(first == theirs)[:, 0],
        top5=before < TOP,
        source_confidence=p.gather(1, first)[:, 0].exp(),
        target_confidence=q.gather(1, theirs)[:, 0].exp(),
        source_right=(first == index)[:, 0],
        target_right=(theirs == index)[:, 0],
    )
