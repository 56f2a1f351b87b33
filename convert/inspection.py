"""What can be said before any conversion: a source's facts and suggested plans, and a preview of one plan."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.checkpoint_writer import INDEX_NAME, SHARD_BYTES
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import ConversionPlan, DtypeName, NormRoute, ProfileName, RopePolicy
from mla_convert.convert.planning import largest_rope_width, legal_rope_step, make_plan
from mla_convert.convert.profiles import Demand, refusal
from mla_convert.convert.receipts import unknown_config_keys
from mla_convert.convert.run import estimated_bytes
from mla_convert.convert.sidecars import SIDECAR_PATTERNS
from mla_convert.convert.weights import AttentionShape
from mla_convert.manifests.models import MANIFEST_NAME

PlanDtype = Literal["source", "float32"]
SHARES = (0.5, 0.375, 0.25)
# A quarter of the width, and at small widths half a head's pairs: measured best on SmolLM2 (docs/fidelity.md).
ROPE_SHARE, SMALL_WIDTH_ROPE_SHARE = 1 / 4, 1 / 3
PROFILES: tuple[ProfileName, ...] = get_args(ProfileName)
POLICIES: tuple[RopePolicy, ...] = get_args(RopePolicy)
LOSSLESS_POLICY: RopePolicy = "high"


@dataclass(frozen=True)
class CacheFacts:
    """What a checkpoint caches.

    Attributes:
        numbers_per_token_per_layer: Numbers.
        bytes_per_token: Bytes of all layers, in `dtype`.
        dtype: Of the attention weights, in which the cache is kept.
    """

    numbers_per_token_per_layer: int
    bytes_per_token: int
    dtype: str


@dataclass(frozen=True)
class RopeFacts:
    """Rotary position embedding of a source.

    Attributes:
        rope_type: As in its configuration.
        theta: Base.
        pairs: Rotary pairs per head.
        unscaled_pairs: How many of the fastest the scaling leaves alone.
    """

    rope_type: str
    theta: float
    pairs: int
    unscaled_pairs: int


@dataclass(frozen=True)
class WidthRange:
    """Legal values of a width: `lowest`, `lowest + step`, … up to `highest`."""

    lowest: int
    highest: int
    step: int


@dataclass(frozen=True)
class ProfileFacts:
    """What one output profile can carry of the source.

    Attributes:
        name: Profile.
        refusal: Why it carries no plan of the source in this dtype, None if it does.
        qk_rope_head_dim: Legal range with policy `optimal`, None where nothing is carried.
        lossless_refusal: Why it does not carry the lossless plan, None if it does.
    """

    name: ProfileName
    refusal: str | None
    qk_rope_head_dim: WidthRange | None
    lossless_refusal: str | None


@dataclass(frozen=True)
class SuggestedPlan:
    """A plan that `make_plan` accepts, given calibration text where it is not lossless.

    Attributes:
        profile: Output profile.
        lossless: Whether it is the lossless plan.
        kv_lora_rank: Stored latent width.
        qk_rope_head_dim: Rotary width.
        cache: What the target caches.
        share: Cached numbers over the source's.
        dtype: `--dtype` of the plan.
    """

    profile: ProfileName
    lossless: bool
    kv_lora_rank: int
    qk_rope_head_dim: int
    cache: CacheFacts
    share: float
    dtype: PlanDtype

    def options(self, *calibration: str) -> ConvertOptions:
        """The plan as options of a conversion on these calibration texts."""
        if self.lossless:
            return ConvertOptions(lossless=True, profile=self.profile, dtype=self.dtype)
        return ConvertOptions(
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            profile=self.profile,
            dtype=self.dtype,
            calibration=calibration,
        )

    @property
    def arguments(self) -> tuple[str, ...]:
        """The plan as options of `mla-convert convert`, without the calibration text."""
        widths = ("--kv-lora-rank", str(self.kv_lora_rank), "--qk-rope-head-dim", str(self.qk_rope_head_dim))
        dtype = () if self.dtype == "source" else ("--dtype", self.dtype)
        return ("--profile", self.profile, *(("--lossless",) if self.lossless else widths), *dtype)

    def to_json(self) -> dict[str, object]:
        """The plan and its options."""
        return {**asdict(self), "arguments": self.arguments}


@dataclass(frozen=True)
class Inspection:
    """Facts of a source, from its headers alone.

    Attributes:
        location: As given.
        kind: `hf-folder`, `hub` or `gguf`.
        folder: Local folder that is read.
        revision: Commit of a Hub snapshot, else None.
        family: Its row of the family table.
        architecture: Class of its language model.
        num_layers: Decoder layers.
        shape: Attention sizes.
        vocab_size: Rows of the embedding.
        max_position_embeddings: Longest position of its configuration.
        rope: Rotary facts.
        cache: What it caches now.
        dtype_counts: Tensors of each dtype.
        biases: Attention projections that have one.
        tied: Whether the output head is the embedding.
        unknown_config_keys: Keys that no rule knows.
        rope_widths: Legal `qk_rope_head_dim` for each policy but `rorope`, whose widths divide the head size.
        rank_width: Legal `kv_lora_rank` at the smallest rotary width; `largest_rank` gives it for others.
        norm_route: How the stock latent norm would be neutralised.
        profiles: What each profile can carry.
        plans: Suggested plans, widest first.
    """

    location: str
    kind: str
    folder: Path
    revision: str | None
    family: str
    architecture: str
    num_layers: int
    shape: AttentionShape
    vocab_size: int
    max_position_embeddings: int
    rope: RopeFacts
    cache: CacheFacts
    dtype_counts: dict[str, int]
    biases: tuple[str, ...]
    tied: bool
    unknown_config_keys: tuple[str, ...]
    rope_widths: dict[RopePolicy, WidthRange]
    rank_width: WidthRange
    norm_route: NormRoute
    profiles: tuple[ProfileFacts, ...]
    plans: tuple[SuggestedPlan, ...]

    def largest_rank(self, qk_rope_head_dim: int) -> int:
        """Largest legal `kv_lora_rank` beside a rotary width."""
        return self.shape.useful_rank(qk_rope_head_dim) + _channel(self.norm_route)

    def to_json(self) -> dict[str, object]:
        """All facts as one object of JSON types."""
        return {
            **asdict(self),
            "folder": self.folder.as_posix(),
            "plans": [plan.to_json() for plan in self.plans],
        }


def inspect_source(source: SourceCheckpoint) -> Inspection:
    """Say what a source is, what it caches, and what can be made of it; no tensor is read.

    Args:
        source: An opened source; opening it refuses what no family carries.
    """
    dtype, written = _dtypes(source)
    counts = Counter(str(source.files.info(name).dtype).removeprefix("torch.") for name in source.files.names)
    prefix = "model.layers.0.self_attn."
    biases = (name.removeprefix(prefix) for name in source.files.names if name.startswith(prefix))
    shape, route = source.shape, _norm_route(written)
    profiles = tuple(_profile_facts(name, source, written) for name in PROFILES)
    return Inspection(
        location=source.location.given,
        kind=source.location.kind,
        folder=source.location.folder,
        revision=source.location.revision,
        family=source.family.name,
        architecture=source.family.architecture,
        num_layers=source.num_layers,
        shape=shape,
        vocab_size=int(source.config.vocab_size),
        max_position_embeddings=int(source.config.max_position_embeddings),
        rope=RopeFacts(source.rope.rope_type, source.rope.theta, shape.pairs, source.rope.unscaled_pairs),
        cache=source_cache(source),
        dtype_counts=dict(sorted(counts.items())),
        biases=tuple(sorted(name for name in biases if name.endswith(".bias"))),
        tied=source.tied,
        unknown_config_keys=unknown_config_keys(source),
        rope_widths={policy: _rope_range(shape, policy) for policy in POLICIES if policy != "rorope"},
        rank_width=WidthRange(1 + _channel(route), shape.useful_rank(2) + _channel(route), 1),
        norm_route=route,
        profiles=profiles,
        plans=_suggestions(source, profiles, dtype, written),
    )


def _rope_range(shape: AttentionShape, policy: RopePolicy) -> WidthRange:
    step = legal_rope_step(shape, policy)
    return WidthRange(step, largest_rope_width(shape, policy), step)


def source_cache(source: SourceCheckpoint) -> CacheFacts:
    """What the source caches: keys and values of every KV head."""
    return _cache(source, source.shape.cached_numbers, source.attention_dtype)


def target_cache(source: SourceCheckpoint, plan: ConversionPlan) -> CacheFacts:
    """What the target caches: the latent row and the shared rotary key."""
    return _cache(source, plan.kv_lora_rank + plan.qk_rope_head_dim, getattr(torch, plan.attention_dtype))


def _cache(source: SourceCheckpoint, numbers: int, dtype: torch.dtype) -> CacheFacts:
    return CacheFacts(numbers, numbers * source.num_layers * dtype.itemsize, str(dtype).removeprefix("torch."))


def _dtypes(source: SourceCheckpoint) -> tuple[PlanDtype, DtypeName]:
    """The `--dtype` that plans need, and what attention is written in then."""
    name = str(source.attention_dtype).removeprefix("torch.")
    return ("source", name) if name in get_args(DtypeName) else ("float32", "float32")  # type: ignore[return-value]


def _norm_route(dtype: DtypeName) -> NormRoute:
    return "constant" if dtype == "float16" else "epsilon"


def _channel(route: NormRoute) -> int:
    """Latent rows that the norm's constant takes."""
    return 1 if route == "constant" else 0


