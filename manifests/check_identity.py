"""The identity against itself and against what the stock architecture fixes."""

from __future__ import annotations

from collections.abc import Iterator

from mla_convert.manifests.expected import STOCK_MODEL_TYPE
from mla_convert.manifests.identity import (
    CAUSAL_DENSE,
    STOCK_FUSED_ORDERS,
    Architecture,
    CacheIdentity,
    LatentNorm,
    SemanticIdentity,
)
from mla_convert.manifests.problems import VerifyProblem, expect, problem
from mla_convert.manifests.record import Record

STOCK_LATENT_EPSILON = 1e-6
"""The epsilon of `kv_a_layernorm`, which transformers' deepseek_v3 takes from no config field."""


def check_identity(identity: SemanticIdentity) -> Iterator[VerifyProblem]:
    """Dimensions, fused orders, latent norm, rotary pairs, cached row and visibility."""
    arch, position = identity.architecture, identity.position
    yield from expect("identity.position.frequencies (how many)", arch.qk_rope_head_dim // 2, len(position.frequencies))
    cache = CacheIdentity.of(arch, identity.cache.dtype)
    yield from same_fields("identity.cache", cache, identity.cache)
    yield from _latent_norm(arch.latent_norm, arch)
    if arch.model_type == STOCK_MODEL_TYPE:
        yield from _stock(identity)
    if arch.profile == "engine":
        yield from _engine(identity)


def same_fields(prefix: str, expected: Record, found: Record) -> Iterator[VerifyProblem]:
    """One problem for each field in which two records of one class differ."""
    for name, value in expected.model_dump(mode="json").items():
        yield from expect(f"{prefix}.{name}", value, found.model_dump(mode="json")[name])


def _latent_norm(norm: LatentNorm, arch: Architecture) -> Iterator[VerifyProblem]:
    prefix = "identity.architecture.latent_norm"
    for name in ("down_scale", "norm_weight", "up_scale", "constant"):
        values = getattr(norm, name)
        if values is not None:
            yield from expect(f"{prefix}.{name} (one per layer)", arch.num_hidden_layers, len(values))
    constant_route = norm.route == "constant"
    for name in ("constant", "constant_row"):
        yield from expect(f"{prefix}.{name} is given", constant_route, getattr(norm, name) is not None)
    if norm.constant_row is not None and not 0 <= norm.constant_row < arch.kv_lora_rank:
        yield problem("invalid", f"{prefix}.constant_row", f"a latent row below {arch.kv_lora_rank}", norm.constant_row)


def _stock(identity: SemanticIdentity) -> Iterator[VerifyProblem]:
    arch = identity.architecture
    yield from same_fields("identity.architecture.fused_orders", STOCK_FUSED_ORDERS, arch.fused_orders)
    yield from same_fields("identity.semantic_visibility", CAUSAL_DENSE, identity.semantic_visibility)
    yield from expect("identity.architecture.latent_norm.epsilon", STOCK_LATENT_EPSILON, arch.latent_norm.epsilon)
    if arch.profile == "full":
        yield problem("invalid", "identity.architecture.profile", "engine or hf", arch.profile)


def _engine(identity: SemanticIdentity) -> Iterator[VerifyProblem]:
    # What the serving engines skip without a word (biases) or take from a field of its own (epsilon).
    arch = identity.architecture
    prefix = "identity.architecture"
    yield from expect(f"{prefix}.model_type", STOCK_MODEL_TYPE, arch.model_type)
    yield from expect(f"{prefix}.attention_bias", False, arch.attention_bias)
    yield from expect(f"{prefix}.latent_norm.route", "epsilon", arch.latent_norm.route)
    yield from expect(f"{prefix}.rms_norm_eps", STOCK_LATENT_EPSILON, arch.rms_norm_eps)
    yield from expect("identity.position.pairing_layout", "interleaved", identity.position.pairing_layout)
