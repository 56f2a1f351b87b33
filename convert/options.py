"""What a user asks for, before it is checked against a source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mla_convert.convert.plan import (
    Balance,
    Centring,
    Damping,
    Factorization,
    FreqFold,
    Gamma,
    NormRoute,
    ProfileName,
    RankRule,
    RecipeName,
    RefineKind,
    RopePolicy,
    Weighting,
)

DEFAULT_TOKENS = 5120
DEFAULT_WINDOW = 512
# Fitting has more to learn than second moments have.
REFINE_CALIBRATION_TOKENS = 20480
REFINE_STEPS, REFINE_BATCH, REFINE_E2E_TOKENS = 160, 1, 81920
REFINE_CONTINUED_TOKENS = 61440
LONG_WINDOW = 2048


@dataclass(frozen=True)
class ConvertOptions:
    """Options of one conversion.

    Attributes:
        lossless: Rotate all pairs and keep the full useful rank.
        kv_lora_rank: Stored latent width.
        qk_rope_head_dim: Rotary width, two numbers per slot.
        profile: `auto` takes `engine` where it can carry the source and the policy, else `hf`.
        rope_policy: See `RopePolicy`.
        factorization: `joint` or `split`.
        key_rank: Key rank of `split`.
        weighting: None takes `output` with calibration text and `weight` without.
        gamma: Constant of unrotated pairs.
        latent_norm: `auto` takes `epsilon`, or `constant` for float16.
        dtype: Output dtype.
        pad_cache: Stored (kv_lora_rank, qk_rope_head_dim) with rows of zeros beyond what is used.
        calibration: Text sources, each with `::weight=N` behind it where the shares are not to be equal; `self` is
            text that the source writes.
        calibration_tokens: Tokens to measure on.
        calibration_window: Tokens per window.
        calibration_long: Windows of `LONG_WINDOW` tokens to measure on besides.
        text_field: Field of JSONL and dataset rows.
        seed: Of sampling and probes.
        recipe: Published method whose options are to be set; see `recipes.py`.
        freqfold: Of `rorope`; None takes `auto`.
        rope_stride: Source pairs from one slot to the next, for `optimal` in `engine`: 0.5, 1 or 2.
        balance: `transmla` equalises the norms of keys and values before they are decomposed together.
        rank_rule: How `split` shares the rank without a key rank.
        centring: `none` uses raw second moments, as published methods do.
        damping: `none` adds nothing to covariances, as published methods have it.
        refine: Fit the layers after the closed form, and with `e2e` all of them together at the end.
        refine_steps: Steps of each layer's fit.
        refine_batch: Windows per step.
        refine_continued: Tokens of the source's own continuations of the windows, to fit to as well; 0 for none.
        refine_tokens: Most tokens of the pass end to end.
    """

    lossless: bool = False
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    profile: ProfileName | Literal["auto"] = "auto"
    rope_policy: RopePolicy = "optimal"
    factorization: Factorization = "joint"
    key_rank: int | None = None
    weighting: Weighting | None = None
    gamma: Gamma = "measured"
    latent_norm: NormRoute | Literal["auto"] = "auto"
    dtype: Literal["source", "float32", "bfloat16", "float16"] = "source"
    pad_cache: tuple[int, int] | None = None
    calibration: tuple[str, ...] = ()
    calibration_tokens: int = DEFAULT_TOKENS
    calibration_window: int = DEFAULT_WINDOW
    calibration_long: int = 0
    text_field: str = "text"
    seed: int = 0
    recipe: RecipeName | None = None
    freqfold: FreqFold | None = None
    rope_stride: float = 1.0
    balance: Balance = "none"
    rank_rule: RankRule = "spectra"
    centring: Centring = "auto"
    damping: Damping = "auto"
    refine: RefineKind | None = None
    refine_steps: int = REFINE_STEPS
    refine_batch: int = REFINE_BATCH
    refine_continued: int = REFINE_CONTINUED_TOKENS
    refine_tokens: int = REFINE_E2E_TOKENS
