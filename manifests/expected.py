"""Every tensor of a stock dense `deepseek_v3` checkpoint, derived from its dimensions alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mla_convert.errors import InputRefused
from mla_convert.manifests.identity import Architecture

STOCK_MODEL_TYPE = "deepseek_v3"


@dataclass(frozen=True)
class ExpectedTensor:
    """Name and shape (outputs x inputs) of one tensor, and whether a file may leave it out."""

    name: str
    shape: tuple[int, ...]
    optional: bool = False


def expected_tensors(architecture: Architecture) -> dict[str, ExpectedTensor]:
    """Name -> tensor, in the order of the model.

    Raises:
        InputRefused: The model type is not `deepseek_v3`, whose names are the only ones known here.
    """
    if architecture.model_type != STOCK_MODEL_TYPE:
        raise InputRefused(
            "no tensor list is known for this model type",
            expected=STOCK_MODEL_TYPE,
            found=architecture.model_type,
        )
    return {tensor.name: tensor for tensor in _model(architecture)}


def _model(arch: Architecture) -> Iterator[ExpectedTensor]:
    yield ExpectedTensor("model.embed_tokens.weight", (arch.vocab_size, arch.hidden_size))
    for index in range(arch.num_hidden_layers):
        prefix = f"model.layers.{index}."
        yield from _query(arch, prefix + "self_attn.")
        yield from _key_value(arch, prefix + "self_attn.")
        yield from _mlp_and_norms(arch, prefix)
    yield ExpectedTensor("model.norm.weight", (arch.hidden_size,))
    # transformers ties the head itself, so a file may leave it out; serving engines need the copy.
    optional = arch.tie_word_embeddings and arch.profile != "engine"
    yield ExpectedTensor("lm_head.weight", (arch.vocab_size, arch.hidden_size), optional=optional)


def _query(arch: Architecture, prefix: str) -> Iterator[ExpectedTensor]:
    rows = arch.num_attention_heads * (arch.qk_nope_head_dim + arch.qk_rope_head_dim)
    rank = arch.q_lora_rank
    if rank is None:
        yield ExpectedTensor(prefix + "q_proj.weight", (rows, arch.hidden_size))
        return
    yield from _linear(prefix + "q_a_proj", rank, arch.hidden_size, bias=arch.attention_bias)
    yield ExpectedTensor(prefix + "q_a_layernorm.weight", (rank,))
    yield ExpectedTensor(prefix + "q_b_proj.weight", (rows, rank))


def _key_value(arch: Architecture, prefix: str) -> Iterator[ExpectedTensor]:
    heads, rank = arch.num_attention_heads, arch.kv_lora_rank
    row = rank + arch.qk_rope_head_dim
    expanded = heads * (arch.qk_nope_head_dim + arch.v_head_dim)
    yield from _linear(prefix + "kv_a_proj_with_mqa", row, arch.hidden_size, bias=arch.attention_bias)
    yield ExpectedTensor(prefix + "kv_a_layernorm.weight", (rank,))
    yield ExpectedTensor(prefix + "kv_b_proj.weight", (expanded, rank))
    yield from _linear(prefix + "o_proj", arch.hidden_size, heads * arch.v_head_dim, bias=arch.attention_bias)


def _mlp_and_norms(arch: Architecture, prefix: str) -> Iterator[ExpectedTensor]:
    hidden, wide = arch.hidden_size, arch.intermediate_size
    yield ExpectedTensor(prefix + "mlp.gate_proj.weight", (wide, hidden))
    yield ExpectedTensor(prefix + "mlp.up_proj.weight", (wide, hidden))
    yield ExpectedTensor(prefix + "mlp.down_proj.weight", (hidden, wide))
    yield ExpectedTensor(prefix + "input_layernorm.weight", (hidden,))
    yield ExpectedTensor(prefix + "post_attention_layernorm.weight", (hidden,))


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Iterator[ExpectedTensor]:
    yield ExpectedTensor(name + ".weight", (rows, columns))
    if bias:
        yield ExpectedTensor(name + ".bias", (rows,))
