"""Times of runs and what is made of them: medians, throughput, goodput under an objective."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mla_convert.eval.systems.sizes import Cell, Sizes
from mla_convert.manifests.evaluation.systems import Objective, ObjectiveLimit, SpeedRow

FACTOR = 1.5
RULE = f"TTFT and TPOT at most {FACTOR} times the source's own median in this run at batch 1 and the same prompt length"


@dataclass(frozen=True)
class Timing:
    """One run of one workload; its requests start and end together, so its times are those of each of them.

    Attributes:
        ttft_s: Seconds until the first token was there.
        tpot_s: Mean seconds of each further token.
        seconds: From the start to the last token.
        peak_bytes: Most that the process held above its state before.
    """

    ttft_s: float
    tpot_s: float
    seconds: float
    peak_bytes: int


Subject = Literal["source", "target"]
SUBJECTS: tuple[Subject, ...] = ("source", "target")
Runs = Mapping[Cell, Sequence[Timing]]


def objective(source: Runs, *, withheld: bool) -> Objective:
    """`RULE`, and what it comes to for the source's runs; its seconds are speed figures too, left out if withheld."""
    limits = [
        ObjectiveLimit(
            prompt_tokens=cell.prompt_tokens,
            ttft_s=FACTOR * statistics.median(run.ttft_s for run in runs),
            tpot_s=FACTOR * statistics.median(run.tpot_s for run in runs),
        )
        for cell, runs in source.items()
        if cell.batch == 1 and not withheld
    ]
    return Objective(rule=RULE, factor=FACTOR, limits=tuple(sorted(limits, key=lambda limit: limit.prompt_tokens)))


def tokens_per_second(runs: Sequence[Timing], tokens: int) -> float:
    """All tokens over all seconds.

    Args:
        runs: Of one workload.
        tokens: Of each run, all requests together.
    """
    return tokens * len(runs) / sum(run.seconds for run in runs)


def goodput(runs: Sequence[Timing], tokens: int, limit: ObjectiveLimit) -> float:
    """Tokens of the requests that meet both limits over all seconds, those of the others included."""
    good = sum(run.ttft_s <= limit.ttft_s and run.tpot_s <= limit.tpot_s for run in runs)
    return tokens * good / sum(run.seconds for run in runs)


def speed_rows(subject: Subject, runs: Runs, sizes: Sizes, goal: Objective) -> list[SpeedRow]:
    """One row a workload.

    Args:
        subject: Whose runs they are.
        runs: By workload.
        sizes: Workloads and new tokens.
        goal: Without limits where speed is withheld; all figures then are None.
    """
    limits = {limit.prompt_tokens: limit for limit in goal.limits}
    return [_speed_row(subject, cell, sizes.new_tokens, runs[cell], limits.get(cell.prompt_tokens)) for cell in runs]


def _speed_row(
    subject: Subject, cell: Cell, new_tokens: int, runs: Sequence[Timing], limit: ObjectiveLimit | None
) -> SpeedRow:
    tokens = cell.batch * new_tokens
    return SpeedRow(
        subject=subject,
        prompt_tokens=cell.prompt_tokens,
        new_tokens=new_tokens,
        batch=cell.batch,
        repeats=len(runs),
        ttft_s=None if limit is None else statistics.median(run.ttft_s for run in runs),
        tpot_s=None if limit is None else statistics.median(run.tpot_s for run in runs),
        tokens_per_s=None if limit is None else tokens_per_second(runs, tokens),
        goodput_tokens_per_s=None if limit is None else goodput(runs, tokens, limit),
        peak_bytes=None if limit is None else max(run.peak_bytes for run in runs),
    )
