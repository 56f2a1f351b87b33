"""One timed run: a batch of prompts, and so many tokens more, greedily."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from torch import Tensor

from mla_convert.convert.heap import give_back
from mla_convert.eval.systems.goodput import Timing
from mla_convert.eval.systems.sizes import Cell

Clock = Callable[[], float]
# Reading it takes some 20 µs: less than half a percent of the run, the same for both models.
SAMPLE_SECONDS = 0.005


def resident_bytes() -> int:
    """What the process holds in memory."""
    return int(psutil.Process().memory_info().rss)


class PeakMemory:
    """The largest resident size of the process while the context lasts, above that at its start.

    A thread looks every few milliseconds, so a block that comes and goes in between is not seen.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes) -> None:
        self._resident = resident
        self._before = self._most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def above_start(self) -> int:
        """Bytes."""
        return self._most - self._before

    def __enter__(self) -> Self:
        # Else what the last run left with the allocator would be used again, and not be seen.
        give_back()
        self._before = self._most = self._resident()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        self._most = max(self._most, self._resident())


def prompts(cell: Cell, vocabulary: int, seed: int) -> Tensor:
    """(B, S) int64: random token ids, the same for both models."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (cell.batch, cell.prompt_tokens), generator=generator)


@torch.inference_mode()
def timed_run(model: Any, cache: Any, prompt: Tensor, new_tokens: int, clock: Clock) -> Timing:
    """Prefill and decode.

    Each token is read on the host, as a server has to before it can send it; that also waits for an accelerator.

    Args:
        model: A causal language model.
        cache: An empty cache; holds all but the last token afterwards.
        prompt: (B, S) token ids.
        new_tokens: At least 2.
        clock: Seconds.
    """
    with PeakMemory() as memory:
        started = clock()
        tokens = prompt.to(model.device)
        for step in range(new_tokens):
            logits = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits  # (B, 1, V)
            tokens = logits[:, -1:].argmax(-1)  # (B, 1)
            tokens.tolist()
            if step == 0:
                first = clock()
        ended = clock()
    return Timing(first - started, (ended - first) / (new_tokens - 1), ended - started, memory.above_start)
