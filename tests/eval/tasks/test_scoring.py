"""Cells by hand, the verdicts, and a lost range that must show."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mla_convert.eval.bootstrap import bootstrap_mean
from mla_convert.eval.tasks.measure import reading_order, score_source, score_target
from mla_convert.eval.tasks.prompt_sets import pose_all
from mla_convert.eval.tasks.prompts import Encoder, Prompt, PromptSet
from mla_convert.eval.tasks.reader import AnswerScore
from mla_convert.eval.tasks.scoring import PromptScore, make_cell, verdict
from mla_convert.eval.tasks.sizes import TaskLength, TaskSizes
from mla_convert.manifests.evaluation.figure import Figure
from mla_convert.manifests.evaluation.tasks import TaskCell
from tests.eval.tasks.helpers import SURE, Recaller, all_words, serve, word_tokenizer

FLAT = Figure(value=0.0, low=-0.1, high=0.1)
PROMPTS = PromptSet(
    "passkey", 64, None, tuple(Prompt((number,), (1, 2)[: 1 + number % 2], (3,)) for number in range(4))
)


def test_a_cell_by_hand() -> None:
    source = [
        PromptScore(AnswerScore(logprob, match), wrong)
        for logprob, match, wrong in ((-1.0, True, -5.0), (-2.0, True, -7.0), (-3.0, False, -9.0), (-2.0, True, -7.0))
    ]
    target = [
        AnswerScore(logprob, match) for logprob, match in ((-1.5, True), (-2.0, True), (-4.5, False), (-4, False))
    ]
    cell = make_cell(PROMPTS, source, target, seed=3)

    assert (cell.task, cell.length, cell.depth, cell.prompts) == ("passkey", 64, None, 4)
    assert cell.answer_tokens == 1.5
    assert (cell.source_logprob, cell.target_logprob, cell.chance_logprob) == (-2.0, -3.0, -7.0)
    assert (cell.source_match, cell.target_match) == (0.75, 0.5)
    assert cell.difference.value == -1.0
    expected = bootstrap_mean(np.array([-0.5, 0.0, -1.5, -2.0]), seed=3)
    assert expected is not None
    assert (cell.difference.low, cell.difference.high) == (expected.low, expected.high)
    assert cell.verdict == "kept"


def test_the_interval_is_that_of_pairs() -> None:
    """Prompts of very different difficulty, each of which loses exactly half a nat."""
    source = [PromptScore(AnswerScore(-10.0 * number, True), -50.0) for number in range(4)]
    target = [AnswerScore(-10.0 * number - 0.5, True) for number in range(4)]
    cell = make_cell(PROMPTS, source, target, seed=0)

    assert (cell.difference.low, cell.difference.high) == (-0.5, -0.5)


def test_one_prompt_has_no_interval() -> None:
    alone = PromptSet("needle", 64, 0.5, PROMPTS.prompts[:1])
    cell = make_cell(alone, [PromptScore(AnswerScore(-1.0, True), -3.0)], [AnswerScore(-9.0, True)], seed=0)

    assert (cell.difference.low, cell.difference.high) == (None, None)
    assert cell.verdict == "kept"


@pytest.mark.parametrize(
    ("source", "target", "difference", "expected"),
    [
        (1.0, 1.0, FLAT, "kept"),
        (0.5, 0.5, FLAT, "kept"),
        (0.49, 0.49, FLAT, "uninformative"),
        # However well or badly the target does: where the source fails nothing is said.
        (0.25, 1.0, FLAT, "uninformative"),
        (0.0, 0.0, Figure(value=-9.0, low=-9.5, high=-8.5), "uninformative"),
        (1.0, 0.5, FLAT, "kept"),
        (1.0, 0.49, FLAT, "lost"),
        (0.5, 0.2, FLAT, "lost"),
        (1.0, 1.0, Figure(value=-2.0, low=-3.0, high=-1.01), "lost"),
        (1.0, 1.0, Figure(value=-2.0, low=-3.0, high=-1.0), "kept"),
        (1.0, 1.0, Figure(value=-5.0), "kept"),
    ],
)
def test_verdicts(source: float, target: float, difference: Figure, expected: str) -> None:
    assert verdict(source, target, difference) == expected


def cells_of(source: Recaller, target: Recaller, encoder: Encoder) -> dict[tuple[str, float | None], TaskCell]:
    sets = pose_all(encoder, TaskSizes((TaskLength(240, 3),), questions=4), 512, seed=0).sets
    prompts = reading_order(sets)
    expected, found = score_source(serve(source), prompts), score_target(serve(target), prompts)
    return {
        (part.task, part.depth): make_cell(
            part, [expected[p] for p in part.prompts], [found[p] for p in part.prompts], 0
        )
        for part in sets
    }


@pytest.fixture(scope="module")
def wordy() -> Encoder:
    return Encoder(word_tokenizer(all_words()))


def test_a_model_that_recalls_everything_keeps_everything(wordy: Encoder) -> None:
    size = len(wordy.tokenizer)
    cells = cells_of(Recaller(size), Recaller(size), wordy)

    # It cannot count.
    assert {key for key, cell in cells.items() if cell.verdict == "uninformative"} == {("counting", None)}
    assert {cell.verdict for key, cell in cells.items() if key[0] != "counting"} == {"kept"}
    assert all(cell.difference.value == 0 for cell in cells.values())
    needle = cells["needle", 0.25]
    assert needle.source_match == needle.target_match == 1
    assert needle.source_logprob == pytest.approx(-math.log1p((size - 1) * math.exp(-SURE)), rel=1e-3)
    assert needle.chance_logprob == pytest.approx(needle.source_logprob - SURE)


def test_a_lost_range_is_named_by_task_and_depth(wordy: Encoder) -> None:
    """The target sees half of the text: needles at the end are found, those at the start are lost."""
    size = len(wordy.tokenizer)
    cells = cells_of(Recaller(size), Recaller(size, window=120), wordy)

    verdicts = {depth: cells["needle", depth].verdict for depth in (0.0, 0.25, 0.75, 1.0)}
    assert verdicts == {0.0: "lost", 0.25: "lost", 0.75: "kept", 1.0: "kept"}
    assert cells["needle", 0.0].difference.value < -1
    assert cells["copy", None].verdict == "kept"


def test_a_lost_range_loses_induction_copy_and_recall(wordy: Encoder) -> None:
    size = len(wordy.tokenizer)
    cells = cells_of(Recaller(size), Recaller(size, window=6), wordy)

    for task in ("induction", "copy", "passkey", "key-value"):
        assert cells[task, None].verdict == "lost", task
        assert cells[task, None].source_match == 1, task
    assert cells["counting", None].verdict == "uninformative"


def test_a_source_that_fails_is_uninformative_whatever_the_target_does(wordy: Encoder) -> None:
    size = len(wordy.tokenizer)
    cells = cells_of(Recaller(size, window=6), Recaller(size), wordy)

    assert cells["induction", None].target_match == 1
    assert {cells[task, None].verdict for task in ("induction", "copy", "counting")} == {"uninformative"}
