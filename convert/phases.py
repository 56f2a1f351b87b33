"""Where the time of a conversion went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PhaseSeconds:
    """Wall-clock seconds of one conversion; hashing and opening the source make up the rest of it.

    Attributes:
        forward: The source's own forward passes over the calibration text, 0 where its statistics were found.
        statistics: What is measured in them, or the time to find it.
        closed_form: Selection, factorisation, the reference that the files will be held to, and writing.
        reload_check: Loading what was written and comparing it, and hashing it.
    """

    forward: float
    statistics: float
    closed_form: float
    reload_check: float
