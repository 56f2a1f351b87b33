"""What a conversion was expected to lose, and what was measured of it."""

from __future__ import annotations

from pydantic import Field

from mla_convert.manifests.record import Record, Sha256Hex


class CandidateRecord(Record):
    """One plan that was predicted; widths are numbers per token and layer."""

    width: int = Field(gt=0)
    qk_rope_head_dim: int = Field(gt=0)
    kv_lora_rank: int = Field(gt=0)
    predicted_kl: float = Field(ge=0)


class PredictionRecord(Record):
    """`KL(source ‖ target)` in nats per token as predicted from the closed form, before any token went through it."""

    predictor: str
    predicted_kl: float = Field(ge=0)
    per_layer: tuple[float, ...]
    chosen_for: str | None
    candidates: tuple[CandidateRecord, ...]


class CalibrationLoss(Record):
    """Loss of the source and of the written files on the first tokens of calibration, nats per token."""

    source: float = Field(ge=0)
    target: float = Field(ge=0)
    tokens: int = Field(gt=0)
    uniform: float = Field(gt=0)


class MeasuredRecord(Record):
    """Quality of the written files on held-out text, run by stock transformers in float32; `kl` in nats per token."""

    kl: float
    perplexity: float = Field(gt=0)
    source_perplexity: float = Field(gt=0)
    ratio: float = Field(gt=0)
    top1_agreement: float = Field(ge=0, le=1)
    text: tuple[str, ...]
    text_sha256: Sha256Hex
    tokens: int = Field(gt=0)
    scored_tokens: int = Field(gt=0)
    window: int = Field(gt=0)
    stride: int = Field(gt=0)
    seed: int = Field(ge=0)
