"""The float64 reference against python loops, and against stock DeepseekV3Attention without its latent norm."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3DecoderLayer

from mla_convert.mla.reference import BlockWeights, decoder_layer, mla_attention, rms_norm
from mla_convert.mla.weights import MLALayerWeights
from tests.convert.support import normal, random_mla
from tests.tolerances import FLOAT64_ALGEBRA, STOCK_NORM_FLOAT32

SIZES = {"heads": 4, "groups": 2, "hidden": 10, "nope": 4, "slots": 3, "value": 5, "rank": 6}
LENGTH = 7


def inputs(batch: int = 2, length: int = LENGTH) -> Tensor:
    return normal(batch, length, SIZES["hidden"], seed=50)


def stock_config(attention_bias: bool) -> DeepseekV3Config:
    config = DeepseekV3Config(
        hidden_size=SIZES["hidden"],
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["heads"],
        kv_lora_rank=SIZES["rank"],
        q_lora_rank=None,
        qk_nope_head_dim=SIZES["nope"],
        qk_rope_head_dim=2 * SIZES["slots"],
        v_head_dim=SIZES["value"],
        attention_bias=attention_bias,
        rope_interleave=True,
        first_k_dense_replace=1,
        rms_norm_eps=1e-5,
    )
    # Eager attention takes its softmax in float32.
    config._attn_implementation = "sdpa"
    return config


def interleaved(pairs: Tensor) -> Tensor:
    """(..., m, n) complex -> (..., 2m, n) rows x_0 y_0 x_1 y_1 …, by slicing."""
    rows = torch.empty(*pairs.shape[:-2], 2 * pairs.shape[-2], pairs.shape[-1], dtype=torch.float64)
    rows[..., 0::2, :], rows[..., 1::2, :] = pairs.real, pairs.imag
    return rows


def fill(attention: DeepseekV3Attention, weights: MLALayerWeights) -> None:
    """Put reference weights into the stock module; its own scale is undone in the queries."""
    fold = weights.softmax_scale / attention.scaling
    query_rows, up_rows, output = [], [], []
    for head in range(SIZES["heads"]):
        group = head // (SIZES["heads"] // SIZES["groups"])
        query_rows += [weights.q_nope[head] * fold, interleaved(weights.q_rope[head]) * fold]
        up_rows += [weights.k_up[group], weights.v_up[group]]
        output.append(weights.output[head])
    state = {
        "q_proj.weight": torch.cat(query_rows),
        "kv_a_proj_with_mqa.weight": torch.cat([weights.latent, interleaved(weights.k_rope)]),
        "kv_b_proj.weight": torch.cat(up_rows),
        "o_proj.weight": torch.cat(output, dim=1),
    }
    if weights.output_bias is not None and weights.k_rope_bias is not None:
        rope_bias = interleaved(weights.k_rope_bias[:, None])[:, 0]
        state["kv_a_proj_with_mqa.bias"] = torch.cat([rope_bias.new_zeros(SIZES["rank"]), rope_bias])
        state["o_proj.bias"] = weights.output_bias
    attention.kv_a_layernorm = nn.Identity()
    attention.load_state_dict(state, strict=True)


def cos_sin(weights: MLALayerWeights, length: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(length, dtype=torch.float64)[:, None] * weights.frequencies
    full = torch.cat([angle, angle], dim=-1)[None]
    return full.cos(), full.sin()


def causal_mask(length: int) -> Tensor:
    return torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)[None, None]


@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_what_stock_attention_computes(bias: bool) -> None:
    # Stock queries have no bias beside a plain q_proj.
    weights = replace(random_mla(**SIZES, seed=1, bias=bias), q_nope_bias=None, q_rope_bias=None)
    attention = DeepseekV3Attention(stock_config(bias), 0).double().eval()
    fill(attention, weights)

    with torch.no_grad():
        expected, _ = attention(inputs(), cos_sin(weights, LENGTH), causal_mask(LENGTH))

    found = mla_attention(weights, inputs()).output
    assert torch.allclose(found, expected, rtol=0, atol=FLOAT64_ALGEBRA)


def test_a_decoder_layer_is_the_stock_one() -> None:
    config = stock_config(attention_bias=False)
    weights = random_mla(**SIZES, seed=2)
    layer = DeepseekV3DecoderLayer(config, 0).double().eval()
    fill(layer.self_attn, weights)
    with torch.no_grad():
        layer.input_layernorm.weight.uniform_(0.5, 1.5)
        layer.post_attention_layernorm.weight.uniform_(0.5, 1.5)
        expected = layer(inputs(), causal_mask(LENGTH), position_embeddings=cos_sin(weights, LENGTH))
    block = BlockWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        post_attention_norm=layer.post_attention_layernorm.weight.detach(),
        gate=layer.mlp.gate_proj.weight.detach(),
        up=layer.mlp.up_proj.weight.detach(),
        down=layer.mlp.down_proj.weight.detach(),
        norm_eps=1e-5,
        activation=nn.functional.silu,
    )

    found, trace = decoder_layer(block, weights, inputs())

    # The stock norms compute in float32 whatever they are given.
    assert torch.allclose(found, expected, rtol=0, atol=STOCK_NORM_FLOAT32)
    assert torch.equal(trace.output, mla_attention(weights, rms_norm(inputs(), block.input_norm, 1e-5)).output)


def looped_attention(weights: MLALayerWeights, tokens: Tensor) -> list[list[float]]:
    """One sequence (T, D) in python numbers, from DeepSeek-V2's equations 9 to 19 without the latent norm."""
    length, hidden = tokens.shape
    outputs = []
    for t in range(length):
        total = [0.0] * hidden if weights.output_bias is None else weights.output_bias.tolist()
        for head in range(weights.q_nope.shape[0]):
            group = head // weights.heads_per_group
            scores = [looped_score(weights, tokens, head, group, t, j) for j in range(t + 1)]
            shares = [math.exp(score - max(scores)) for score in scores]
            value = sum(
                (share / sum(shares) * (weights.v_up[group] @ (weights.latent @ tokens[j])))
                for j, share in enumerate(shares)
            )
            for index, number in enumerate((weights.output[head] @ value).tolist()):
                total[index] += number
        outputs.append(total)
    return outputs


