"""The systems part: cache and speed of source and target in one run, and whether the speed may be shown."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from transformers import DynamicCache

from mla_convert.convert.tensor_files import open_tensor_files
from mla_convert.decode.abi import Backend
from mla_convert.decode.backends import known_backends
from mla_convert.eval.loading import load_model
from mla_convert.eval.serving import Served, served
from mla_convert.eval.suite_context import SuiteContext
from mla_convert.eval.systems.contest import Contender, contest
from mla_convert.eval.systems.dispatch import expectation, judge
from mla_convert.eval.systems.goodput import SUBJECTS, objective, speed_rows
from mla_convert.eval.systems.sizes import Sizes, sizes_for
from mla_convert.eval.systems.timing import Clock
from mla_convert.eval.systems.witness import Witness
from mla_convert.manifests.evaluation.systems import SystemsSection

FLOAT32_BYTES = 4
DTYPE = "float32"


class Serve(Protocol):
    """`served`, or what stands in for it."""

    def __call__(self, model: Any, backend: str, *, backends: Sequence[Backend]) -> AbstractContextManager[Served]:
        """See `served`."""
        ...


def _available_bytes() -> int:
    return int(psutil.virtual_memory().available)


@dataclass(frozen=True)
class Instruments:
    """What is measured with.

    Attributes:
        clock: Seconds.
        serve: Runs a model by a backend.
        backends: Best first.
        available_bytes: Memory that is free.
    """

    clock: Clock = time.perf_counter
    serve: Serve = served
    backends: Callable[[], Sequence[Backend]] = known_backends
    available_bytes: Callable[[], int] = _available_bytes


def measure_systems(context: SuiteContext) -> SystemsSection:
    """Measure cache, speed and memory of both models in float32, with prompts of random tokens.

    Args:
        context: The checked pair, the backend that the target runs on, the seed and the suite.

    Raises:
        CheckFailed: If a live cache holds something else than the dimensions say.
        EnvironmentFault: For a backend by name that is not on this machine.
        InputRefused: If a model cannot be loaded, or has too few positions.
    """
    positions = int(context.prepared.source.config.max_position_embeddings)
    return measure_with(context, sizes_for(context.suite, positions), Instruments())


def measure_with(context: SuiteContext, sizes: Sizes, instruments: Instruments) -> SystemsSection:
    """`measure_systems` with sizes and instruments of the caller's."""
    target = _Target(context, instruments, Witness(instruments.backends()))
    together = _fit_together(context, instruments)
    if together:
        ours = _source(context)
        with target.opened() as theirs:
            measured = contest([ours, theirs.contender], sizes, context.seed, instruments.clock)
    else:
        # The list is its only owner, so the source is free before the target is loaded.
        measured = contest([_source(context)], sizes, context.seed, instruments.clock)
        with target.opened() as theirs:
            measured |= contest([theirs.contender], sizes, context.seed, instruments.clock)
    layers = context.manifest.identity.architecture.num_hidden_layers
    verdict = judge(context.prepared.options.backend, theirs.running, target.witness, expectation(sizes, layers))
    goal = objective(measured["source"].runs, withheld=verdict.withheld is not None)
    return SystemsSection(
        device=str(theirs.running.model.device),
        threads=torch.get_num_threads(),
        dtype=DTYPE,
        models_in_memory="together" if together else "one at a time",
        cache=tuple(measured[subject].cache for subject in SUBJECTS),
        objective=goal,
        rows=tuple(row for subject in SUBJECTS for row in speed_rows(subject, measured[subject].runs, sizes, goal)),
        dispatch=verdict.figures,
        withheld=verdict.withheld,
    )


def _fit_together(context: SuiteContext, instruments: Instruments) -> bool:
    """Whether both models fit in free memory, with as much again as the larger for caches and activations."""
    sizes = [_float32_bytes(folder) for folder in (context.source_folder, context.target)]
    return sum(sizes) + max(sizes) <= instruments.available_bytes()


def _float32_bytes(folder: Path) -> int:
    files = open_tensor_files(folder)
    return FLOAT32_BYTES * sum(math.prod(files.info(name).shape) for name in files.names)


def _source(context: SuiteContext) -> Contender:
    source = context.prepared.source
    return Contender(
        subject="source",
        model=load_model(context.source_folder),
        new_cache=lambda _batch, _tokens: DynamicCache(),
        numbers=source.shape.cached_numbers,
        stored=source.attention_dtype,
        audit=nullcontext,
    )


@dataclass(frozen=True)
class _Opened:
    """The target being served."""

    contender: Contender
    running: Served


@dataclass(frozen=True)
class _Target:
    """How the target is run."""

    context: SuiteContext
    instruments: Instruments
    witness: Witness

    @contextmanager
    def opened(self) -> Iterator[_Opened]:
        """Load it, and serve it by the backend asked for while the context lasts."""
        model = load_model(self.context.target)
        backend, manifest = self.context.prepared.options.backend, self.context.manifest
        architecture = manifest.identity.architecture
        with self.instruments.serve(model, backend, backends=self.witness.backends) as running:
            contender = Contender(
                subject="target",
                model=model,
                new_cache=partial(_target_cache, running),
                numbers=architecture.kv_lora_rank + architecture.qk_rope_head_dim,
                stored=getattr(torch, manifest.method.output_dtype),
                audit=partial(self.witness.auditing, model),
            )
            yield _Opened(contender, running)


def _target_cache(running: Served, batch: int, tokens: int) -> Any:
    """Pages for all that a batch of requests will hold, as a server reserves them; stock's own cache without pages."""
    if running.handle is None:
        return DynamicCache()
    page = running.handle.plan.page_size
    return running.handle.new_cache(batch * -(-tokens // page) * page)