def _profile_facts(name: ProfileName, source: SourceCheckpoint, dtype: DtypeName) -> ProfileFacts:
    shape = source.shape
    everything = shape.num_kv_heads * shape.pairs
    reason = refusal(name, source, Demand("optimal", 1, dtype))
    widths = None
    if reason is None:
        # The rules are asked, not repeated: what they carry is an unbroken range of slots from one on.
        refused = partial(_refuses, name, source, dtype)
        widths = WidthRange(2, 2 * bisect_left(range(1, everything + 1), True, key=refused), 2)
    return ProfileFacts(name, reason, widths, refusal(name, source, Demand(LOSSLESS_POLICY, everything, dtype)))


def _refuses(name: ProfileName, source: SourceCheckpoint, dtype: DtypeName, slots: int) -> bool:
    return refusal(name, source, Demand("optimal", slots, dtype)) is not None


def _suggestions(
    source: SourceCheckpoint, profiles: tuple[ProfileFacts, ...], dtype: PlanDtype, written: DtypeName
) -> tuple[SuggestedPlan, ...]:
    found = []
    if any(facts.lossless_refusal is None for facts in profiles):
        found.append(_suggested(source, make_plan(source, ConvertOptions(lossless=True, dtype=dtype))))
    channel = _channel(_norm_route(written))
    for facts in profiles:
        if facts.qk_rope_head_dim is None:
            continue
        widths = (_split(source.shape, share, facts.qk_rope_head_dim.highest, channel) for share in SHARES)
        for rank, rope in dict.fromkeys(pair for pair in widths if pair is not None):
            numbers = rank + rope
            cache = _cache(source, numbers, getattr(torch, written))
            share = numbers / source.shape.cached_numbers
            found.append(SuggestedPlan(facts.name, False, rank, rope, cache, share, dtype))
    return tuple(found)


