"""Quality on held-out text: overall, by domain, and by position."""

from __future__ import annotations

from pydantic import Field

from mla_convert.manifests.evaluation.figure import Figure, Resampling
from mla_convert.manifests.record import Digest, Record, Sha256Hex


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
    """Tokens at positions `first` to `last` of their window; 0, the window's first token, is never scored."""

    first: int = Field(ge=0)
    last: int = Field(ge=0)
    tokens: int = Field(gt=0)
    source_perplexity: float = Field(gt=0)
    target_perplexity: float = Field(gt=0)
    ratio: Figure
    kl: Figure


class WindowSums(Record):
    """Sums over the scored tokens of one window, for paired comparison later.

    `start` counts tokens of the window's text; `ids_digest` is that of the window's token ids as a JSON list.
    """

    text: str
    start: int = Field(ge=0)
    ids_digest: Digest
    tokens: int = Field(gt=0)
    source_nll: float
    target_nll: float
    kl: float
    top1: int = Field(ge=0)
    top5: int = Field(ge=0)


class QualitySection(Record):
    """Quality of the reloaded files, each window within one text.

    `long_context` is from windows of `long_seq_len`, empty where no text is long enough or windows are as long anyway.
    """

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
