"""From the scores of prompts to cells, and when a task counts as kept, lost or as saying nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mla_convert.eval.bootstrap import bootstrap_mean
from mla_convert.eval.tasks.prompts import PromptSet
from mla_convert.eval.tasks.reader import AnswerScore
from mla_convert.manifests.evaluation.figure import Figure
from mla_convert.manifests.evaluation.tasks import TaskCell, Verdict

INFORMATIVE_MATCH = 0.5
KEPT_SHARE = 0.5
LOST_NATS = 1.0
RULE = (
    f"uninformative where the source's match is below {INFORMATIVE_MATCH:g}; else lost where the target's match is "
    f"below {KEPT_SHARE:g} of the source's or the whole interval of the difference lies below -{LOST_NATS:g} nat; "
    "else kept"
)


@dataclass(frozen=True)
class PromptScore:
    """One prompt under the source: its answer, and the wrong one's log-probability in nats."""

    answer: AnswerScore
    wrong: float


def verdict(source_match: float, target_match: float, difference: Figure) -> Verdict:
    """Judge one cell by `RULE`.

    A task that the source fails cannot show a loss. Of one that the source does, half of its successes is a loss
    that an application notices at once. Log-probabilities notice it earlier: one nat is an answer e times less
    likely, and the whole interval must lie beyond, so that few prompts with a large spread do not condemn.
    """
    if source_match < INFORMATIVE_MATCH:
        return "uninformative"
    surely_less = difference.high is not None and difference.high < -LOST_NATS
    return "lost" if target_match < KEPT_SHARE * source_match or surely_less else "kept"


def make_cell(prompts: PromptSet, source: Sequence[PromptScore], target: Sequence[AnswerScore], seed: int) -> TaskCell:
    """The cell of one set of prompts; `seed` is that of the resampling."""
    ours = np.array([score.answer.logprob for score in source])
    theirs = np.array([score.logprob for score in target])
    interval = bootstrap_mean(theirs - ours, seed)
    mean = float((theirs - ours).mean())
    difference = Figure(value=mean) if interval is None else Figure(value=mean, low=interval.low, high=interval.high)
    source_match = float(np.mean([score.answer.match for score in source]))
    target_match = float(np.mean([score.match for score in target]))
    return TaskCell(
        task=prompts.task,
        length=prompts.length,
        depth=prompts.depth,
        prompts=len(prompts.prompts),
        answer_tokens=float(np.mean([len(prompt.answer) for prompt in prompts.prompts])),
        source_logprob=float(ours.mean()),
        target_logprob=float(theirs.mean()),
        chance_logprob=float(np.mean([score.wrong for score in source])),
        difference=difference,
        source_match=source_match,
        target_match=target_match,
        verdict=verdict(source_match, target_match, difference),
    )
