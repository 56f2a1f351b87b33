"""The whole part on tiny conversions, from the files."""

from __future__ import annotations

import json

import pytest

from mla_convert.eval.tasks.measure import measure_tasks
from mla_convert.eval.tasks.scoring import RULE
from mla_convert.manifests.evaluation.tasks import TasksSection
from tests.eval.helpers import EvalPair
from tests.eval.tasks.helpers import Folders
from tests.tolerances import ABSORBED_LOGITS


def measure(pair: EvalPair, seed: int = 0, backend: str = "auto") -> TasksSection:
    return measure_tasks(
        Folders(pair.source.location.folder, pair.target, pair.text).context(24, seed=seed, backend=backend)
    )


@pytest.fixture(scope="module")
def kept(lossless: EvalPair) -> TasksSection:
    return measure(lossless)


def test_a_random_model_is_uninformative_even_where_nothing_is_lost(kept: TasksSection) -> None:
    assert kept.cells
    assert {cell.verdict for cell in kept.cells} == {"uninformative"}
    for cell in kept.cells:
        assert cell.target_logprob == pytest.approx(cell.source_logprob, rel=ABSORBED_LOGITS)
        assert cell.target_match == cell.source_match < 0.5


@pytest.fixture(scope="module")
def lost(lossy: EvalPair) -> TasksSection:
    return measure(lossy)


def test_a_section_says_how_it_was_made(kept: TasksSection) -> None:
    assert (kept.rule, kept.ran, kept.seed) == (RULE, "torch", 0)
    assert {cell.length for cell in kept.cells} == {256, 512}
    # Five facts do not fit into 256 letters.
    assert {(note.task, note.length) for note in kept.left_out} >= {("needle", 256)}
    assert TasksSection.model_validate_json(json.dumps(kept.model_dump(mode="json"))) == kept


def test_a_lossy_conversion_differs_but_proves_nothing_on_a_source_that_fails(
    lost: TasksSection, kept: TasksSection
) -> None:
    assert [cell.source_logprob for cell in lost.cells] == [cell.source_logprob for cell in kept.cells]
    assert all(abs(cell.difference.value) > 0.01 for cell in lost.cells)
    assert {cell.verdict for cell in lost.cells} == {"uninformative"}


def test_the_same_again_and_other_prompts_by_another_seed(lossy: EvalPair, lost: TasksSection) -> None:
    other = measure(lossy, seed=1, backend="stock")

    assert measure(lossy) == lost
    assert (other.ran, other.seed) == ("stock", 1)
    assert all(
        ours.source_logprob != theirs.source_logprob for ours, theirs in zip(lost.cells, other.cells, strict=True)
    )