def _suggested(source: SourceCheckpoint, plan: ConversionPlan) -> SuggestedPlan:
    cache = target_cache(source, plan)
    return SuggestedPlan(
        profile=plan.profile,
        lossless=plan.lossless,
        kv_lora_rank=plan.kv_lora_rank,
        qk_rope_head_dim=plan.qk_rope_head_dim,
        cache=cache,
        share=cache.numbers_per_token_per_layer / source.shape.cached_numbers,
        dtype="source" if plan.dtype == "source" else "float32",
    )


def _split(shape: AttentionShape, share: float, widest_rope: int, channel: int) -> tuple[int, int] | None:
    """(kv_lora_rank, qk_rope_head_dim) of about `share` of the cached numbers; None where both do not fit."""
    width = int(shape.cached_numbers * share) // 2 * 2
    wanted = max(width * ROPE_SHARE, min(shape.head_dim / 2, width * SMALL_WIDTH_ROPE_SHARE))
    rope = min(max(2, round(wanted / 2) * 2), widest_rope)
    rank = min(width - rope, shape.useful_rank(rope) + channel)
    return (rank, rope) if rank >= 1 + channel else None


@dataclass(frozen=True)
class Preview:
    """What one conversion would write.

    Attributes:
        out: Target folder.
        plan: What would be done.
        source_cache: What the source caches.
        target_cache: What the target would cache.
        weight_bytes: Size of the written weights, from headers.
        files: Names in the target folder.
        overwrite: Whether a checkpoint is replaced.
    """

    out: Path
    plan: ConversionPlan
    source_cache: CacheFacts
    target_cache: CacheFacts
    weight_bytes: int
    files: tuple[str, ...]
    overwrite: bool

    def to_json(self) -> dict[str, object]:
        """The whole preview."""
        return {
            "folder": self.out.as_posix(),
            "plan_id": self.plan.plan_id,
            "plan": self.plan.model_dump(mode="json"),
            "cache": {"source": asdict(self.source_cache), "target": asdict(self.target_cache)},
            "weight_bytes": self.weight_bytes,
            "files": self.files,
            "overwrite": self.overwrite,
        }


def preview_conversion(source: SourceCheckpoint, plan: ConversionPlan, out: Path) -> Preview:
    """Say what converting `source` by `plan` into `out` would write; nothing is written."""
    size = estimated_bytes(source, plan)
    weights = ("model.safetensors",) if size <= SHARD_BYTES else ("model-*-of-*.safetensors", INDEX_NAME)
    folder = source.location.folder
    sidecars = {path for pattern in SIDECAR_PATTERNS for path in folder.glob(pattern) if path.is_file()}
    names = {"config.json", MANIFEST_NAME, *weights, *(path.relative_to(folder).as_posix() for path in sidecars)}
    return Preview(
        out=out,
        plan=plan,
        source_cache=source_cache(source),
        target_cache=target_cache(source, plan),
        weight_bytes=size,
        files=tuple(sorted(names)),
        overwrite=out.exists() and any(out.iterdir()),
    )
