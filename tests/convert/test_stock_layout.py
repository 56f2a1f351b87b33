"""The stock tensors, run by stock attention, against the float64 reference of the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.planning import make_plan
from mla_convert.convert.rope_select import geometric_grid, pair_grid
from mla_convert.convert.stock_layout import interleave, pad_rows, rope_parameters, stock_config, stock_layer
from mla_convert.mla.reference import mla_attention
from mla_convert.mla.weights import MLALayerWeights
from tests.conftest import PicoFactory
from tests.convert.support import complex_normal, normal, random_mla, some_plan
from tests.tolerances import NEUTRAL_NORM_CONSTANT, ROTARY_FLOAT32, STOCK_NORM_FLOAT32

SIZES = {"heads": 4, "groups": 2, "hidden": 12, "nope": 4, "slots": 3, "value": 7, "rank": 5}
NORM_WEIGHT = torch.linspace(0.5, 1.5, 12, dtype=torch.float64)


def attention_inputs() -> Tensor:
    """What comes out of the input norm, as the layout's bounds assume."""
    hidden = normal(2, 9, SIZES["hidden"], seed=60)
    return hidden * hidden.square().mean(-1, keepdim=True).rsqrt() * NORM_WEIGHT


def stock_output(layer: MLALayerWeights, plan: ConversionPlan) -> Tensor:
    """Stock attention in float64 (its norms compute in float32) with the tensors of `stock_layer`."""
    config = DeepseekV3Config(
        hidden_size=SIZES["hidden"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["heads"],
        num_hidden_layers=1,
        kv_lora_rank=plan.kv_lora_rank,
        q_lora_rank=plan.q_lora_rank,
        qk_nope_head_dim=plan.qk_nope_head_dim,
        qk_rope_head_dim=plan.qk_rope_head_dim,
        v_head_dim=plan.v_head_dim,
        attention_bias=plan.attention_bias,
        rope_interleave=True,
    )
    config._attn_implementation = "sdpa"
    attention = DeepseekV3Attention(config, 0).double().eval()
    attention.load_state_dict(stock_layer(layer, plan, NORM_WEIGHT).tensors, strict=True)
    padding = layer.frequencies.new_ones(plan.qk_rope_head_dim // 2 - len(layer.frequencies))
    angle = torch.arange(9, dtype=torch.float64)[:, None] * torch.cat([layer.frequencies, padding])
    full = torch.cat([angle, angle], dim=-1)[None]
    with torch.no_grad():
        output: Tensor = attention(attention_inputs(), (full.cos(), full.sin()), None)[0]
    return output


def error(layer: MLALayerWeights, plan: ConversionPlan) -> float:
    expected = mla_attention(layer, attention_inputs()).output
    return float((stock_output(layer, plan) - expected).norm() / expected.norm())


WIDTHS: dict[str, dict[str, Any]] = {
    "as wide as used": {"kv_lora_rank": 6},
    "padded": {"kv_lora_rank": 16, "qk_rope_head_dim": 16},
    "a query detour": {"kv_lora_rank": 6, "q_lora_rank": 13},
    "padded, a query detour": {"kv_lora_rank": 9, "qk_rope_head_dim": 10, "q_lora_rank": 13},
}
BOUNDS = {"epsilon": STOCK_NORM_FLOAT32, "constant": 4 * NEUTRAL_NORM_CONSTANT}


@pytest.mark.parametrize("route", ["epsilon", "constant"])
@pytest.mark.parametrize("widths", WIDTHS)
def test_stock_attention_computes_the_reference(route: str, widths: str) -> None:
    biased = "detour" in widths
    layer = random_mla(**SIZES, seed=1, bias=True)
    if not biased:
        layer = replace(layer, q_nope_bias=None, q_rope_bias=None)

    plan = some_plan(latent_norm=route, attention_bias=True, **WIDTHS[widths])

    assert error(layer, plan) <= BOUNDS[route]


def test_without_any_bias_there_is_no_bias_tensor() -> None:
    layer, plan = random_mla(**SIZES, seed=2), some_plan()

    assert error(layer, plan) <= STOCK_NORM_FLOAT32
    assert set(stock_layer(layer, plan, NORM_WEIGHT).tensors) == {
        "q_proj.weight",
        "kv_a_proj_with_mqa.weight",
        "kv_a_layernorm.weight",
        "kv_b_proj.weight",
        "o_proj.weight",
    }


def test_no_content_at_all_is_a_legal_width() -> None:
    layer = random_mla(**{**SIZES, "nope": 0}, seed=3)
    zeros = torch.zeros(4, 8, 12, dtype=torch.float64)
    layer = replace(layer, q_nope=zeros, k_up=torch.zeros(2, 8, 5, dtype=torch.float64))

    assert error(layer, some_plan(qk_nope_head_dim=8)) <= STOCK_NORM_FLOAT32


def test_the_softmax_ratio_is_of_the_stored_widths() -> None:
    layer = random_mla(**SIZES, seed=4)
    narrow = stock_layer(layer, some_plan(), NORM_WEIGHT).tensors["q_proj.weight"].unflatten(0, (4, 10))
    wide = stock_layer(layer, some_plan(qk_rope_head_dim=26), NORM_WEIGHT).tensors["q_proj.weight"]

    assert torch.allclose(narrow[:, :4], layer.q_nope * layer.softmax_scale * 10**0.5)
    assert torch.allclose(wide.unflatten(0, (4, 30))[:, :4], layer.q_nope * layer.softmax_scale * 30**0.5)
    assert not wide.unflatten(0, (4, 30))[:, 10:].any()


def test_the_residual_scale_touches_what_writes_to_the_stream_only() -> None:
    layer = replace(random_mla(**SIZES, seed=5, bias=True), q_nope_bias=None, q_rope_bias=None)
    plain = stock_layer(layer, some_plan(attention_bias=True), NORM_WEIGHT).tensors
    scaled = stock_layer(layer, some_plan(attention_bias=True, residual_scale=0.25), NORM_WEIGHT).tensors

    for name, value in plain.items():
        factor = 0.25 if name.startswith("o_proj") else 1.0
        assert torch.equal(scaled[name], value * factor), name


def test_interleaving_puts_real_and_imaginary_rows_in_turn() -> None:
    pairs = complex_normal(2, 3, 4, seed=6)

    rows = interleave(pairs)

    assert rows.shape == (2, 6, 4)
    for slot in range(3):
        assert torch.equal(rows[:, 2 * slot], pairs[:, slot].real)
        assert torch.equal(rows[:, 2 * slot + 1], pairs[:, slot].imag)


def test_padding_is_zeros_behind() -> None:
    assert pad_rows(torch.ones(2, 3), 5, 1).tolist() == [[1, 1, 1, 0, 0]] * 2
    assert pad_rows(torch.ones(2, 3), 2, 0).tolist() == [[1, 1, 1]] * 2


def stock_frequencies(parameters: dict[str, Any], width: int, positions: int) -> tuple[Tensor, float]:
    config = DeepseekV3Config(
        qk_rope_head_dim=width, rope_parameters=dict(parameters), max_position_embeddings=positions
    )
    rotary = DeepseekV3RotaryEmbedding(config)
    # longrope looks at the length of the sequence: it must not matter.
    for length in (4, 4 * positions):
        cos, sin = rotary(torch.zeros(1), torch.tensor([[length]]))
        assert float((cos**2 + sin**2 - 1).abs().max()) <= 1e-5
    return rotary.inv_freq.double(), rotary.attention_scaling


@pytest.mark.parametrize("pad", [None, (48, 64)], ids=["as used", "padded"])
@pytest.mark.parametrize(
    ("profile", "pairs"),
    [
        ("engine", (0, 1, 2, 3, 4)),
        ("engine", (0, 2, 4, 6)),
        ("engine", (0,)),
        ("hf", (0, 0, 1, 5, 5, 7)),
        ("hf", (7,)),
    ],
)
def test_stock_transformers_turns_each_slot_at_its_frequency(
    pico: PicoFactory, profile: Any, pairs: tuple[int, ...], pad: tuple[int, int] | None
) -> None:
    source = open_source(str(pico(kv_heads=2)))
    width = 2 * len(pairs) if pad is None else pad[1]
    plan = some_plan(profile=profile, rope_slots=len(pairs), qk_rope_head_dim=width)

    found, scaling = stock_frequencies(
        rope_parameters(plan, source, pair_grid(pairs, source.rope.frequencies)), width, 512
    )

    expected = source.rope.frequencies[list(pairs)]
    assert torch.allclose(found[: len(pairs)], expected, rtol=ROTARY_FLOAT32, atol=0)
    assert scaling == 1.0


@pytest.mark.parametrize(("profile", "stride"), [("engine", 0.5), ("engine", 2.0), ("hf", 0.5)])
def test_frequencies_that_no_pair_has_are_stored_too(pico: PicoFactory, profile: Any, stride: float) -> None:
    source = open_source(str(pico(kv_heads=2)))
    plan = some_plan(profile=profile, rope_slots=4, qk_rope_head_dim=8)

    grid = geometric_grid(source.rope.theta, 16, 4, stride)
    found, _ = stock_frequencies(rope_parameters(plan, source, grid), 8, 512)

    assert grid.frequencies.tolist() == pytest.approx([1e4 ** (-2 * stride * j / 16) for j in range(4)], rel=1e-12)
    assert torch.allclose(found, grid.frequencies, rtol=ROTARY_FLOAT32, atol=0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "llama3"],
)
def test_scaled_frequencies_are_stored_too(pico: PicoFactory, rope: dict[str, Any]) -> None:
    source = open_source(str(pico(rope_parameters=rope)))
    plan = some_plan(rope_slots=8, qk_rope_head_dim=16)

    found, scaling = stock_frequencies(
        rope_parameters(plan, source, pair_grid(tuple(range(8)), source.rope.frequencies)), 16, 512
    )

    assert torch.allclose(found, source.rope.frequencies, rtol=ROTARY_FLOAT32, atol=0)
    assert scaling == 1.0


@pytest.mark.parametrize("profile", ["engine", "hf"])
def test_the_configuration_is_dense_stock_deepseek(pico: PicoFactory, profile: Any) -> None:
    source = open_source(str(pico(rms_norm_eps=1e-5, tie_word_embeddings=True)))
    plan = make_plan(source, ConvertOptions(lossless=True, profile=profile))

    config = stock_config(plan, source, pair_grid(tuple(range(8)), source.rope.frequencies))

    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["first_k_dense_replace"] == config["num_hidden_layers"] == 4
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 4
    assert config["num_nextn_predict_layers"] == 0
    assert config["rope_interleave"] is True
    assert isinstance(config["n_routed_experts"], int)
    assert not {"sliding_window", "head_dim", "auto_map", "quantization_config"} & set(config)
    assert config["qk_rope_head_dim"] > 0
    assert config["hidden_size"] == 48
    assert config["intermediate_size"] == 64
    assert config["vocab_size"] == 97
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    assert config["attention_bias"] is (profile == "hf" and plan.attention_bias)
    # transformers hard-codes the latent norm's epsilon, the engines take this one.
    assert config["rms_norm_eps"] == (1e-6 if profile == "engine" else 1e-5)
    assert config["tie_word_embeddings"] is (profile == "hf")
