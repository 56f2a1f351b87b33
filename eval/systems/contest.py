"""Models run by turns on the same workloads, and what is measured of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from mla_convert.eval.systems.goodput import Subject, Timing
from mla_convert.eval.systems.live_cache import cache_figures
from mla_convert.eval.systems.sizes import Cell, Sizes
from mla_convert.eval.systems.timing import Clock, prompts, timed_run
from mla_convert.manifests.evaluation.systems import CacheFigures
from mla_convert.progress import track


@dataclass(frozen=True)
class Contender:
    """A loaded model, ready to run.

    Attributes:
        subject: Which it is.
        model: As it is run.
        new_cache: An empty cache for a batch of requests of so many tokens each.
        numbers: Cached per token and layer, by its dimensions.
        stored: Dtype of the checkpoint's attention weights.
        audit: Around its warm-up, which is not timed.
    """

    subject: Subject
    model: Any
    new_cache: Callable[[int, int], Any]
    numbers: int
    stored: torch.dtype
    audit: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Measured:
    """What came of one model.

    Attributes:
        runs: Timings by workload.
        cache: Counted after the warm-up.
    """

    runs: Mapping[Cell, Sequence[Timing]]
    cache: CacheFigures


def contest(contenders: Sequence[Contender], sizes: Sizes, seed: int, clock: Clock) -> dict[Subject, Measured]:
    """Run all workloads on all contenders; of two, each starts every other turn, so that drift meets both alike.

    Args:
        contenders: In memory together.
        sizes: What to run.
        seed: Of the prompts.
        clock: Seconds.

    Raises:
        CheckFailed: If a cache holds something else than the dimensions say.
    """
    caches = {one.subject: _warm_up(one, sizes, seed, clock) for one in contenders}
    runs: dict[Subject, dict[Cell, list[Timing]]] = {
        one.subject: {cell: [] for cell in sizes.cells} for one in contenders
    }
    turns = [
        (one, cell)
        for cell in sizes.cells
        for repeat in range(cell.repeats)
        for one in (contenders if repeat % 2 == 0 else tuple(reversed(contenders)))
    ]
    label = f"timing {' and '.join(one.subject for one in contenders)}"
    for one, cell in track(turns, label, unit="run"):
        timing, _ = _run(one, cell, sizes, seed, clock)
        runs[one.subject][cell].append(timing)
    return {subject: Measured(runs[subject], caches[subject]) for subject in runs}


def _warm_up(one: Contender, sizes: Sizes, seed: int, clock: Clock) -> CacheFigures:
    """The first run pays for what is set up once, and is the one that is looked into."""
    with one.audit():
        _, cache = _run(one, sizes.warm_up, sizes, seed, clock)
    layers = int(one.model.config.num_hidden_layers)
    return cache_figures(one.subject, cache, one.numbers, layers, one.stored)


def _run(one: Contender, cell: Cell, sizes: Sizes, seed: int, clock: Clock) -> tuple[Timing, Any]:
    prompt = prompts(cell, int(one.model.config.vocab_size), seed)
    cache = one.new_cache(cell.batch, cell.prompt_tokens + sizes.new_tokens)
    return timed_run(one.model, cache, prompt, sizes.new_tokens, clock), cache
