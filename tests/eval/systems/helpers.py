"""A tiny pair as the suite hands it to a part, a clock that ticks, and ways of serving that are not what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mla_convert.decode.abi import Backend, DecodeCall, DecodeOutput
from mla_convert.decode.absorbed_module import AbsorbedOptions, use_absorbed
from mla_convert.decode.dispatch import Dispatcher
from mla_convert.decode.receipt import ReceiptBook
from mla_convert.decode.reference import ReferenceBackend
from mla_convert.decode.rows import RowFormat
from mla_convert.decode.torch_backend import TorchBackend
from mla_convert.eval.evaluate import EvalOptions, check_target, prepare
from mla_convert.eval.serving import Served
from mla_convert.eval.suite_context import SuiteContext
from mla_convert.eval.systems.measure import Instruments, measure_with
from mla_convert.eval.systems.sizes import Cell, Sizes
from mla_convert.manifests.evaluation.systems import SystemsSection
from tests.eval.helpers import MAX_TOKENS, SEQ_LEN, EvalPair

TINY = Sizes((Cell(12, 1, 2), Cell(70, 1, 1), Cell(12, 3, 1)), new_tokens=4)
# The warm-up, four runs, and three steps of each; four layers.
RUNS, STEPS, LAYERS = 5, 3, 4
CALLS = RUNS * STEPS * LAYERS


def context_of(pair: EvalPair, backend: str = "auto", seed: int = 0) -> SuiteContext:
    """The context of a conversion."""
    options = EvalOptions(max_tokens=MAX_TOKENS, seq_len=SEQ_LEN, backend=backend, seed=seed)
    prepared = prepare(pair.source, [str(pair.text)], options)
    return SuiteContext(prepared, pair.target, check_target(pair.target, prepared), "quick")


class Ticking:
    """A clock that goes on by one second each time it is read."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1.0
        return self._now


def measure(pair: EvalPair, backend: str = "auto", **instruments: Any) -> SystemsSection:
    """The tiny workloads under a ticking clock."""
    return measure_with(context_of(pair, backend), TINY, Instruments(**{"clock": Ticking(), **instruments}))


@contextmanager
def secretly_stock(model: Any, backend: str, *, backends: Sequence[Backend]) -> Iterator[Served]:
    """Stock transformers, without a word."""
    yield Served(model, backend, None, ReceiptBook())


@contextmanager
def secretly_expanded(model: Any, backend: str, *, backends: Sequence[Backend]) -> Iterator[Served]:
    """Absorbed modules that rebuild all keys and values at each step."""
    book = ReceiptBook()
    decoder = Dispatcher(backends, backend, book)
    with use_absorbed(model, decoder.run, AbsorbedOptions(expand_from=1)) as handle:
        yield Served(model, backend, handle, book)


@contextmanager
def expanded_with_a_receipt(model: Any, backend: str, *, backends: Sequence[Backend]) -> Iterator[Served]:
    """The same, with the calls that were wanted on the receipt."""
    book, form = ReceiptBook(), RowFormat.plain(20, 16, "float32")
    table, length = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    call = DecodeCall(torch.zeros(1, 1, 4, 36), torch.zeros(1, 64, 36), form, table, length, scale=1.0)
    for _ in range(CALLS):
        Dispatcher([TorchBackend()], backend, book).run(call)
    with secretly_expanded(model, backend, backends=backends) as running:
        yield Served(model, backend, running.handle, book)


@dataclass(frozen=True)
class WithBook:
    """The right way of serving with a receipt book that is not right."""

    book: ReceiptBook
    asked: str | None = None

    @contextmanager
    def __call__(self, model: Any, backend: str, *, backends: Sequence[Backend]) -> Iterator[Served]:
        decoder = Dispatcher(backends, self.asked or backend, self.book)
        with use_absorbed(model, decoder.run) as handle:
            yield Served(model, backend, handle, self.book)


class Renaming(ReceiptBook):
    """Says `reference`, whatever ran."""

    def note(self, requested: str, ran: str, *rest: Any) -> None:
        super().note(requested, "reference", *rest)


class Forgetting(ReceiptBook):
    """Keeps every second call to itself."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0

    def note(self, *entry: Any) -> None:
        self._seen += 1
        if self._seen % 2:
            super().note(*entry)


class Inventing(ReceiptBook):
    """Has twice the calls that there were."""

    def note(self, *entry: Any) -> None:
        super().note(*entry)
        super().note(*entry)


class Borrowing(TorchBackend):
    """Is called `torch` and lets `reference` compute."""

    def run(self, call: DecodeCall) -> DecodeOutput:
        return ReferenceBackend().run(call)


class Better(TorchBackend):
    """A first candidate that turns down batches, if it is asked."""

    name = "better"

    def unfit(self, call: DecodeCall) -> str | None:
        return "one sequence at a time" if call.q.shape[0] > 1 else None


def figures_of(section: SystemsSection) -> Counter[str]:
    """How many figures of the rows are there, by name."""
    names = ("ttft_s", "tpot_s", "tokens_per_s", "goodput_tokens_per_s", "peak_bytes")
    return Counter(name for row in section.rows for name in names if getattr(row, name) is not None)
