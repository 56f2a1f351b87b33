"""What each output profile can carry, as rules that say yes or give the reason (design.md, "Output profiles")."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.plan import HEAD_POLICIES, ProfileName, RopePolicy

# The engines read the latent norm's epsilon from `rms_norm_eps`; transformers hard-codes 1e-6 for it.
ENGINE_NORM_EPS = 1e-6
# θ' = θ^(d_R/d) is raised to powers in float32, whose largest number is 3e38.
LARGEST_THETA_EXPONENT = 37


@dataclass(frozen=True)
class Demand:
    """What a plan wants a profile to hold.

    Attributes:
        policy: Rope policy.
        slots: Rotary slots.
        dtype: Dtype of the attention tensors.
        padded_rope: Rotary width with padding, None without.
        constant_channel: Whether the latent norm is to be neutralised by a constant channel.
        rope_stride: Source pairs from one slot to the next, for `optimal` in `engine`.
    """

    policy: RopePolicy
    slots: int
    dtype: str
    padded_rope: int | None = None
    constant_channel: bool = False
    rope_stride: float = 1.0


def refusal(profile: ProfileName, source: SourceCheckpoint, demand: Demand) -> str | None:
    """Why `profile` cannot carry `demand` of `source`, naming what can; None if it can."""
    if profile == "full":
        return "the full profile is not available yet; engine and hf are"
    if profile == "hf" and demand.rope_stride != 1:
        return "a rope stride is for the engine profile; hf can hold any frequencies and has them chosen"
    return _hf_refusal(demand) if profile == "hf" else _engine_refusal(source, demand)


def _hf_refusal(demand: Demand) -> str | None:
    return None if demand.dtype in ("float32", "bfloat16", "float16") else f"dtype {demand.dtype} cannot be written"


def _engine_refusal(source: SourceCheckpoint, demand: Demand) -> str | None:
    if source.has_bias:
        named = sorted(
            name.removeprefix("model.layers.0.")
            for name in source.files.names
            if ".layers.0." in name and "bias" in name
        )
        return f"the engine profile has no biases and the source has {', '.join(named)}; use --profile hf"
    if demand.constant_channel:
        return "the engine profile has no bias for a constant channel; use --latent-norm epsilon or --profile hf"
    if demand.dtype == "float16":
        return "the engine profile cannot hold float16; use --dtype bfloat16 or float32, or --profile hf"
    if demand.rope_stride * source.shape.num_kv_heads < 1:
        return (
            f"a rope stride of {demand.rope_stride:g} holds {round(1 / demand.rope_stride)} components of each pair, "
            f"and the source has {source.shape.num_kv_heads} KV heads; use --rope-stride 1"
        )
    if not geometric(source, demand):
        return (
            f"the engine profile holds one component per frequency on a geometric set, which policy "
            f"{demand.policy!r} with {demand.slots} slots is not here; use --rope-policy optimal with at most "
            f"{_most_slots(source, demand.rope_stride)} slots, or --profile hf"
        )
    if source.rope.rope_type == "linear":
        return "the engine profile cannot hold linearly scaled rope; use --profile hf"
    stored = demand.padded_rope or 2 * demand.slots
    stride = source.shape.pairs // demand.slots if demand.policy == "uniform" else demand.rope_stride
    if math.log10(source.rope.theta) * stride * stored / source.shape.head_dim > LARGEST_THETA_EXPONENT:
        return (
            f"a stored rope width of {stored} at head size {source.shape.head_dim} needs a rope_theta beyond float32 "
            "in the engine profile; pad less, or use --profile hf"
        )
    legal = source.rope.unscaled_pairs
    slots_of_legal = math.ceil(legal / stride)
    if legal < source.shape.pairs and demand.slots > slots_of_legal:
        return (
            f"the engine profile is exact for {source.rope.rope_type} rope only while every kept pair is an unscaled "
            f"one: at most {legal} pairs (--qk-rope-head-dim {2 * slots_of_legal}); use that, or --profile hf"
        )
    return None


def _most_slots(source: SourceCheckpoint, stride: float) -> int:
    """Slots of `optimal` at a stride: one for every pair that it meets, or below one `1 / stride` for every pair."""
    return math.ceil(source.shape.pairs / stride)


def geometric(source: SourceCheckpoint, demand: Demand) -> bool:
    """Whether a policy can give frequencies `ϑ_j = θ^(-2sj/d)`, one component each."""
    pairs, groups = source.shape.pairs, source.shape.num_kv_heads
    policy, slots = demand.policy, demand.slots
    if policy == "optimal":
        return slots <= _most_slots(source, demand.rope_stride)
    if slots > pairs:
        return False
    # Per-head policies put every key head's pair in a slot of its own.
    single_head = groups == 1 and policy in HEAD_POLICIES
    return single_head and (policy == "high" or slots == pairs or (policy == "uniform" and pairs % slots == 0))


def residual_scale(profile: ProfileName, rms_norm_eps: float) -> float:
    """Factor on the residual stream so that every norm's epsilon can be 1e-6 (1.0: nothing to do).

    `RMSNorm_ε(h) = RMSNorm_ε'(h·√(ε'/ε))`, so scaling what writes to the stream is exact.
    """
    if profile != "engine" or math.isclose(rms_norm_eps, ENGINE_NORM_EPS, rel_tol=1e-9):
        return 1.0
    return math.sqrt(ENGINE_NORM_EPS / rms_norm_eps)
