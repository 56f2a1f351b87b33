"""A measured figure with its interval."""

from __future__ import annotations

from pydantic import Field

from mla_convert.manifests.record import Record


class Figure(Record):
    """A value and the ends of its bootstrap interval; both None where the spread is unknown, as for one window."""

    value: float
    low: float | None = None
    high: float | None = None


class Resampling(Record):
    """How intervals were made: whole windows (or prompts) drawn with replacement."""

    resamples: int = Field(gt=0)
    confidence: float = Field(gt=0, lt=1)
    seed: int = Field(ge=0)
