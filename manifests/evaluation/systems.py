"""Cache, speed and memory beside the source in one run, and whether the figures may be shown at all."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mla_convert.manifests.record import Record


class CacheFigures(Record):
    """Bytes of the live cache of one sequence after a run.

    `formula` is by dimensions, `payload` what the cached numbers take. `scale_bytes` belong to rows that are not plain
    numbers, `metadata_bytes` are block tables, lengths and reference counts, `page_bytes` whole pages with what they
    hold (None for a cache without pages), `resident_bytes` everything.
    """

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


class ObjectiveLimit(Record):
    """The objective in seconds for requests of one prompt length."""

    prompt_tokens: int = Field(gt=0)
    ttft_s: float = Field(gt=0)
    tpot_s: float = Field(gt=0)


class Objective(Record):
    """What a request must meet to count as good.

    `rule` says it in words; `limits` are what came of it, by prompt length, and empty where speed was withheld.
    """

    rule: str
    factor: float = Field(gt=0)
    limits: tuple[ObjectiveLimit, ...]


class SpeedRow(Record):
    """One model at one prompt length and batch; None where the figure was withheld.

    TTFT is the seconds to the first token, TPOT the mean seconds of each further one, both medians over `repeats`; all
    requests of a batch start together. Tokens per second are those of all repeats over the seconds of all repeats, and
    goodput counts only those of requests within the objective. `peak_bytes` is the most that the process held above
    its state before a run.
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
    """What was asked for, what ran and why, in calls of a layer.

    `calls` are those on the receipts of the decode backends, `expected_calls` those that all passes of the run need,
    `expanded_calls` prefills with the keys and values of all heads (0 where stock transformers ran, which expands all).
    `fallbacks` have a reason on the receipt; `unobserved_fallbacks` have none, or ran otherwise than the receipt says.
    """

    requested: str
    ran: str
    rejected: tuple[str, ...]
    calls: int = Field(ge=0)
    expected_calls: int = Field(ge=0)
    expanded_calls: int = Field(ge=0)
    fallbacks: int = Field(ge=0)
    unobserved_fallbacks: int = Field(ge=0)


class SystemsSection(Record):
    """`withheld` says why speed is not shown; then every figure of `rows` is None.

    `models_in_memory` says how source and target shared the machine: `together`, their runs alternating, or, where
    memory does not hold both, `one at a time`, so that a machine that slows down may favour the first.
    """

    device: str
    threads: int = Field(gt=0)
    dtype: str
    models_in_memory: Literal["together", "one at a time"]
    cache: tuple[CacheFigures, ...]
    objective: Objective
    rows: tuple[SpeedRow, ...]
    dispatch: DispatchFigures
    withheld: str | None
