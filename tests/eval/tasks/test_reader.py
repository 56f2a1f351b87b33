"""Answers scored from a live cache: by hand on a known model, and beside one plain pass of a converted one."""

from __future__ import annotations

import math

import pytest
import torch

from mla_convert.errors import CheckFailed, InputRefused
from mla_convert.eval.serving import STOCK, served
from mla_convert.eval.tasks.reader import AnswerScore, Reader
from tests.eval.helpers import EvalPair
from tests.eval.tasks.helpers import SURE, Recaller, random_ids, serve
from tests.tolerances import ABSORBED_LOGITS

VOCABULARY = 12
RIGHT = -math.log1p((VOCABULARY - 1) * math.exp(-SURE))
WRONG = RIGHT - SURE
UNKNOWN = -math.log(VOCABULARY)


def plain(model: torch.nn.Module, context: tuple[int, ...], answer: tuple[int, ...]) -> AnswerScore:
    """One pass over everything, without a cache."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([context + answer[:-1]])).logits[0, len(context) - 1 :].double()
    wanted = torch.tensor(answer)
    return AnswerScore(
        float(logits.log_softmax(-1).gather(1, wanted[:, None]).sum()), bool((logits.argmax(-1) == wanted).all())
    )


@pytest.mark.parametrize(
    ("answer", "logprob", "match"),
    [
        ((4,), RIGHT, True),
        ((5,), WRONG, False),
        ((4, 5), 2 * RIGHT, True),
        ((4, 7), RIGHT + WRONG, False),
        # Teacher-forced: behind a wrong token the true prefix goes on, and 7 has not been seen before.
        ((7, 4), WRONG + UNKNOWN, False),
    ],
)
def test_scores_by_hand(answer: tuple[int, ...], logprob: float, match: bool) -> None:
    found = Reader(serve(Recaller(VOCABULARY))).score((3, 4, 5, 6, 3), answer)

    assert found.logprob == pytest.approx(logprob, rel=1e-6)
    assert found.match is match


def test_what_prompts_share_is_read_once() -> None:
    model = Recaller(VOCABULARY)
    reader, context = Reader(serve(model)), random_ids(40, VOCABULARY - 1, seed=1)
    first = reader.score(context, (1, 2, 3))
    read = model.forwarded
    again = reader.score(context, (1, 2, 3))
    other = reader.score((*context[:38], 11, 11), (1, 2))

    assert again == first
    # The last token of the context and two of the answer; then two that differ and one of the answer.
    assert model.forwarded - read == 3 + 3
    assert other == Reader(serve(model)).score((*context[:38], 11, 11), (1, 2))


def test_an_answer_of_one_token_needs_no_second_pass() -> None:
    model = Recaller(VOCABULARY)
    reader = Reader(serve(model))
    right, read = reader.score((3, 4, 5, 3), (4,)), model.forwarded
    wrong = reader.score((3, 4, 5, 3), (9,))

    assert model.forwarded == read
    assert (right.match, wrong.match) == (True, False)
    assert wrong.logprob == pytest.approx(WRONG)


@pytest.mark.parametrize("backend", ["torch", "reference", STOCK])
def test_a_converted_model_scores_as_in_one_plain_pass(lossy: EvalPair, backend: str) -> None:
    model, vocabulary = lossy.model(), lossy.source.config.vocab_size
    long, short = random_ids(90, vocabulary, seed=2), random_ids(20, vocabulary, seed=3)
    # In this order the cache is cut back, emptied, and made longer.
    cases = [
        (long, (5, 6, 7)),
        (long[:60], (8,)),
        ((*long[:60], *short), tuple(range(40, 57))),
        (short, (9, 10)),
        (short[:1], (11,)),
    ]
    expected = [plain(model, context, answer) for context, answer in cases]
    with served(model, backend) as running:
        reader = Reader(running)
        found = [reader.score(context, answer) for context, answer in cases]
        receipt = running.receipt

    assert receipt["ran"] == backend
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, rel=ABSORBED_LOGITS)
        assert ours.match == theirs.match


def test_answers_are_decoded_from_the_pages(lossy: EvalPair) -> None:
    model = lossy.model()
    with served(model, "torch") as running:
        Reader(running).score(random_ids(50, 90, seed=4), random_ids(12, 90, seed=5))
        receipt = running.receipt

    layers = lossy.source.config.num_hidden_layers
    # The prefill of the context but for its last token; then 12 predictions in chunks of at most 8.
    assert (receipt["expanded_calls"], receipt["calls"]) == (layers, 2 * layers)


def test_a_source_scores_as_in_one_plain_pass(lossy: EvalPair) -> None:
    model, context = lossy.source_model(), random_ids(70, 90, seed=6)
    with served(model, STOCK) as running:
        reader = Reader(running)
        found = [reader.score(context, (1, 2)), reader.score(context[:30], (3, 4, 5))]

    expected = [plain(model, context, (1, 2)), plain(model, context[:30], (3, 4, 5))]
    assert [score.logprob for score in found] == pytest.approx(
        [score.logprob for score in expected], rel=ABSORBED_LOGITS
    )


def test_values_that_are_not_finite_are_refused(lossy: EvalPair) -> None:
    model = lossy.source_model()
    reader = Reader(serve(model))
    reader.score((1, 2, 3), (4,))
    with torch.no_grad():
        model.base_model.norm.weight[0] = float("nan")
    with pytest.raises(CheckFailed, match=r"llama: logits that are not finite"):
        reader.score((5, 6, 7), (4,))


def test_a_head_that_does_more_is_refused() -> None:
    model = Recaller(VOCABULARY)
    model.head.bias = torch.nn.Parameter(torch.ones(VOCABULARY))
    with pytest.raises(InputRefused, match="more than one matrix product"):
        Reader(serve(model)).score((3, 4, 3), (4,))