def looped_score(weights: MLALayerWeights, tokens: Tensor, head: int, group: int, t: int, j: int) -> float:
    query = weights.q_nope[head] @ tokens[t]
    if weights.q_nope_bias is not None:
        query = query + weights.q_nope_bias[head]
    score = float(query @ (weights.k_up[group] @ (weights.latent @ tokens[j])))
    for slot, frequency in enumerate(weights.frequencies.tolist()):
        q = complex((weights.q_rope[head, slot] * tokens[t]).sum())
        k = complex((weights.k_rope[slot] * tokens[j]).sum())
        if weights.q_rope_bias is not None and weights.k_rope_bias is not None:
            q, k = q + complex(weights.q_rope_bias[head, slot]), k + complex(weights.k_rope_bias[slot])
        score += ((q * cmath.exp(1j * frequency * t)).conjugate() * k * cmath.exp(1j * frequency * j)).real
    return score * weights.softmax_scale


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_equations_in_plain_loops(bias: bool) -> None:
    weights = random_mla(**SIZES, seed=3, bias=bias)

    found = mla_attention(weights, inputs(batch=1)).output[0]

    expected = torch.tensor(looped_attention(weights, inputs(batch=1)[0]), dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=0, atol=FLOAT64_ALGEBRA)


def test_only_distances_count() -> None:
    weights = random_mla(**SIZES, seed=4, bias=True)

    found = mla_attention(weights, inputs(), first_position=1000).output

    assert torch.allclose(found, mla_attention(weights, inputs()).output, rtol=0, atol=1e-9)


def test_the_future_is_not_seen() -> None:
    weights, changed = random_mla(**SIZES, seed=5), inputs().clone()
    changed[:, 4:] += 1

    before, after = mla_attention(weights, inputs()).output, mla_attention(weights, changed).output

    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] - after[:, 4:]).abs().amax(-1).min() > 1e-3


def test_the_stages_have_their_shapes_and_are_what_the_cache_would_hold() -> None:
    weights = random_mla(**SIZES, seed=6)
    trace = mla_attention(weights, inputs())

    heads, tokens = SIZES["heads"], (2, LENGTH)
    assert trace.query_content.shape == (*tokens, heads, SIZES["nope"])
    assert trace.query_rope.shape == (*tokens, heads, SIZES["slots"])
    assert trace.key_rope.shape == (*tokens, SIZES["slots"])
    assert trace.key_content.shape == (*tokens, heads, SIZES["nope"])
    assert trace.value.shape == trace.heads.shape == (*tokens, heads, SIZES["value"])
    assert torch.allclose(trace.latent[1, 3], weights.latent @ inputs()[1, 3])
    assert torch.allclose(trace.value[1, 3, 1], weights.v_up[0] @ trace.latent[1, 3])
    assert torch.allclose(trace.value[1, 3, 2], weights.v_up[1] @ trace.latent[1, 3])


def test_rms_norm_is_that_of_torch() -> None:
    norm = nn.RMSNorm(10, eps=1e-5, dtype=torch.float64)
    nn.init.uniform_(norm.weight)

    found = rms_norm(inputs(), norm.weight, 1e-5)

    assert torch.allclose(found, norm(inputs()), rtol=FLOAT64_ALGEBRA, atol=0)
