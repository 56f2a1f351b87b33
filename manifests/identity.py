"""The seven-part semantic identity of an MLA checkpoint, and the id that is derived from it.

The id names what a cached row means. Two checkpoints with one id may share cached rows; any change of a
tensor, fused order, normalization stage, rotary contract, cache field, permitted mode or placement gives
a new id. Every field is described in docs/manifest.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

from pydantic import Field, field_validator

from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import (
    FileDigest,
    combined_digest,
    sha256_json,
    tokenizer_digest,
    weight_files,
)
from mla_convert.manifests.record import Digest, Record

IDENTITY_PARTS = (
    "architecture",
    "checkpoint",
    "position",
    "cache",
    "kernel",
    "placement",
    "semantic_visibility",
)
MAX_LAYERS = 4096
MAX_ROPE_WIDTH = 65536
"""Bounds on what a hostile manifest can make a verifier enumerate."""

CACHE_SCHEMA_VERSION = "mla-convert/latent-row/v1"
SOFTMAX_SCALE_RULE: Final = "(qk_nope_head_dim+qk_rope_head_dim)**-0.5"
PAIRING_CONVENTION: Final = "(x*cos-y*sin, y*cos+x*sin)"
CACHE_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Profile = Literal["engine", "hf", "full"]
CacheDtype = Literal["float32", "bfloat16", "float16"]


def _sorted_unique(values: tuple[str, ...]) -> tuple[str, ...]:
    # One set has one spelling: an order that means nothing must not change the id.
    if list(values) != sorted(set(values)):
        raise ValueError(f"expected sorted and without repeats, found {values}")
    return values


class FusedOrders(Record):
    """Order of the blocks inside each fused tensor and inside the cached row."""

    q_per_head: tuple[str, ...]
    kv_a: tuple[str, ...]
    kv_b_per_head: tuple[str, ...]
    cache_row: tuple[str, ...]


STOCK_FUSED_ORDERS = FusedOrders(
    q_per_head=("q_nope", "q_rope"),
    kv_a=("c_kv", "k_rope"),
    kv_b_per_head=("k_nope", "value"),
    cache_row=("normalized_c_kv", "rotated_k_rope"),
)


class LatentNorm(Record):
    """How the RMSNorm on the latent is neutralised; the tuples have one value per layer."""

    route: Literal["epsilon", "constant"]
    epsilon: float = Field(gt=0)
    down_scale: tuple[float, ...]
    norm_weight: tuple[float, ...]
    up_scale: tuple[float, ...]
    constant: tuple[float, ...] | None
    constant_row: int | None


class Architecture(Record):
    """Dimensions, fused orders and fixed rules of the target model."""

    model_type: str
    profile: Profile
    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0, le=MAX_LAYERS)
    num_attention_heads: int = Field(gt=0)
    kv_lora_rank: int = Field(gt=0)
    q_lora_rank: int | None = Field(gt=0)
    qk_nope_head_dim: int = Field(ge=0)
    qk_rope_head_dim: int = Field(gt=0, le=MAX_ROPE_WIDTH, multiple_of=2)
    v_head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    hidden_act: str
    attention_bias: bool
    tie_word_embeddings: bool
    rms_norm_eps: float = Field(gt=0)
    softmax_scale_rule: Literal["(qk_nope_head_dim+qk_rope_head_dim)**-0.5"]
    latent_norm: LatentNorm
    fused_orders: FusedOrders


class CheckpointIdentity(Record):
    """Digests of what was written and of what it came from."""

    weights_digest: Digest
    config_digest: Digest
    tokenizer_digest: Digest | None
    source_checkpoint_digest: Digest
    dtypes: tuple[str, ...]

    @field_validator("dtypes")
    @classmethod
    def _sorted_dtypes(cls, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return _sorted_unique(dtypes)


class PositionIdentity(Record):
    """The rotary contract: what each pair of the rotary part is turned by, and how pairs lie in a row."""

    rope_type: str
    rope_theta: float = Field(gt=0)
    pairing_layout: Literal["interleaved", "half-split"]
    pairing_convention: Literal["(x*cos-y*sin, y*cos+x*sin)"]
    frequencies: tuple[float, ...]
    max_position_embeddings: int = Field(gt=0)
    attention_scaling: float = Field(gt=0)


class CacheIdentity(Record):
    """The persistent row of one token in one layer."""

    schema_version: str
    row_layout: tuple[str, ...]
    latent_width: int = Field(gt=0)
    rope_width: int = Field(gt=0)
    dtype: CacheDtype
    bytes_per_token_per_layer: int = Field(gt=0)
    layers: int = Field(gt=0)
    normalization_stage: Literal["after kv_a_layernorm"]
    rotation_stage: Literal["after rotation"]

    @classmethod
    def of(cls, architecture: Architecture, dtype: CacheDtype) -> CacheIdentity:
        """The row that `architecture` caches in `dtype`."""
        width = architecture.kv_lora_rank + architecture.qk_rope_head_dim
        return cls(
            schema_version=CACHE_SCHEMA_VERSION,
            row_layout=architecture.fused_orders.cache_row,
            latent_width=architecture.kv_lora_rank,
            rope_width=architecture.qk_rope_head_dim,
            dtype=dtype,
            bytes_per_token_per_layer=width * CACHE_ITEM_BYTES[dtype],
            layers=architecture.num_hidden_layers,
            normalization_stage="after kv_a_layernorm",
            rotation_stage="after rotation",
        )


class KernelIdentity(Record):
    """The semantic modes in which a backend may execute the attention."""

    permitted_modes: tuple[Literal["dense-absorbed", "dense-expanded"], ...] = Field(min_length=1)

    @field_validator("permitted_modes")
    @classmethod
    def _sorted_modes(cls, modes: tuple[str, ...]) -> tuple[str, ...]:
        return _sorted_unique(modes)


class Placement(Record):
    """How tensors and cached rows are divided over devices; a conversion places nothing."""

    partition: Literal["unplaced"]


class SemanticVisibility(Record):
    """Which cached rows a query sees, and what is done to its scores."""

    mask: Literal["causal"]
    selection: Literal["dense"]
    window: int | None = Field(gt=0)
    soft_cap: float | None = Field(gt=0)
    sinks: bool


DENSE_KERNELS = KernelIdentity(permitted_modes=("dense-absorbed", "dense-expanded"))
UNPLACED = Placement(partition="unplaced")
CAUSAL_DENSE = SemanticVisibility(mask="causal", selection="dense", window=None, soft_cap=None, sinks=False)


class SemanticIdentity(Record):
    """The seven parts. What is not in them (times, machines, request state) is a receipt, not identity."""

    architecture: Architecture
    checkpoint: CheckpointIdentity
    position: PositionIdentity
    cache: CacheIdentity
    kernel: KernelIdentity
    placement: Placement
    semantic_visibility: SemanticVisibility


def canonical_mla_id(semantic: SemanticIdentity | Mapping[str, object]) -> str:
    """`sha256:` and the digest of the sorted JSON of the seven parts.

    Args:
        semantic: The identity, or its JSON object; further keys of the object are not part of the id.

    Raises:
        KeyError: A part is missing from the object.
        ValueError: A number is NaN or infinite.
    """
    parts = semantic.model_dump(mode="json") if isinstance(semantic, SemanticIdentity) else semantic
    return sha256_json({name: parts[name] for name in IDENTITY_PARTS})


def checkpoint_identity(
    files: Iterable[FileDigest], *, source_checkpoint_digest: str, dtypes: Iterable[str]
) -> CheckpointIdentity:
    """The checkpoint part of a written folder, from the digests of its files.

    Args:
        files: Every file of the folder except the manifest.
        source_checkpoint_digest: Combined digest of the source's weight files.
        dtypes: dtype of each written tensor, repeats allowed, in torch's names (`bfloat16`).

    Raises:
        InputRefused: The folder has no config.json or no weight file.
    """
    listed = tuple(files)
    config = next((file for file in listed if file.path == "config.json"), None)
    weights = weight_files(listed)
    if config is None or not weights:
        raise InputRefused("no checkpoint", expected="config.json and at least one .safetensors file")
    return CheckpointIdentity(
        weights_digest=combined_digest(weights),
        config_digest=f"sha256:{config.sha256}",
        tokenizer_digest=tokenizer_digest(listed),
        source_checkpoint_digest=source_checkpoint_digest,
        dtypes=tuple(sorted(set(dtypes))),
    )
