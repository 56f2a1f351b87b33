"""Source families as data: tensor names and shapes, biases, and the features that must be absent.

A new family is one row here plus a tiny random model in the tests (see `docs/families.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_convert.errors import InputRefused

LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a layer or of the model: name template and symbolic shape.

    Attributes:
        name: Template with `{layer}`.
        shape: Names of sizes, looked up in `symbol_sizes`.
        when: Name of the rule that says whether the tensor exists: `always`, `qkv_bias`, `o_bias`, `untied`.
    """

    name: str
    shape: tuple[str, ...]
    when: str = "always"


@dataclass(frozen=True)
class Refusal:
    """A configuration field whose value, unless harmless, changes the model in a way not carried here."""

    field: str
    harmless: tuple[Any, ...]
    feature: str


@dataclass(frozen=True)
class Family:
    """One source architecture.

    Attributes:
        name: Family name in manifests and messages.
        model_type: `model_type` of its `config.json`.
        architecture: The one class of `architectures` that is accepted.
        layer_tensors: Tensors of each layer.
        model_tensors: Tensors outside the layers.
        qkv_bias: Configuration field that switches biases of q, k and v, or `always`, or `never`.
        o_bias: The same for the output projection.
        refusals: Fields that must be harmless.
    """

    name: str
    model_type: str
    architecture: str
    layer_tensors: tuple[TensorRow, ...]
    model_tensors: tuple[TensorRow, ...]
    qkv_bias: str
    o_bias: str
    refusals: tuple[Refusal, ...]


_ATTENTION = (
    TensorRow(LAYER + "self_attn.q_proj.weight", ("query", "hidden")),
    TensorRow(LAYER + "self_attn.k_proj.weight", ("key_value", "hidden")),
    TensorRow(LAYER + "self_attn.v_proj.weight", ("key_value", "hidden")),
    TensorRow(LAYER + "self_attn.o_proj.weight", ("hidden", "query")),
    TensorRow(LAYER + "self_attn.q_proj.bias", ("query",), "qkv_bias"),
    TensorRow(LAYER + "self_attn.k_proj.bias", ("key_value",), "qkv_bias"),
    TensorRow(LAYER + "self_attn.v_proj.bias", ("key_value",), "qkv_bias"),
    TensorRow(LAYER + "self_attn.o_proj.bias", ("hidden",), "o_bias"),
)
_GATED_MLP = (
    TensorRow(LAYER + "mlp.gate_proj.weight", ("intermediate", "hidden")),
    TensorRow(LAYER + "mlp.up_proj.weight", ("intermediate", "hidden")),
    TensorRow(LAYER + "mlp.down_proj.weight", ("hidden", "intermediate")),
)
_NORMS = (
    TensorRow(LAYER + "input_layernorm.weight", ("hidden",)),
    TensorRow(LAYER + "post_attention_layernorm.weight", ("hidden",)),
)
_MODEL = (
    TensorRow("model.embed_tokens.weight", ("vocabulary", "hidden")),
    TensorRow("model.norm.weight", ("hidden",)),
    TensorRow("lm_head.weight", ("vocabulary", "hidden"), "untied"),
)

# Fields of other models that may be carried over by a fine-tuning or merging tool into a llama-like config.
_FOREIGN = (
    Refusal("attn_logit_softcapping", (None, 0, 0.0), "attention soft-cap"),
    Refusal("final_logit_softcapping", (None, 0, 0.0), "logit soft-cap"),
    Refusal("query_pre_attn_scalar", (None,), "query scalar"),
    Refusal("use_qk_norm", (None, False), "q/k-norm"),
    Refusal("qk_norm", (None, False), "q/k-norm"),
    Refusal("qk_layernorm", (None, False), "q/k-norm"),
    Refusal("clip_qkv", (None,), "clipping of q, k and v"),
    Refusal("attention_sinks", (None, False, 0), "attention sinks"),
    Refusal("attention_multiplier", (None, 1, 1.0), "attention multiplier"),
    Refusal("residual_multiplier", (None, 1, 1.0), "residual multiplier"),
    Refusal("embedding_multiplier", (None, 1, 1.0), "embedding multiplier"),
    Refusal("logits_scaling", (None, 1, 1.0), "logits scaling"),
    Refusal("attention_chunk_size", (None,), "chunked attention"),
    Refusal("no_rope_layers", (None, []), "layers without rope"),
    Refusal("num_local_experts", (None, 0, 1), "mixture of experts"),
    Refusal("num_experts", (None, 0, 1), "mixture of experts"),
    Refusal("partial_rotary_factor", (None, 1, 1.0), "rope on part of the head"),
    Refusal("rope_interleaved", (None, False), "interleaved rope rows in the source"),
    Refusal("quantization_config", (None,), "quantised weights"),
    Refusal("mlp_bias", (None, False), "biases in the MLP (stock deepseek_v3 has none)"),
    Refusal("sliding_window", (None,), "sliding window"),
)

FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        model_type="llama",
        architecture="LlamaForCausalLM",
        layer_tensors=_ATTENTION + _GATED_MLP + _NORMS,
        model_tensors=_MODEL,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        refusals=_FOREIGN,
    ),
    Family(
        name="mistral",
        model_type="mistral",
        architecture="MistralForCausalLM",
        layer_tensors=_ATTENTION + _GATED_MLP + _NORMS,
        model_tensors=_MODEL,
        qkv_bias="never",
        o_bias="never",
        refusals=_FOREIGN,
    ),
    Family(
        name="qwen2",
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        layer_tensors=_ATTENTION + _GATED_MLP + _NORMS,
        model_tensors=_MODEL,
        qkv_bias="always",
        o_bias="never",
        refusals=_FOREIGN,
    ),
)


def find_family(raw_config: Mapping[str, Any], where: str) -> Family:
    """The row for a `config.json`.

    Raises:
        InputRefused: If the model type or class is not in the table.
    """
    model_type, architectures = raw_config.get("model_type"), raw_config.get("architectures") or []
    for family in FAMILIES:
        if family.model_type == model_type:
            if architectures and architectures != [family.architecture]:
                raise InputRefused(
                    f"a {family.name} checkpoint of another class than its language model",
                    expected=f"architectures [{family.architecture!r}]",
                    found=str(architectures),
                    where=f"{where}/config.json",
                )
            return family
    raise InputRefused(
        "a model family that is not in the table",
        expected="model_type one of " + ", ".join(family.model_type for family in FAMILIES),
        found=repr(model_type),
        where=f"{where}/config.json",
        remedy="docs/families.md says how a family is added.",
    )


def refuse_features(family: Family, fields: Mapping[str, Any], where: str) -> None:
    """Refuse a configuration with a feature that the conversion does not carry.

    Args:
        family: The row.
        fields: Effective configuration values (after the library's defaults).
        where: Source, for the message.

    Raises:
        InputRefused: Naming the feature, the field and its value.
    """
    for refusal in family.refusals:
        value = fields.get(refusal.field)
        if not any(value is item or value == item for item in refusal.harmless):
            raise InputRefused(
                f"{refusal.feature} is not carried by the engine and hf profiles",
                expected=f"{refusal.field} absent or {refusal.harmless[-1]!r}",
                found=f"{refusal.field}={value!r}",
                where=f"{where}/config.json",
            )
    layer_types = fields.get("layer_types")
    other = sorted({kind for kind in layer_types or [] if kind != "full_attention"})
    if other:
        raise InputRefused(
            "layers whose attention is not full",
            expected="layer_types all 'full_attention'",
            found=", ".join(other),
            where=f"{where}/config.json",
        )


def tensor_exists(row: TensorRow, family: Family, fields: Mapping[str, Any]) -> bool:
    """Whether a row's tensor belongs to a checkpoint with these configuration values."""
    if row.when == "untied":
        return not fields.get("tie_word_embeddings", False)
    if row.when in ("qkv_bias", "o_bias"):
        rule = family.qkv_bias if row.when == "qkv_bias" else family.o_bias
        return rule == "always" or (rule != "never" and bool(fields.get(rule, False)))
    return True
