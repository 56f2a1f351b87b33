"""Scores of single tokens against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_convert.eval.token_scores import TokenScores, score_tokens
from tests.tolerances import FLOAT64_ALGEBRA


def softmax(row: list[float]) -> list[float]:
    total = math.fsum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


@given(tokens=st.integers(1, 5), vocabulary=st.integers(2, 20), seed=st.integers(0, 10_000))
def test_every_score_equals_plain_python(tokens: int, vocabulary: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    source, target = (torch.randn(tokens, vocabulary, generator=generator) * 4 for _ in range(2))
    wanted = torch.randint(vocabulary, (tokens,), generator=generator)
    found = score_tokens(source, target, wanted)

    for row, (a, b, token) in enumerate(zip(source.tolist(), target.tolist(), wanted.tolist(), strict=True)):
        p, q = softmax(a), softmax(b)
        first, theirs = p.index(max(p)), q.index(max(q))
        five = sorted(range(vocabulary), key=lambda index: -b[index])[:5]
        exact = (found.top1, found.top5, found.source_right, found.target_right)
        assert [bool(part[row]) for part in exact] == [first == theirs, first in five, first == token, theirs == token]
        close = (found.source_nll, found.target_nll, found.kl, found.source_confidence, found.target_confidence)
        kl = math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
        expected = [-math.log(p[token]), -math.log(q[token]), kl, max(p), max(q)]
        assert [float(part[row]) for part in close] == pytest.approx(expected, rel=FLOAT64_ALGEBRA, abs=FLOAT64_ALGEBRA)


def test_the_fifth_counts_and_the_sixth_does_not() -> None:
    source = torch.tensor([[9.0, 0, 0, 0, 0, 0, 0]]).repeat(2, 1)
    target = torch.tensor([[1.0, 5, 4, 3, 2, 0, 0], [1.0, 5, 4, 3, 2, 6, 0]])

    assert score_tokens(source, target, torch.tensor([0, 0])).top5.tolist() == [True, False]


def test_parts_join_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randn(7, 11, generator=generator) for _ in range(2))
    whole = score_tokens(source, target, torch.arange(7))
    joined = TokenScores.join([whole.part(0, 3), whole.part(3, 7)])

    for name, values in vars(whole).items():
        assert torch.equal(getattr(joined, name), values)
