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
        peak_private_bytes: Largest resident memory of any one of them without the pages of mapped files, which the
            system can drop at any time; None where the system does not tell them apart.
    """

    seconds: float
    peak_rss_bytes: int
    peak_private_bytes: int | None = None


class UsageMeter:
    """Context manager that fills `usage` when it ends.

    Args:
        pid: Process to watch, this one by default.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._process = psutil.Process(os.getpid() if pid is None else pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._peak = _Resident(0, None)
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
        peak = self._peak.largest(_resident(self._process))
        self.usage = Usage(time.perf_counter() - self._started, peak.rss, peak.private)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._peak = self._peak.largest(_resident(self._process))


@dataclass(frozen=True)
class _Resident:
    """Resident bytes: of all processes together, and the private ones of the largest."""

    rss: int
    private: int | None

    def largest(self, other: _Resident) -> _Resident:
        private = [value for value in (self.private, other.private) if value is not None]
        return _Resident(max(self.rss, other.rss), max(private, default=None))


def _resident(process: psutil.Process) -> _Resident:
    """Of a process and all below it; nothing for what has ended."""
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return _Resident(0, None)
    own = [_own(member) for member in family]
    private = [member.private for member in own if member.private is not None]
    return _Resident(sum(member.rss for member in own), max(private, default=None))


def _own(process: psutil.Process) -> _Resident:
    try:
        found = process.memory_info()
    except psutil.Error:
        # It ended between being listed and being asked.
        return _Resident(0, None)
    # Only Linux says how much of it is of files.
    return _Resident(int(found.rss), int(found.rss - found.shared) if hasattr(found, "shared") else None)
