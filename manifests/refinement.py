"""How a converted model was refined after its closed form, and what that did to held-out windows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mla_convert.manifests.record import Record, Sha256Hex


class FitRecord(Record):
    """Loss on the held-out windows before and after a fit; the state after `kept_step` is the one that was kept."""

    before: float = Field(ge=0)
    after: float = Field(ge=0)
    kept_step: int = Field(ge=0)


class ContinuationRecord(Record):
    """Windows that the source wrote after openings out of the calibration windows; `sha256` is of their token ids."""

    windows: int = Field(gt=0)
    opening_tokens: int = Field(gt=0)
    temperature: float = Field(gt=0)
    top_p: float = Field(gt=0, le=1)
    sha256: Sha256Hex


class RefinementRecord(Record):
    """Block reconstruction of every layer, and the pass end to end where it was asked for.

    Losses of `layers` are relative: squared distance `x` from the source's stream after attention over what its
    attention adds, as `10·log(1 + x/10)`, mean over the tokens. The loss of `end_to_end` is `KL(source ‖ target)` in
    nats per token. Windows are those of calibration; `continuations` were fitted to as well.
    """

    kind: Literal["block", "e2e"]
    version: int
    optimizer: str
    block_rate: float = Field(gt=0)
    block_steps: int = Field(gt=0)
    batch: int = Field(gt=0)
    window: int = Field(gt=0)
    windows: int = Field(gt=1)
    held_out_windows: tuple[int, ...] = Field(min_length=1)
    seed: int
    continuations: ContinuationRecord | None
    layers: tuple[FitRecord, ...]
    e2e_rate: float | None
    e2e_steps: int | None
    end_to_end: FitRecord | None
