"""Cache, speed and memory beside the source in one run, and whether the figures may be shown at all."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mla_convert.manifests.record import Record


class CacheFigures(Record):
    """Bytes of the live cache. `formula` is by dimensions, `payload` what rows hold, the rest is held beside."""

    subject: Literal["source", "target"]
    tokens: int = Field(gt=0)
    dtype: str
    numbers_per_token: int = Field(gt=0)
    formula_bytes_per_token: float = Field(gt=0)
    payload_bytes_per_token: float = Field(gt=0)
    scale_bytes: int = Field(ge=0)
    metadata_bytes: int = Field(ge=0)
    page_bytes: int | None = Field(ge=0)
    resident_bytes: int = Field(gt=0)


class Objective(Record):
    """What a request must meet to count as good: multiples of the source's own median at batch 1, and seconds."""

    ttft_s: float = Field(gt=0)
    tpot_s: float = Field(gt=0)
    rule: str


class SpeedRow(Record):
    """One model at one prompt length and batch, medians over `repeats`; None where the figure was withheld.

    TTFT is the seconds to the first token, TPOT the seconds of each further one; goodput counts tokens per second of
    requests within the objective. `peak_bytes` is what the process held above its state before the run.
    """

    subject: Literal["source", "target"]
    prompt_tokens: int = Field(gt=0)
    new_tokens: int = Field(gt=0)
    batch: int = Field(gt=0)
    repeats: int = Field(gt=0)
    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float | None
    goodput_tokens_per_s: float | None
    peak_bytes: int | None


class DispatchFigures(Record):
    """What was asked for, what ran and why, and calls that fell back."""

    requested: str
    ran: str
    rejected: tuple[str, ...]
    calls: int = Field(ge=0)
    expanded_calls: int = Field(ge=0)
    fallbacks: int = Field(ge=0)
    unobserved_fallbacks: int = Field(ge=0)


class SystemsSection(Record):
    """`withheld` says why speed is not shown; then every figure of `rows` is None."""

    device: str
    threads: int = Field(gt=0)
    dtype: str
    cache: tuple[CacheFigures, ...]
    objective: Objective
    rows: tuple[SpeedRow, ...]
    dispatch: DispatchFigures
    withheld: str | None
