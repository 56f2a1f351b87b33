"""From one MLA layer in float64 to the tensors of stock `DeepseekV3Attention`, and the configuration beside them.

Orders (named in the manifest): a head's query rows are `[nope | rope]`, `kv_a_proj_with_mqa` is
`[latent | rope]`, a head's `kv_b_proj` rows are `[k_nope | v]`; rotary rows are interleaved `x_0 y_0 x_1 y_1 …`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.latent_norm import NeutralNorm, neutralise, norm_bound
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.rope_select import SlotGrid
from mla_convert.mla.rope import default_frequencies
from mla_convert.mla.weights import MLALayerWeights

SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}


@dataclass(frozen=True)
class StockLayer:
    """Attention tensors of one stock layer.

    Attributes:
        tensors: `self_attn.<name>` to float64 values.
        latent_norm: How the latent's norm was neutralised.
    """

    tensors: dict[str, Tensor]
    latent_norm: NeutralNorm


def interleave(pairs: Tensor) -> Tensor:
    """(..., m, D) complex -> (..., 2m, D) real rows `x_0 y_0 x_1 y_1 …`."""
    return torch.stack([pairs.real, pairs.imag], dim=-2).flatten(-3, -2)


def pad_rows(rows: Tensor, count: int, dim: int) -> Tensor:
    """Zeros behind `rows` along `dim` up to `count`."""
    shape = list(rows.shape)
    shape[dim] = count - shape[dim]
    return torch.cat([rows, rows.new_zeros(shape)], dim=dim)


def stock_layer(layer: MLALayerWeights, plan: ConversionPlan, input_norm_weight: Tensor) -> StockLayer:
    """Lay out one layer.

    Args:
        layer: Converted weights.
        plan: Stored widths and constants.
        input_norm_weight: (D,) weight of the norm before attention; bounds the latent.
    """
    digits = SIGNIFICANT_BITS.get(plan.attention_dtype)
    # Twice the bound leaves room for the factor, should it go onto the latent rows.
    norm = neutralise(plan.latent_norm, plan.kv_lora_rank, 2 * norm_bound(layer.latent, input_norm_weight), digits)
    if torch.equal(layer.latent, torch.eye(*layer.latent.shape, dtype=layer.latent.dtype)):
        # A copy of the input is exact times any one number; the keys and values behind it then keep their bits.
        norm = replace(norm, input_scale=norm.input_scale * norm.output_factor, output_factor=1.0)
    queries, query_bias = _query_rows(layer, plan)
    tensors = {**_key_value_tensors(layer, plan, norm), "o_proj.weight": _output_columns(layer) * plan.residual_scale}
    if plan.attention_bias:
        tensors["o_proj.bias"] = _or_zeros(layer.output_bias, queries.shape[1]) * plan.residual_scale
        tensors["kv_a_proj_with_mqa.bias"] = _key_value_bias(layer, plan, norm)
    if plan.q_lora_rank is None:
        tensors["q_proj.weight"] = queries
    else:
        query_norm = neutralise(plan.latent_norm, plan.q_lora_rank, _query_bound(input_norm_weight), digits)
        tensors.update(_query_detour(queries, query_bias, query_norm))
    return StockLayer(tensors, norm)


def _or_zeros(bias: Tensor | None, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64) if bias is None else bias


def _query_rows(layer: MLALayerWeights, plan: ConversionPlan) -> tuple[Tensor, Tensor | None]:
    """(H·(d_N + d_R), D) rows and their bias, with the ratio of the softmax scales folded in."""
    ratio = layer.softmax_scale * math.sqrt(plan.qk_nope_head_dim + plan.qk_rope_head_dim)
    rope = pad_rows(interleave(layer.q_rope), plan.qk_rope_head_dim, 1)  # (H, d_R, D)
    rows = torch.cat([layer.q_nope, rope], dim=1).flatten(0, 1) * ratio
    if layer.q_nope_bias is None or layer.q_rope_bias is None:
        return rows, None
    rope_bias = pad_rows(interleave(layer.q_rope_bias[..., None])[..., 0], plan.qk_rope_head_dim, 1)
    return rows, torch.cat([layer.q_nope_bias, rope_bias], dim=1).flatten() * ratio


def _key_value_tensors(layer: MLALayerWeights, plan: ConversionPlan, norm: NeutralNorm) -> dict[str, Tensor]:
    latent = pad_rows(layer.latent * norm.input_scale, plan.kv_lora_rank, 0)  # (r, D)
    rope = pad_rows(interleave(layer.k_rope), plan.qk_rope_head_dim, 0)  # (d_R, D)
    up = torch.cat([layer.k_up, layer.v_up], dim=1)  # (G, d_N + d_V, r_useful)
    up = up.repeat_interleave(layer.heads_per_group, dim=0).flatten(0, 1) * norm.output_factor
    weight = torch.full((plan.kv_lora_rank,), norm.weight, dtype=torch.float64)
    if norm.channel is not None:
        # The channel has done its work once the norm is taken; the cache holds zero there.
        weight[-1] = 0.0
    return {
        "kv_a_proj_with_mqa.weight": torch.cat([latent, rope]),
        "kv_a_layernorm.weight": weight,
        "kv_b_proj.weight": pad_rows(up, plan.kv_lora_rank, 1),
    }


def _key_value_bias(layer: MLALayerWeights, plan: ConversionPlan, norm: NeutralNorm) -> Tensor:
    """(r + d_R,): zero on the latent but for the constant channel, then the rotated keys' bias."""
    latent = torch.zeros(plan.kv_lora_rank, dtype=torch.float64)
    if norm.channel is not None:
        latent[-1] = norm.channel
    rope = torch.zeros(plan.qk_rope_head_dim, dtype=torch.float64)
    if layer.k_rope_bias is not None:
        rows = interleave(layer.k_rope_bias[:, None])[:, 0]
        rope[: rows.shape[0]] = rows
    return torch.cat([latent, rope])


