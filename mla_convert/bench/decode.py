"""Decoding from the latent cache beside stock transformers and beside the source, by turns in one run.

Caches are filled with random rows, so a history costs nothing to make; the time of attention does not depend on them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache

from mla_convert.bench.decode_subjects import Subject, layer_subject, smollm2_subject
from mla_convert.decode.absorbed_module import AbsorbedHandle, use_absorbed
from mla_convert.decode.backends import dispatcher
from mla_convert.decode.dispatch import AUTO
from mla_convert.decode.latent_cache import LatentCache
from mla_convert.decode.receipt import ReceiptBook
from mla_convert.manifests.environment import Environment, capture

DECODE_SCHEMA = "mla-convert/bench-decode/v1"
HISTORIES = (4096, 16384)
REPEATS = 7
PREFILL_TOKENS = 1024
# Stock's expanding decode over ours at the shortest history; our prefill over stock's.
SPEED_BAR, PREFILL_BAR = 3.0, 1.05
SMOLLM2_WIDTHS = (48, 144)


@dataclass(frozen=True)
class DecodeRequest:
    """What to measure.

    Attributes:
        subjects: `smollm2`, `layer`.
        histories: Cached tokens, rising.
        repeats: Turns of each contender; a ratio is that of medians.
        prefill_tokens: Length of the prompt whose prefill is compared.
        backend: Of the absorbed contender.
        seed: Of random rows and weights.
    """

    subjects: tuple[str, ...] = ("smollm2", "layer")
    histories: tuple[int, ...] = HISTORIES
    repeats: int = REPEATS
    prefill_tokens: int = PREFILL_TOKENS
    backend: str = AUTO
    seed: int = 0


@dataclass(frozen=True)
class DecodeRow:
    """One history of one subject.

    Attributes:
        history: Cached tokens before the step.
        stock_over_absorbed: Time of one step of stock transformers' MLA, which expands the cache, over ours.
        source_over_absorbed: Time of one step of the source with its own cache, over ours.
        cache_bytes: Of the pools of our cache with the history in them, counted in their tensors.
        peak_cache_bytes: The same after the timed steps, which have taken pages of their own.
        row_bytes: `T · (d_c + d_R) · bytes · layers`, the formula.
        padding_bytes: What whole pages take beyond that.
        source_cache_bytes: Of the source's keys and values, counted.
    """

    history: int
    stock_over_absorbed: float
    source_over_absorbed: float
    cache_bytes: int
    peak_cache_bytes: int
    row_bytes: int
    padding_bytes: int
    source_cache_bytes: int


@dataclass(frozen=True)
class SubjectReport:
    """All of one subject.

    Attributes:
        name: Of the subject.
        description: What it is.
        rows: By history.
        prefill_over_stock: Time of our prefill over stock's of the same model.
        receipts: What ran.
    """

    name: str
    description: str
    rows: tuple[DecodeRow, ...]
    prefill_over_stock: float
    receipts: dict[str, object]

    @property
    def missed(self) -> tuple[str, ...]:
        """Bars that do not hold, in words."""
        ratios = [row.stock_over_absorbed for row in self.rows]
        found = []
        if ratios[0] < SPEED_BAR:
            found.append(f"{self.name}: stock over ours is {ratios[0]:.2f} at {self.rows[0].history}, bar {SPEED_BAR}")
        if sorted(ratios) != ratios:
            found.append(f"{self.name}: the ratio does not grow with the history")
        if self.prefill_over_stock > PREFILL_BAR:
            found.append(f"{self.name}: prefill takes {self.prefill_over_stock:.3f} of stock's, bar {PREFILL_BAR}")
        found += [
            f"{self.name}: the cache has {row.cache_bytes} bytes, {row.row_bytes} + {row.padding_bytes} were expected"
            for row in self.rows
            if row.cache_bytes != row.row_bytes + row.padding_bytes
        ]
        return tuple(found)


@dataclass(frozen=True)
class DecodeReport:
    """The bench.

    Attributes:
        request: What was asked for.
        subjects: In its order.
        threads: That torch had.
        environment: Machine and packages.
    """

    request: DecodeRequest
    subjects: tuple[SubjectReport, ...]
    threads: int
    environment: Environment

    @property
    def missed(self) -> tuple[str, ...]:
        """Bars that do not hold."""
        return tuple(line for subject in self.subjects for line in subject.missed)

    def to_json(self) -> dict[str, object]:
        """The whole report."""
        return {
            "schema": DECODE_SCHEMA,
            "request": asdict(self.request),
            "subjects": [{**asdict(subject), "missed": list(subject.missed)} for subject in self.subjects],
            "bars": {"stock_over_absorbed": SPEED_BAR, "prefill_over_stock": PREFILL_BAR},
            "missed": list(self.missed),
            "threads": self.threads,
            "environment": self.environment.model_dump(mode="json"),
        }


def run_decode(request: DecodeRequest) -> DecodeReport:
    """Measure every subject; progress on standard error.

    Raises:
        UsageFault: For an unknown backend.
    """
    dispatcher(request.backend, ReceiptBook())  # refuses a name before anything is loaded
    makers: dict[str, Callable[[], Subject]] = {
        "smollm2": lambda: smollm2_subject(*SMOLLM2_WIDTHS),
        "layer": lambda: layer_subject(request.seed),
    }
    reports = []
    for name in request.subjects:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        reports.append(_measure(makers[name](), request))
    return DecodeReport(request, tuple(reports), torch.get_num_threads(), capture(sys.argv))


@torch.inference_mode()
def _measure(subject: Subject, request: DecodeRequest) -> SubjectReport:
    book = ReceiptBook()
    contest = _Contest(subject, request, book)
    rows = tuple(contest.decode(history) for history in request.histories)
    prefill = contest.prefill(request.prefill_tokens)
    return SubjectReport(subject.name, subject.description, rows, prefill, book.to_json())


class _Contest:
    """The contenders of one subject, run by turns."""

    def __init__(self, subject: Subject, request: DecodeRequest, book: ReceiptBook) -> None:
        self._subject, self._request = subject, request
        self._decoder = dispatcher(request.backend, book)
        self._generator = torch.Generator().manual_seed(request.seed)

    def decode(self, history: int) -> DecodeRow:
        """One step of each after `history` tokens, `repeats` times in turn."""
        converted, source = self._subject.converted, self._subject.source
        config = converted.config
        stock_cache = _filled(config.num_hidden_layers, self._stock_rows(history))
        source_cache = _filled(source.config.num_hidden_layers, self._source_rows(history))
        source_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in source_cache.layers)
        with self._absorbed() as handle:
            latent = self._latent(handle, history)
            held = _pool_bytes(latent)
            row = handle.plan.form.row_bytes * config.num_hidden_layers
            page = handle.plan.page_size
        stock, ours, theirs = [], [], []
        for _ in range(self._request.repeats + 1):
            stock.append(self._step(converted, stock_cache))
            with self._absorbed():
                ours.append(self._step(converted, latent))
            theirs.append(self._step(source, source_cache))
        # The first turn pays for what is set up once.
        fast = statistics.median(ours[1:])
        return DecodeRow(
            history=history,
            stock_over_absorbed=statistics.median(stock[1:]) / fast,
            source_over_absorbed=statistics.median(theirs[1:]) / fast,
            cache_bytes=held,
            peak_cache_bytes=_pool_bytes(latent),
            row_bytes=history * row,
            padding_bytes=-history % page * row,
            source_cache_bytes=source_bytes,
        )

    def prefill(self, tokens: int) -> float:
        """Our prefill of a prompt over stock's, with the cache that each makes."""
        model = self._subject.converted
        ids = torch.randint(model.config.vocab_size, (1, tokens), generator=self._generator)
        stock, ours = [], []
        for _ in range(self._request.repeats + 1):
            stock.append(_seconds(lambda: model(input_ids=ids, cache=DynamicCache(), logits_to_keep=1)))
            with self._absorbed() as handle:
                cache = handle.new_cache(tokens)
                ours.append(_seconds(lambda: model(input_ids=ids, cache=cache, logits_to_keep=1)))  # noqa: B023
        return statistics.median(ours[1:]) / statistics.median(stock[1:])

    @contextmanager
    def _absorbed(self) -> Iterator[AbsorbedHandle]:
        with use_absorbed(self._subject.converted, self._decoder.run) as handle:
            yield handle

    def _step(self, model: Any, cache: Any) -> float:
        token = torch.randint(model.config.vocab_size, (1, 1), generator=self._generator)
        return _seconds(lambda: model(input_ids=token, cache=cache))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _stock_rows(self, history: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        config = self._subject.converted.config
        return lambda: (
            self._random(1, 1, history, config.kv_lora_rank),
            self._random(1, 1, history, config.qk_rope_head_dim),
        )

    def _source_rows(self, history: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        config = self._subject.source.config
        shape = (1, config.num_key_value_heads, history, config.head_dim)
        return lambda: (self._random(*shape), self._random(*shape))

    def _latent(self, handle: AbsorbedHandle, history: int) -> LatentCache:
        config = self._subject.converted.config
        cache = handle.new_cache(history)
        cache.batch.begin(1, history, None, torch.device("cpu"))
        for layer in range(config.num_hidden_layers):
            cache.batch.write(
                layer,
                self._random(1, history, config.kv_lora_rank),
                self._random(1, history, config.qk_rope_head_dim),
            )
            cache.batch.finish(layer)
        return cache


def _pool_bytes(cache: LatentCache) -> int:
    """Of the tensors that hold the rows, free ones included."""
    pages, form = cache.batch.cache, cache.batch.plan.form
    return sum(pages.pool(layer, form).nbytes for layer in range(pages.layers))


def _filled(layers: int, rows: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Any:
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(*rows(), layer)
    return cache


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
