"""What a conversion will do, decided before any work: frozen, printable, with an identity of its own."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from mla_convert.manifests.digest import sha256_json

ProfileName = Literal["engine", "hf", "full"]
RopePolicy = Literal["optimal", "high", "low", "uniform", "2-norm", "greedy", "rorope", "mean"]
RecipeName = Literal["transmla", "mha2mla", "care", "x-ecomla", "elitekv", "optimal"]
FreqFold = Literal["auto", "1", "2", "4", "8"]
Factorization = Literal["joint", "split"]
Weighting = Literal["output", "activation", "weight"]
Gamma = Literal["measured", "one"]
NormRoute = Literal["epsilon", "constant"]
DtypeName = Literal["float32", "bfloat16", "float16"]

Balance = Literal["none", "transmla"]
RankRule = Literal["spectra", "care"]
Centring = Literal["auto", "none"]
Damping = Literal["auto", "none"]

# Policies that put every key head's pair in a slot of its own.
RefineKind = Literal["block", "e2e"]

HEAD_POLICIES: tuple[RopePolicy, ...] = ("high", "low", "uniform", "2-norm", "greedy")
# Policies that rank pairs or components by what calibration measured.
MEASURED_POLICIES: tuple[RopePolicy, ...] = ("optimal", "2-norm", "greedy", "rorope")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


SELF_TEXT = "self"


class CalibrationSpec(_Frozen):
    """What the statistics are measured on.

    Attributes:
        texts: Text sources as given, without their weights.
        weights: Their shares of the tokens, which add up to one.
        tokens: Calibration tokens asked for, without those of long windows.
        window: Tokens per window.
        long_windows: Number of long windows besides.
        long_window: Tokens of each of those.
        text_field: Field of JSONL rows and dataset rows.
    """

    texts: tuple[str, ...]
    weights: tuple[float, ...]
    tokens: int
    window: int
    long_windows: int
    long_window: int
    text_field: str

    @property
    def score_ratio(self) -> float:
        """Attention scores of all windows over those of the short ones: what long windows add to the measuring."""
        return 1 + self.long_windows * self.long_window**2 / (self.tokens // self.window * self.window**2)


class RefineSpec(_Frozen):
    """Fitting after the closed form, on the windows of calibration.

    Attributes:
        kind: `block`, or `e2e`: a pass end to end after it.
        steps: Of each layer's fit.
        batch: Windows per step.
        continued_tokens: Tokens of the source's own continuations of the windows, to fit to as well.
        e2e_tokens: Most tokens that go through the pass end to end, each time counted; None without one.
    """

    kind: RefineKind
    steps: int
    batch: int
    continued_tokens: int
    e2e_tokens: int | None


class ConversionPlan(_Frozen):
    """Every choice of one conversion; stored widths include padding and a constant channel.

    Attributes:
        family: Source family.
        profile: Output profile.
        lossless: All pairs rotated and full useful rank.
        rope_policy: How rotary components are chosen.
        rope_slots: Rotary pairs of the shared key that are used.
        factorization: `joint` or `split`.
        key_rank: Key rank of `split`, None where it follows the spectra.
        weighting: Metric of the factorisation.
        gamma: `measured`, or `one` as published converters have it.
        useful_rank: Latent channels that carry something.
        kv_lora_rank: Stored latent width.
        qk_rope_head_dim: Stored rope width.
        qk_nope_head_dim: Content key width per head.
        v_head_dim: Value width per head.
        q_lora_rank: Width of the query detour that carries a query bias, else None.
        attention_bias: Whether the target has biases.
        latent_norm: How the stock latent norm is neutralised.
        residual_scale: Factor on the residual stream (1 where nothing is scaled).
        rms_norm_eps: Epsilon written to the configuration.
        tie_word_embeddings: Written to the configuration.
        dtype: `source` keeps each tensor's dtype.
        attention_dtype: Dtype of the new attention tensors.
        seed: Of calibration sampling and probes.
        calibration: None where no statistics are needed.
        recipe: Name of the published method that set the options, or None.
        freqfold: Neighbouring frequencies treated as one by `rorope`, `auto` to choose on calibration text.
        rope_stride: Source pairs from one slot to the next where `optimal` fills the `engine` profile's grid.
        balance: Scalar between keys and values before they are decomposed together.
        rank_rule: How `split` shares the rank without a key rank.
        centring: `none` judges inputs by their raw second moment and adds no mean to the output.
        damping: `none` adds nothing to the input covariance.
        refine: None where the closed form is written as it is.
    """

    family: str
    profile: ProfileName
    lossless: bool
    rope_policy: RopePolicy
    rope_slots: int
    factorization: Factorization
    key_rank: int | None
    weighting: Weighting
    gamma: Gamma
    useful_rank: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    attention_bias: bool
    latent_norm: NormRoute
    residual_scale: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: Literal["source", "float32", "bfloat16", "float16"]
    attention_dtype: DtypeName
    seed: int
    calibration: CalibrationSpec | None
    recipe: RecipeName | None = None
    freqfold: Literal["auto"] | int | None = None
    rope_stride: float = 1.0
    balance: Balance = "none"
    rank_rule: RankRule = "spectra"
    centring: Centring = "auto"
    damping: Damping = "auto"
    refine: RefineSpec | None = None

    @property
    def plan_id(self) -> str:
        """`sha256:…` of the plan's canonical JSON."""
        return sha256_json(self.model_dump(mode="json"))

    @property
    def padded(self) -> bool:
        """Whether rows of zeros were asked for beyond what is used."""
        channel = 1 if self.latent_norm == "constant" else 0
        return self.kv_lora_rank > self.useful_rank + channel or self.qk_rope_head_dim > 2 * self.rope_slots
