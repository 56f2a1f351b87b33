"""Scores from logits against a plain float64 oracle, and windows against whole models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_convert.decode.receipt import ReceiptBook
from mla_convert.errors import CheckFailed
from mla_convert.eval import quality
from mla_convert.eval.quality import score_windows
from mla_convert.eval.serving import STOCK, Served
from mla_convert.eval.source_states import SourceStates, source_states
from mla_convert.eval.token_scores import score_tokens
from tests.eval.helpers import EvalPair
from tests.tolerances import FLOAT64_ALGEBRA, LOSSLESS_KL, WINDOW_SCORES


def stock(model: Any) -> Served:
    """As transformers runs it."""
    return Served(model, STOCK, None, ReceiptBook())


def oracle(source: Tensor, target: Tensor, wanted: Tensor) -> list[float]:
    """Token by token, term by term, in Python's floats."""
    totals = [0.0, 0.0, 0.0, 0.0]
    for a, b, token in zip(source.tolist(), target.tolist(), wanted.tolist(), strict=True):
        norm_a, norm_b = (math.log(math.fsum(math.exp(x) for x in row)) for row in (a, b))
        totals[0] += norm_a - a[token]
        totals[1] += norm_b - b[token]
        totals[2] += math.fsum(math.exp(x - norm_a) * ((x - norm_a) - (y - norm_b)) for x, y in zip(a, b, strict=True))
        totals[3] += a.index(max(a)) == b.index(max(b))
    return totals


@given(tokens=st.integers(1, 5), vocabulary=st.integers(2, 20), seed=st.integers(0, 10_000))
def test_scores_equal_the_oracle(tokens: int, vocabulary: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    source, target = (torch.randn(tokens, vocabulary, generator=generator) * 4 for _ in range(2))
    wanted = torch.randint(vocabulary, (tokens,), generator=generator)

    found = score_tokens(source, target, wanted).sums.tolist()

    assert found == pytest.approx(oracle(source, target, wanted), rel=FLOAT64_ALGEBRA, abs=FLOAT64_ALGEBRA)
    assert found[2] >= 0


def test_a_shift_of_all_logits_is_no_difference() -> None:
    logits = torch.randn(4, 50_000) * 8
    kl = float(score_tokens(logits, logits + 3, torch.zeros(4, dtype=torch.int64)).sums[2])

    assert abs(kl) < LOSSLESS_KL


def test_a_lossless_conversion_has_a_divergence_below_a_hundred_millionth(lossless: EvalPair) -> None:
    states = source_states(lossless.source, lossless.digests, lossless.windows)
    scores = score_windows(states, stock(lossless.model()), lossless.windows)

    assert 0 <= float(scores.kl.sum() / scores.tokens.sum()) < LOSSLESS_KL
    assert (scores.agreement == scores.tokens).all()
    assert scores.target_nll == pytest.approx(scores.source_nll, rel=1e-5)


@pytest.mark.parametrize("stride", [24, 10])
def test_windows_score_what_the_whole_models_say(lossy: EvalPair, stride: int) -> None:
    pair = lossy.with_stride(stride)
    states = source_states(pair.source, pair.digests, pair.windows)
    scores = score_windows(states, stock(pair.model()), pair.windows)
    source_model, target_model = pair.source_model(), pair.model()

    for index, (ids, first) in enumerate(zip(pair.windows.ids, pair.windows.first_scored, strict=True)):
        with torch.inference_mode():
            logits = [model(input_ids=ids[None]).logits[0, first - 1 : -1] for model in (source_model, target_model)]
        expected = oracle(*logits, ids[first:])
        found = [
            scores.source_nll[index],
            scores.target_nll[index],
            scores.kl[index],
            scores.agreement[index],
        ]
        assert found == pytest.approx(expected, rel=WINDOW_SCORES)
        assert scores.tokens[index] == len(ids) - first
    assert scores.kl.sum() > 0.1


def test_blocks_of_rows_change_nothing(lossy: EvalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    states = source_states(lossy.source, lossy.digests, lossy.windows)
    whole = score_windows(states, stock(lossy.model()), lossy.windows)
    monkeypatch.setattr(quality, "BLOCK_ELEMENTS", 97 * 5)
    blocks = score_windows(states, stock(lossy.model()), lossy.windows)

    assert blocks.kl == pytest.approx(whole.kl, rel=WINDOW_SCORES)
    assert blocks.agreement.tolist() == whole.agreement.tolist()


@pytest.mark.parametrize("side", ["source", "target"])
def test_values_that_are_not_finite_are_refused_with_the_model_and_the_window(lossy: EvalPair, side: str) -> None:
    states = source_states(lossy.source, lossy.digests, lossy.windows)
    model = lossy.model()
    if side == "target":
        with torch.no_grad():
            model.model.norm.weight[3] = float("nan")
    else:
        states = SourceStates(states.folder, states.digest, states.reused, states.head * float("inf"), states.cache)

    with pytest.raises(CheckFailed, match=f"window 0: the {side} gives scores that are not finite"):
        score_windows(states, stock(model), lossy.windows)
