"""From options and a source's headers to a `ConversionPlan`, refusing what cannot be done."""

from __future__ import annotations

import math

from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.method_options import check_method, check_stride, fold_of
from mla_convert.convert.options import LONG_WINDOW, ConvertOptions
from mla_convert.convert.plan import (
    HEAD_POLICIES,
    MEASURED_POLICIES,
    SELF_TEXT,
    CalibrationSpec,
    ConversionPlan,
    DtypeName,
    NormRoute,
    ProfileName,
    RefineSpec,
    Weighting,
)
from mla_convert.convert.profiles import ENGINE_NORM_EPS, Demand, refusal, residual_scale
from mla_convert.convert.recipes import apply_recipe
from mla_convert.convert.weights import AttentionShape
from mla_convert.errors import InputRefused, UsageFault

# Content width of a plan without content: stock attention wants at least one column, eight keep it aligned.
EMPTY_CONTENT_WIDTH = 8


def make_plan(source: SourceCheckpoint, options: ConvertOptions) -> ConversionPlan:
    """Decide everything that can be decided before work starts.

    Raises:
        UsageFault: For options that contradict each other or are out of range, with the legal range.
        InputRefused: If no profile carries the source, or the one asked for does not.
    """
    shape = source.shape
    options = apply_recipe(options)
    check_stride(options)
    slots = _rope_slots(shape, options)
    attention_dtype = output_dtype(source, options)
    policy = "high" if options.lossless else options.rope_policy
    norm = norm_route(options, attention_dtype)
    padded_rope = None if options.pad_cache is None else options.pad_cache[1]
    demand = Demand(policy, slots, attention_dtype, padded_rope, options.latent_norm == "constant", options.rope_stride)
    profile = _profile(source, options, demand)
    channel = 1 if norm == "constant" else 0
    useful, stored, stored_rope = _widths(shape, options, slots, channel)
    weighting = _weighting(options)
    calibration = _calibration(options, int(source.config.max_position_embeddings))
    check_method(options, weighting)
    mean_in_output = calibration is not None and options.centring == "auto"
    scale = residual_scale(profile, float(source.config.rms_norm_eps))
    return ConversionPlan(
        family=source.family.name,
        profile=profile,
        lossless=options.lossless,
        rope_policy=policy,
        rope_slots=slots,
        factorization=options.factorization,
        key_rank=_key_rank(shape, options, useful, slots),
        weighting=weighting,
        gamma="one" if calibration is None else options.gamma,
        useful_rank=useful,
        kv_lora_rank=stored,
        qk_rope_head_dim=stored_rope,
        qk_nope_head_dim=_content_width(shape, policy, slots, stored_rope, attention_dtype),
        v_head_dim=shape.head_dim,
        q_lora_rank=shape.hidden_size + 1 if _has_query_bias(source) else None,
        attention_bias=profile == "hf" and (source.has_bias or norm == "constant" or mean_in_output),
        latent_norm=norm,
        residual_scale=scale,
        rms_norm_eps=ENGINE_NORM_EPS if profile == "engine" else float(source.config.rms_norm_eps),
        tie_word_embeddings=source.tied and profile != "engine",
        dtype=options.dtype,
        attention_dtype=attention_dtype,
        seed=options.seed,
        calibration=calibration,
        refine=_refine(options, calibration),
        recipe=options.recipe,
        freqfold=fold_of(shape, options, slots),
        rope_stride=options.rope_stride,
        balance=options.balance,
        rank_rule=options.rank_rule,
        centring=options.centring,
        damping=options.damping,
    )


def legal_rope_step(shape: AttentionShape, policy: str) -> int:
    """`qk_rope_head_dim` must be a multiple of this: 2, or 2·G for policies that keep pairs per key head."""
    return 2 * shape.num_kv_heads if policy in HEAD_POLICIES else 2


def largest_rope_width(shape: AttentionShape, policy: str) -> int:
    """Largest `qk_rope_head_dim`: every pair of every key head, or for policies that mix the heads every pair once."""
    return 2 * shape.pairs * (1 if policy in ("rorope", "mean") else shape.num_kv_heads)


