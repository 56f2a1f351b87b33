"""Time and peak memory of one step, sampled while it runs."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from types import TracebackType

import psutil

SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Usage:
    """What a step took.

    Attributes:
        seconds: Wall-clock time.
        peak_rss_bytes: Largest resident memory seen of the process and its children together. Sampled ten
            times a second, so a shorter peak can be missed; pages of mapped files count while resident.
    """

    seconds: float
    peak_rss_bytes: int


class UsageMeter:
    """Context manager that fills `usage` when it ends.

    Args:
        pid: Process to watch, this one by default.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._process = psutil.Process(os.getpid() if pid is None else pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._peak = 0
        self._started = 0.0
        self.usage = Usage(0.0, 0)

    def __enter__(self) -> UsageMeter:
        self._started = time.perf_counter()
        self._peak = _resident(self._process)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.usage = Usage(time.perf_counter() - self._started, max(self._peak, _resident(self._process)))

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, _resident(self._process))


def _resident(process: psutil.Process) -> int:
    """Resident bytes of a process and all below it; 0 for what has ended."""
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    return sum(_own(member) for member in family)


def _own(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        # It ended between being listed and being asked.
        return 0
