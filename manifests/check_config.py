"""config.json against the architecture and position parts of the identity."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mla_convert.manifests.check_records import close
from mla_convert.manifests.digest import read_text_inside
from mla_convert.manifests.expected import STOCK_MODEL_TYPE
from mla_convert.manifests.identity import Architecture, PositionIdentity, SemanticIdentity
from mla_convert.manifests.problems import VerifyProblem, expect, problem

SAME_NAME_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "vocab_size",
    "intermediate_size",
    "hidden_act",
    "attention_bias",
    "tie_word_embeddings",
    "rms_norm_eps",
)
FORBIDDEN_FIELDS = ("sliding_window", "quantization_config", "partial_rotary_factor")
FORBIDDEN_ROPE_FIELDS = ("mscale_all_dim", "partial_rotary_factor")
"""Fields that would change scores without changing a shape."""

ABSENT = "(absent)"


@dataclass(frozen=True)
class Rotation:
    """The rotary angles of a config: one frequency per pair, and the factor on cos and sin."""

    rope_type: str
    theta: float
    frequencies: tuple[float, ...]
    attention_scaling: float


def check_config(identity: SemanticIdentity, folder: Path) -> Iterator[VerifyProblem]:
    """Every field of config.json that decides a shape, a mask, a norm or an angle."""
    if identity.architecture.model_type != STOCK_MODEL_TYPE:
        yield problem("invalid", "config.json", STOCK_MODEL_TYPE, identity.architecture.model_type)
        return
    try:
        config = json.loads(read_text_inside(folder, "config.json"))
    except (OSError, ValueError, RecursionError) as error:
        yield problem("invalid", "config.json", "a readable JSON object", str(error))
        return
    if not isinstance(config, dict):
        yield problem("invalid", "config.json", "a JSON object", type(config).__name__)
        return
    yield from _architecture(config, identity.architecture)
    yield from _position(config, identity)
    written = config.get("dtype", config.get("torch_dtype"))
    if written is not None and written not in identity.checkpoint.dtypes:
        yield problem("changed", "config.json:dtype", list(identity.checkpoint.dtypes), written)


def _architecture(config: Mapping[str, object], arch: Architecture) -> Iterator[VerifyProblem]:
    fixed: dict[str, object] = {name: getattr(arch, name) for name in SAME_NAME_FIELDS}
    fixed |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": arch.num_attention_heads,
        "first_k_dense_replace": arch.num_hidden_layers,
        "num_nextn_predict_layers": 0,
    }
    for name, value in fixed.items():
        yield from expect(f"config.json:{name}", value, config.get(name, ABSENT))
    yield from expect("config.json:head_dim", arch.qk_rope_head_dim, config.get("head_dim", arch.qk_rope_head_dim))
    for name in FORBIDDEN_FIELDS:
        yield from expect(f"config.json:{name}", None, config.get(name))


def _position(config: Mapping[str, object], identity: SemanticIdentity) -> Iterator[VerifyProblem]:
    position = identity.position
    yield from expect(
        "config.json:max_position_embeddings",
        position.max_position_embeddings,
        config.get("max_position_embeddings", ABSENT),
    )
    yield from expect(
        "config.json:rope_interleave",
        position.pairing_layout == "interleaved",
        config.get("rope_interleave", ABSENT),
    )
    places = list(_rope_fields(config))
    if not places:
        yield problem("missing", "config.json:rope_parameters", position.rope_type)
    for name, fields in places:
        try:
            rotation = derive_rotation(fields, identity.architecture.qk_rope_head_dim)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            yield problem("invalid", f"config.json:{name}", "a rotation that can be derived", repr(error))
            continue
        yield from _compare(f"config.json:{name}", rotation, position)
        for forbidden in FORBIDDEN_ROPE_FIELDS:
            yield from expect(f"config.json:{name}.{forbidden}", None, fields.get(forbidden))


def _rope_fields(config: Mapping[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """The two spellings in which runtimes look for the rotation; where both are written, both must hold."""
    shared = {
        name: config[name] for name in ("max_position_embeddings", "original_max_position_embeddings") if name in config
    }
    new = config.get("rope_parameters")
    if isinstance(new, dict):
        yield "rope_parameters", {**shared, **new}
    legacy = config.get("rope_scaling")
    if isinstance(legacy, dict) or "rope_theta" in config:
        scaling = legacy if isinstance(legacy, dict) else {}
        theta = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
        yield "rope_scaling", {**shared, **theta, **scaling}


def derive_rotation(fields: Mapping[str, object], rope_width: int) -> Rotation:
    """Frequencies in float64 by transformers' rules for `default` and `longrope`.

    Args:
        fields: The rope fields of a config, with `max_position_embeddings` beside them.
        rope_width: `qk_rope_head_dim`.

    Raises:
        KeyError: A field that the rule needs is missing.
        TypeError: A field that the rule needs is no number.
        ValueError: Another rope type, a base that is not positive, or a longrope whose two factor lists
            differ or have the wrong length.
    """
    rope_type = str(fields.get("rope_type", fields.get("type", "default")))
    theta = _number(fields["rope_theta"])
    if theta <= 0:
        raise ValueError(f"rope_theta must be positive, found {theta}")
    base = [theta ** (-2 * pair / rope_width) for pair in range(rope_width // 2)]
    if rope_type == "default":
        return Rotation(rope_type, theta, tuple(base), 1.0)
    if rope_type != "longrope":
        raise ValueError(f"no rule for rope_type {rope_type!r}; known are default and longrope")
    factors, long = fields["short_factor"], fields["long_factor"]
    if factors != long or not isinstance(factors, list) or len(factors) != len(base):
        raise ValueError(f"short_factor and long_factor must be one list of {len(base)} numbers")
    frequencies = tuple(value / _number(factor) for value, factor in zip(base, factors, strict=True))
    return Rotation(rope_type, theta, frequencies, _longrope_scaling(fields))


def _longrope_scaling(fields: Mapping[str, object]) -> float:
    given = fields.get("attention_factor")
    if given is not None:
        return _number(given)
    trained = _number(fields.get("original_max_position_embeddings", fields["max_position_embeddings"]))
    stretched = fields.get("factor")
    factor = _number(fields["max_position_embeddings"]) / trained if stretched is None else _number(stretched)
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(trained))


def _compare(subject: str, rotation: Rotation, position: PositionIdentity) -> Iterator[VerifyProblem]:
    yield from expect(f"{subject}.rope_type", position.rope_type, rotation.rope_type)
    yield from expect(f"{subject}.rope_theta", position.rope_theta, rotation.theta)
    pairs = list(zip(position.frequencies, rotation.frequencies, strict=False))
    if len(position.frequencies) != len(rotation.frequencies):
        yield from expect(f"{subject} (pairs)", len(position.frequencies), len(rotation.frequencies))
    for index, (expected, found) in enumerate(pairs):
        if not close(expected, found):
            yield from expect(f"{subject} (frequency of pair {index})", expected, found)
    if not close(position.attention_scaling, rotation.attention_scaling):
        yield from expect(f"{subject} (attention scaling)", position.attention_scaling, rotation.attention_scaling)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, found {value!r}")
    return float(value)