def _rope_slots(shape: AttentionShape, options: ConvertOptions) -> int:
    everything = shape.num_kv_heads * shape.pairs
    if options.lossless:
        if options.kv_lora_rank is not None or options.qk_rope_head_dim is not None:
            raise UsageFault("--lossless sets both widths itself", remedy="Drop --kv-lora-rank and --qk-rope-head-dim.")
        return everything
    if options.kv_lora_rank is None or options.qk_rope_head_dim is None:
        raise UsageFault("no widths given", expected="--lossless, or both --kv-lora-rank and --qk-rope-head-dim")
    step, width = legal_rope_step(shape, options.rope_policy), options.qk_rope_head_dim
    largest = largest_rope_width(shape, options.rope_policy)
    if not step <= width <= largest or width % step:
        raise UsageFault(
            f"--qk-rope-head-dim does not fit policy {options.rope_policy!r}",
            expected=f"a multiple of {step} from {step} to {largest}",
            found=str(width),
        )
    if options.rope_policy == "rorope" and shape.pairs % (width // 2):
        legal = [2 * count for count in range(1, shape.pairs + 1) if shape.pairs % count == 0]
        raise UsageFault(
            "--qk-rope-head-dim does not fit policy 'rorope', which keeps frequencies at a uniform stride",
            expected=f"one of {', '.join(map(str, legal))}",
            found=str(width),
        )
    return width // 2


def _widths(shape: AttentionShape, options: ConvertOptions, slots: int, channel: int) -> tuple[int, int, int]:
    """(useful rank, stored rank, stored rope width)."""
    largest = shape.useful_rank(2 * slots)
    if options.lossless:
        useful, stored = largest, largest + channel
    else:
        assert options.kv_lora_rank is not None  # checked by _rope_slots
        useful, stored = options.kv_lora_rank - channel, options.kv_lora_rank
        if not 1 <= useful <= largest:
            raise UsageFault(
                "--kv-lora-rank is out of range",
                expected=f"{1 + channel} to {largest + channel}, from min(hidden {shape.hidden_size}, "
                f"{shape.cached_numbers} cached numbers - {2 * slots} rotary)"
                + (" and one constant channel" if channel else ""),
                found=str(options.kv_lora_rank),
                remedy="Larger ranks carry nothing; --pad-cache adds rows of zeros where a kernel wants them.",
            )
    if options.pad_cache is None:
        return useful, stored, 2 * slots
    pad_rank, pad_rope = options.pad_cache
    if pad_rank < stored or pad_rope < 2 * slots or pad_rope % 2:
        raise UsageFault(
            "--pad-cache is narrower than what is stored",
            expected=f"at least {stored}+{2 * slots}, rope even",
            found=f"{pad_rank}+{pad_rope}",
        )
    return useful, pad_rank, pad_rope


def _profile(source: SourceCheckpoint, options: ConvertOptions, demand: Demand) -> ProfileName:
    if options.profile != "auto":
        reason = refusal(options.profile, source, demand)
        if reason is not None:
            raise InputRefused(reason, where=f"profile {options.profile}")
        return options.profile
    order: tuple[ProfileName, ...] = ("engine", "hf")
    for profile in order:
        if refusal(profile, source, demand) is None:
            return profile
    raise InputRefused("; ".join(f"{name}: {refusal(name, source, demand)}" for name in order), where="profile auto")


def output_dtype(source: SourceCheckpoint, options: ConvertOptions) -> DtypeName:
    """Dtype of the new attention tensors.

    Raises:
        InputRefused: If the source's cannot be written.
    """
    if options.dtype != "source":
        return options.dtype
    name = str(source.attention_dtype).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise InputRefused(f"attention weights in {name}", remedy="Choose --dtype float32 or bfloat16.")
    return name  # type: ignore[return-value]


def norm_route(options: ConvertOptions, dtype: str) -> NormRoute:
    """How the stock latent norm will be neutralised.

    Raises:
        UsageFault: If the route asked for does not fit the dtype.
    """
    if options.latent_norm == "auto":
        return "constant" if dtype == "float16" else "epsilon"
    if options.latent_norm == "epsilon" and dtype == "float16":
        raise UsageFault("the epsilon route does not fit float16", remedy="Use --latent-norm constant.")
    return options.latent_norm


def _weighting(options: ConvertOptions) -> Weighting:
    if options.lossless:
        return "weight"
    weighting = options.weighting or ("output" if options.calibration else "weight")
    if weighting != "weight" and not options.calibration:
        raise UsageFault(f"--weighting {weighting} needs calibration text", remedy="Give --calibration PATH.")
    if not options.calibration and options.rope_policy in MEASURED_POLICIES:
        raise UsageFault(
            f"--rope-policy {options.rope_policy} needs calibration text",
            remedy="Give --calibration PATH, or use high, low, uniform or mean.",
        )
    return weighting


def _calibration(options: ConvertOptions, positions: int) -> CalibrationSpec | None:
    if options.lossless or not options.calibration:
        return None
    if options.calibration_window < 2 or options.calibration_tokens < options.calibration_window:
        raise UsageFault(
            "too few calibration tokens for one window",
            expected="--calibration-tokens at least --calibration-window, which is at least 2",
            found=f"{options.calibration_tokens} tokens, windows of {options.calibration_window}",
        )
    if options.calibration_window > positions:
        raise UsageFault(
            "--calibration-window is longer than the source's positions",
            expected=f"at most {positions}",
            found=str(options.calibration_window),
        )
    texts, weights = _sources(options)
    return CalibrationSpec(
        texts=texts,
        weights=weights,
        tokens=options.calibration_tokens,
        window=options.calibration_window,
        long_windows=options.calibration_long,
        long_window=_long_window(options, texts, positions),
        text_field=options.text_field,
    )


def _refine(options: ConvertOptions, calibration: CalibrationSpec | None) -> RefineSpec | None:
    if options.refine is None:
        return None
    if calibration is None:
        raise UsageFault(
            f"--refine {options.refine} needs calibration text, and a plan that loses something",
            remedy="Give --calibration PATH, or drop it.",
        )
    if min(options.refine_steps, options.refine_batch, options.refine_tokens) < 1:
        raise UsageFault("--refine-steps, --refine-batch and --refine-tokens are at least 1")
    if options.refine_continued < 0:
        raise UsageFault("--refine-continued is at least 0", found=str(options.refine_continued))
    tokens = options.refine_tokens if options.refine == "e2e" else None
    return RefineSpec(
        kind=options.refine,
        steps=options.refine_steps,
        batch=options.refine_batch,
        continued_tokens=options.refine_continued,
        e2e_tokens=tokens,
    )


def _sources(options: ConvertOptions) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Names of the text sources, and their shares of the tokens."""
    parted = [split_weight(given) for given in options.calibration]
    texts = tuple(name for name, _ in parted)
    repeated = sorted({name for name in texts if texts.count(name) > 1})
    if repeated:
        raise UsageFault("a calibration text given twice", found=", ".join(repeated), remedy="Give it a ::weight=N.")
    if len(texts) > options.calibration_tokens // options.calibration_window:
        raise UsageFault(
            "more calibration texts than windows",
            expected=f"--calibration-tokens at least {len(texts) * options.calibration_window}",
            found=str(options.calibration_tokens),
        )
    largest = max(weight for _, weight in parted)
    parted = [(name, weight / largest) for name, weight in parted]  # so that no sum of them overflows
    total = math.fsum(weight for _, weight in parted)
    return texts, tuple(weight / total for _, weight in parted)


def split_weight(given: str) -> tuple[str, float]:
    """`books/::weight=2` as the text's name and its weight, 1 where none is given.

    Raises:
        UsageFault: If the weight is no positive number.
    """
    name, mark, number = given.rpartition("::weight=")
    if not mark:
        return given, 1.0
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise UsageFault("a weight that is no positive number", expected="PATH::weight=2", found=given)
    return name, weight


def _long_window(options: ConvertOptions, texts: tuple[str, ...], positions: int) -> int:
    if options.calibration_long == 0:
        return 0
    length = min(LONG_WINDOW, positions)
    if length <= options.calibration_window:
        raise UsageFault(
            "--calibration-long would add no longer windows",
            expected=f"--calibration-window below {length}",
            found=str(options.calibration_window),
        )
    if texts == (SELF_TEXT,):
        raise UsageFault(
            "--calibration-long needs text besides what the source writes", remedy="Add a --calibration PATH."
        )
    return length


def _key_rank(shape: AttentionShape, options: ConvertOptions, useful: int, slots: int) -> int | None:
    if options.factorization == "joint" or options.lossless:
        if options.key_rank is not None:
            raise UsageFault("--key-rank is for --factorization split")
        return None
    if options.key_rank is None:
        return None
    content = shape.num_kv_heads * shape.head_dim - 2 * slots
    lowest, highest = max(0, useful - shape.num_kv_heads * shape.head_dim), min(useful, max(content, 0))
    if not lowest <= options.key_rank <= highest:
        raise UsageFault("--key-rank is out of range", expected=f"{lowest} to {highest}", found=str(options.key_rank))
    return options.key_rank


def _content_width(shape: AttentionShape, policy: str, slots: int, stored_rope: int, dtype: str) -> int:
    """Columns per head for what is not rotated; the same in every layer, so known before calibration."""
    if slots == shape.num_kv_heads * shape.pairs:
        if dtype == "float32":
            return EMPTY_CONTENT_WIDTH
        # Query rows carry √((d_N + d_R)/d). In a half type only a power of two leaves their bits alone.
        total = shape.head_dim
        while total < stored_rope + EMPTY_CONTENT_WIDTH:
            total *= 4
        return total - stored_rope
    if policy in ("high", "low", "uniform"):
        return shape.head_dim - 2 * slots // shape.num_kv_heads
    if policy == "mean":
        # The rotated pairs of every head are gone from the content, whatever their mean leaves of them.
        return max(shape.head_dim - 2 * slots, EMPTY_CONTENT_WIDTH)
    return shape.head_dim


def _has_query_bias(source: SourceCheckpoint) -> bool:
    return source.layer_name(0, "q_proj.bias") in source.files.names
