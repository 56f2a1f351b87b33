"""Where the time of a conversion went."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Seconds:
    """A span of time, or a point in it.

    Attributes:
        wall: By the clock.
        cpu: Of all threads, and of child processes that have ended: what other work on the machine does not change.
    """

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Seconds:
        """This point in time, of use only in a difference."""
        used = os.times()
        return cls(time.perf_counter(), time.process_time() + used.children_user + used.children_system)

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


@dataclass(frozen=True)
class PhaseSeconds:
    """Time of one conversion; hashing and opening the source make up the rest of it.

    Attributes:
        forward: The source's own forward passes over the calibration text, none where its statistics were found.
        statistics: What is measured in them, or the time to find it.
        closed_form: Selection, factorisation, the reference that the files will be held to, and writing.
        reload_check: Loading what was written and comparing it, and hashing it.
    """

    forward: Seconds
    statistics: Seconds
    closed_form: Seconds
    reload_check: Seconds