def _output_columns(layer: MLALayerWeights) -> Tensor:
    """(H, D, d_V) -> (D, H·d_V)."""
    return layer.output.transpose(0, 1).flatten(1)


def _query_bound(input_norm_weight: Tensor) -> float:
    """Largest length of `[x, 1]`, `x` out of the layer's input norm, with room for a factor of two on it."""
    size = input_norm_weight.shape[0]
    return 2 * math.hypot(float(input_norm_weight.double().abs().max()) * math.sqrt(size), 1.0)


def _query_detour(queries: Tensor, bias: Tensor | None, norm: NeutralNorm) -> dict[str, Tensor]:
    """`q_a_proj` copies the input beside a constant, `q_b_proj` holds the rows and, as a column, their bias.

    Stock `q_proj` has no bias (Qwen2's queries do). The norm's remaining factor goes onto the copy, where it is one
    number and the rows keep their bits.
    """
    rows, size = queries.shape
    copied = norm.input_scale * norm.output_factor
    copy = torch.cat([torch.eye(size, dtype=torch.float64) * copied, torch.zeros(1, size, dtype=torch.float64)])
    constant = torch.zeros(size + 1, dtype=torch.float64)
    constant[-1] = copied if norm.channel is None else norm.channel
    weight = torch.full((size + 1,), norm.weight, dtype=torch.float64)
    column = 1.0
    if norm.channel_value is not None:
        weight[-1] = 1.0
        column = 1 / norm.channel_value
    return {
        "q_a_proj.weight": copy,
        "q_a_proj.bias": constant,
        "q_a_layernorm.weight": weight,
        "q_b_proj.weight": torch.cat([queries, _or_zeros(bias, rows)[:, None] * column], dim=1),
    }


def rope_parameters(plan: ConversionPlan, source: SourceCheckpoint, grid: SlotGrid) -> dict[str, Any]:
    """`rope_parameters` of the target for slots of these frequencies.

    `engine`: stock `default`, `θ' = θ^(s·d_R/d)` for `ϑ_j = θ^(-2sj/d)` with `d_R` the stored width.
    `hf`: `longrope` with equal short and long factors, which names each slot's frequency.
    """
    theta, stored = source.rope.theta, plan.qk_rope_head_dim
    if plan.profile == "engine":
        return {"rope_type": "default", "rope_theta": theta ** (grid.stride * stored / source.shape.head_dim)}
    factors, count = torch.ones(stored // 2, dtype=torch.float64), len(grid.pairs)
    factors[:count] = default_frequencies(theta, stored)[:count] / grid.frequencies
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": int(source.config.max_position_embeddings),
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
    }


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def stock_config(plan: ConversionPlan, source: SourceCheckpoint, grid: SlotGrid) -> dict[str, Any]:
    """`config.json` of a dense stock `deepseek_v3` checkpoint."""
    config, heads, layers = source.config, source.shape.num_heads, source.num_layers
    dtype = plan.attention_dtype if plan.dtype == "source" else plan.dtype
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": int(config.vocab_size),
        "hidden_size": source.shape.hidden_size,
        "intermediate_size": int(config.intermediate_size),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": plan.kv_lora_rank,
        "q_lora_rank": plan.q_lora_rank,
        "qk_rope_head_dim": plan.qk_rope_head_dim,
        "qk_nope_head_dim": plan.qk_nope_head_dim,
        "v_head_dim": plan.v_head_dim,
        "attention_bias": plan.attention_bias,
        "attention_dropout": 0.0,
        "hidden_act": config.hidden_act,
        "max_position_embeddings": int(config.max_position_embeddings),
        "initializer_range": float(config.initializer_range),
        "rms_norm_eps": plan.rms_norm_eps,
        "rope_interleave": True,
        "rope_parameters": rope_parameters(plan, source, grid),
        "tie_word_embeddings": plan.tie_word_embeddings,
        "use_cache": True,
        "dtype": dtype,
        # Dense: every layer lies before the first expert layer. The engines want integers for the rest.
        "first_k_dense_replace": layers,
        "moe_intermediate_size": int(config.intermediate_size),
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        **{name: getattr(config, name) for name in _TOKEN_IDS if getattr(config, name, None) is not None},
    }
