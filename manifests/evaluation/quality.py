"""Quality on held-out text: overall, by domain, and by position."""

from __future__ import annotations

from pydantic import Field

from mla_convert.manifests.evaluation.figure import Figure, Resampling
from mla_convert.manifests.record import Record, Sha256Hex


class TextQuality(Record):
    """Source and target on one text, or on all of them.

    `kl` is `KL(source ‖ target)` in nats per token. `top5` is the share of tokens whose likeliest under the source is
    among the target's five. `ece_*` is the expected calibration error of the likeliest token, 15 bins of equal width.
    """

    name: str
    sha256: Sha256Hex
    windows: int = Field(gt=0)
    tokens: int = Field(gt=0)
    source_perplexity: Figure
    target_perplexity: Figure
    ratio: Figure
    kl: Figure
    top1: Figure
    top5: Figure
    ece_source: Figure
    ece_target: Figure


class PositionBucket(Record):
    """Tokens at positions `first` to `last` of their window (0 is the window's first token)."""

    first: int = Field(ge=0)
    last: int = Field(ge=0)
    tokens: int = Field(gt=0)
    source_perplexity: float = Field(gt=0)
    target_perplexity: float = Field(gt=0)
    ratio: Figure
    kl: Figure


class WindowSums(Record):
    """Sums over the scored tokens of each window, for paired comparison later."""

    text: str
    start: int = Field(ge=0)
    tokens: int = Field(gt=0)
    source_nll: float
    target_nll: float
    kl: float
    top1: int = Field(ge=0)
    top5: int = Field(ge=0)


class QualitySection(Record):
    """Quality of the reloaded files; `long_context` is empty where no text is long enough."""

    dtype: str
    seq_len: int = Field(gt=1)
    stride: int = Field(gt=0)
    bos_policy: str
    overall: TextQuality
    domains: tuple[TextQuality, ...]
    buckets: tuple[PositionBucket, ...]
    long_context: tuple[PositionBucket, ...]
    long_seq_len: int | None
    windows: tuple[WindowSums, ...]
    resampling: Resampling

    @property
    def worst_domain(self) -> TextQuality:
        """The text with the largest KL."""
        return max(self.domains, key=lambda text: text.kl.value)
