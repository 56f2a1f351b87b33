"""Layer by layer: how far the maps, scores, probabilities and outputs of a converted model are from its source."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mla_convert.manifests.record import Record

Stage = Literal[
    "key map",
    "value map",
    "content score",
    "position score",
    "attention probability",
    "layer output",
    "rest of the layer",
    "latent row",
    "rope row",
    "cache row",
    "visible set",
    "repeated decode",
    "logits",
]


class LayerLadder(Record):
    """One layer; errors are relative norms unless said otherwise.

    Maps are compared by what no change of basis alters: the bilinear form of a query and a key at a set of distances,
    and the product of output and value projection. `weighted_*` count each input direction as the text uses it.
    `output_error` has the source's input, `prefix_output_error` the converted prefix's; `stream_error` is that of the
    residual stream behind the layer, `rest_error` that of the layer without its attention (norms and MLP).
    """

    index: int = Field(ge=0)
    key_map_error: float = Field(ge=0)
    weighted_key_map_error: float = Field(ge=0)
    value_map_error: float = Field(ge=0)
    weighted_value_map_error: float = Field(ge=0)
    singular_energy_kept: float = Field(ge=0)
    content_score_error: float = Field(ge=0)
    position_score_error: float = Field(ge=0)
    score_error: float = Field(ge=0)
    row_max_error: float = Field(ge=0)
    lse_error: float = Field(ge=0)
    total_variation: float = Field(ge=0, le=1)
    output_error: float = Field(ge=0)
    prefix_output_error: float = Field(ge=0)
    stream_error: float = Field(ge=0)
    rest_error: float = Field(ge=0)


class CacheRows(Record):
    """Rows of the live cache of one layer after a prefill and appends, against the reference from the files.

    `explanation` names the fault that would make rows like those found, None where rows are right or nothing fits.
    """

    layer: int = Field(ge=0)
    tokens: int = Field(gt=0)
    width: int = Field(gt=0)
    expected_width: int = Field(gt=0)
    dtype: str
    latent_error: float = Field(ge=0)
    rope_error: float = Field(ge=0)
    explanation: str | None


class Drift(Record):
    """Decoding step by step from the cache after a prefill, teacher-forced on held-out text.

    `kl` is `KL(source ‖ target)` of each step in nats; `one_pass_error` the largest |Δlogit| of a step against one
    pass over all tokens, relative to the largest logit.
    """

    prefill: int = Field(gt=0)
    steps: int = Field(gt=0)
    kl: tuple[float, ...]
    first_quarter_kl: float
    last_quarter_kl: float
    one_pass_kl: float
    one_pass_error: float = Field(ge=0)


class Finding(Record):
    """Something that is no approximation but a fault."""

    stage: Stage
    layer: int | None
    what: str
    measured: float | None
    allowed: float | None


class LadderSection(Record):
    """The whole ladder. `findings` is empty for a right conversion, however lossy."""

    windows: int = Field(gt=0)
    window_length: int = Field(gt=0)
    distances: tuple[int, ...]
    layers: tuple[LayerLadder, ...]
    cache_rows: tuple[CacheRows, ...]
    drift: Drift
    findings: tuple[Finding, ...]

    @property
    def worst_layer(self) -> int:
        """The layer with the largest output error on the source's input."""
        return max(self.layers, key=lambda layer: layer.output_error).index


class ErrorPart(Record):
    """One part of the error with the others held fixed; None where it cannot be measured here, with the reason."""

    name: Literal["conversion", "absorption", "numeric", "selection", "runtime"]
    variant: str
    error: float | None = Field(ge=0)
    held_fixed: str
    note: str | None = None


class DecompositionSection(Record):
    """Where the error comes from (seed 1, 0x0E): relative error of the attention output, worst layer, by part."""

    tokens: int = Field(gt=0)
    parts: tuple[ErrorPart, ...]
