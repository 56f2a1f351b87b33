"""A random stock attention layer in float64, its factors and what it computes, for the checks of `attention_checks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from tests.convert.support import normal

SIZES = {"heads": 3, "hidden": 10, "nope": 4, "rope": 6, "value": 4, "latent": 7, "bottleneck": 5}
BATCH, LENGTH = 2, 9
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.9}


@dataclass(frozen=True)
class Modules:
    """The attention module and the one that reads stock tensors: the real ones, or damaged copies."""

    attention: ModuleType
    stock: ModuleType


Check = Callable[[Modules], None]


@cache
def stock_layer(
    bottleneck: bool = False, interleave: bool = True, bias: bool = False, yarn: bool = False
) -> DeepseekV3Attention:
    """A random stock layer in float64 with an active latent norm. Read only."""
    config = DeepseekV3Config(
        hidden_size=SIZES["hidden"],
        num_hidden_layers=1,
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["heads"],
        kv_lora_rank=SIZES["latent"],
        q_lora_rank=SIZES["bottleneck"] if bottleneck else None,
        qk_nope_head_dim=SIZES["nope"],
        qk_rope_head_dim=SIZES["rope"],
        v_head_dim=SIZES["value"],
        attention_bias=bias,
        rope_interleave=interleave,
        rope_parameters=dict(YARN) if yarn else {"rope_type": "default", "rope_theta": 100.0},
        max_position_embeddings=512,
    )
    config._attn_implementation = "sdpa"  # eager takes its softmax in float32
    layer = DeepseekV3Attention(config, 0).double().eval()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(layer.named_parameters())):
            parameter.copy_(normal(*parameter.shape, seed=number))
            if "norm" in name:
                parameter.abs_().add_(0.5)
    return layer


def factors_of(modules: Modules, layer: DeepseekV3Attention) -> Any:
    """The layer's factors through the module under test."""
    rotary = DeepseekV3RotaryEmbedding(layer.config)
    rope = layer.config.rope_parameters
    mscale = 1.0
    if rope["rope_type"] == "yarn":
        mscale = modules.attention.yarn_mscale(rope["factor"], rope["mscale_all_dim"])
    shape = modules.stock.StockShape(
        heads=SIZES["heads"],
        nope_width=SIZES["nope"],
        rope=modules.attention.Rope(
            rotary.inv_freq.double(), bool(layer.config.rope_interleave), rotary.attention_scaling
        ),
        norm_eps=layer.kv_a_layernorm.variance_epsilon,
        mscale=mscale,
    )
    return modules.stock.stock_factors(dict(layer.state_dict()), shape)


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 90) -> Tensor:
    return normal(batch, length, SIZES["hidden"], seed=seed)


def places(batch: int = BATCH, length: int = LENGTH, first: int = 0) -> Tensor:
    return torch.arange(first, first + length).expand(batch, -1)


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    assert bool(torch.isfinite(found).all())
    return float((found - expected).abs().max() / expected.abs().max())


def stock_run(layer: DeepseekV3Attention, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output of the stock layer, and the latent and rotary rows that it caches."""
    angle = positions[..., None].double() * DeepseekV3RotaryEmbedding(layer.config).inv_freq.double()
    amplitude = DeepseekV3RotaryEmbedding(layer.config).attention_scaling
    angle = torch.cat([angle, angle], dim=-1)
    filled = DynamicCache(config=layer.config)
    with torch.no_grad():
        output = layer(inputs, (angle.cos() * amplitude, angle.sin() * amplitude), None, filled)[0]
    held = filled.layers[0]
    return output, held.keys[:, 0], held.values[:, 0]
