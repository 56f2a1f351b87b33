"""Random layers, windows and statistics for tests of the pure functions, and how converted folders are run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor
from transformers import AutoModelForCausalLM

from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.statistics import LayerStatistics, measure_layer
from mla_convert.convert.weights import AttentionShape, LayerWeights
from mla_convert.mla.rope import default_frequencies
from mla_convert.mla.weights import MLALayerWeights

# Derandomised: the examples are a function of the test, so a failure elsewhere is a failure here.
SEEDED = settings(
    derandomize=True, deadline=None, max_examples=25, database=None, suppress_health_check=[HealthCheck.too_slow]
)
THETA = 100.0


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*size: int, seed: int, std: float = 1.0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=generator(seed)) * std


def complex_normal(*size: int, seed: int) -> Tensor:
    return torch.complex(normal(*size, seed=seed), normal(*size, seed=seed + 7919))


def spd(size: int, seed: int) -> Tensor:
    """A well conditioned symmetric positive definite matrix."""
    root = normal(size, size, seed=seed)
    return root @ root.T / size + 0.1 * torch.eye(size, dtype=torch.float64)


def random_layer(shape: AttentionShape, seed: int, *, bias: bool = False, std: float = 0.3) -> LayerWeights:
    heads, groups, dim, hidden = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.hidden_size
    return LayerWeights(
        shape=shape,
        q=normal(heads, dim, hidden, seed=seed, std=std),
        k=normal(groups, dim, hidden, seed=seed + 1, std=std),
        v=normal(groups, dim, hidden, seed=seed + 2, std=std),
        o=normal(heads, hidden, dim, seed=seed + 3, std=std),
        q_bias=normal(heads, dim, seed=seed + 4, std=std) if bias else None,
        k_bias=normal(groups, dim, seed=seed + 5, std=std) if bias else None,
        v_bias=normal(groups, dim, seed=seed + 6, std=std) if bias else None,
        o_bias=normal(hidden, seed=seed + 7, std=std) if bias else None,
        softmax_scale=dim**-0.5,
    )


def frequencies_of(shape: AttentionShape) -> Tensor:
    return default_frequencies(THETA, shape.head_dim)


def random_windows(shape: AttentionShape, seed: int, *, windows: int = 4, length: int = 24) -> Tensor:
    """Correlated inputs with a mean: neither the centred nor the uncentred covariance is a multiple of one."""
    hidden = shape.hidden_size
    mix = normal(hidden, hidden, seed=seed + 20) / hidden**0.5
    return normal(windows, length, hidden, seed=seed + 21) @ mix + normal(hidden, seed=seed + 22, std=0.5)


def measured(weights: LayerWeights, seed: int = 0, **sizes: int) -> LayerStatistics:
    return measure_layer(weights, random_windows(weights.shape, seed, **sizes), frequencies_of(weights.shape))


def tensors_of(statistics: LayerStatistics) -> dict[str, Tensor]:
    """Every tensor by name, those of the moments included."""
    found: dict[str, Tensor] = {}
    for field in fields(LayerStatistics):
        value = getattr(statistics, field.name)
        parts = {"": value} if isinstance(value, Tensor) else {f".{part}": item for part, item in vars(value).items()}
        found |= {f"{field.name}{part}": item for part, item in parts.items()}
    return found


def permute_query_heads(weights: LayerWeights, order: Sequence[int]) -> LayerWeights:
    index = list(order)
    bias = None if weights.q_bias is None else weights.q_bias[index]
    return replace(weights, q=weights.q[index], o=weights.o[index], q_bias=bias)


def permute_groups(weights: LayerWeights, order: Sequence[int]) -> LayerWeights:
    """Move whole groups: a key/value head with all of its query heads."""
    rep, index = weights.shape.heads_per_group, list(order)
    moved = permute_query_heads(weights, [group * rep + head for group in index for head in range(rep)])
    return replace(
        moved,
        k=weights.k[index],
        v=weights.v[index],
        k_bias=None if weights.k_bias is None else weights.k_bias[index],
        v_bias=None if weights.v_bias is None else weights.v_bias[index],
    )


def key_map(layer: MLALayerWeights) -> Tensor:
    """(G, d_N, D): the content key map that the factors stand for."""
    return layer.k_up @ layer.latent


def value_map(layer: MLALayerWeights) -> Tensor:
    """(G, d_V, D)."""
    return layer.v_up @ layer.latent


def random_mla(
    *, heads: int, groups: int, hidden: int, nope: int, slots: int, value: int, rank: int, seed: int, bias: bool = False
) -> MLALayerWeights:
    return MLALayerWeights(
        q_nope=normal(heads, nope, hidden, seed=seed, std=0.3),
        q_nope_bias=normal(heads, nope, seed=seed + 1, std=0.3) if bias else None,
        q_rope=complex_normal(heads, slots, hidden, seed=seed + 2) * 0.3,
        q_rope_bias=complex_normal(heads, slots, seed=seed + 3) * 0.3 if bias else None,
        k_rope=complex_normal(slots, hidden, seed=seed + 4) * 0.3,
        k_rope_bias=complex_normal(slots, seed=seed + 5) * 0.3 if bias else None,
        latent=normal(rank, hidden, seed=seed + 6, std=0.3),
        k_up=normal(groups, nope, rank, seed=seed + 7, std=0.3),
        v_up=normal(groups, value, rank, seed=seed + 8, std=0.3),
        output=normal(heads, hidden, value, seed=seed + 9, std=0.3),
        output_bias=normal(hidden, seed=seed + 10, std=0.3) if bias else None,
        frequencies=torch.rand(slots, dtype=torch.float64, generator=generator(seed + 11)),
        softmax_scale=0.21,
    )


def some_plan(**changes: Any) -> ConversionPlan:
    """A plan for tests of the layout; a test states what it depends on."""
    fields: dict[str, Any] = {
        "family": "llama",
        "profile": "hf",
        "lossless": False,
        "rope_policy": "optimal",
        "rope_slots": 3,
        "factorization": "joint",
        "key_rank": None,
        "weighting": "weight",
        "gamma": "one",
        "useful_rank": 5,
        "kv_lora_rank": 5,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 4,
        "v_head_dim": 7,
        "q_lora_rank": None,
        "attention_bias": False,
        "latent_norm": "epsilon",
        "residual_scale": 1.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "source",
        "attention_dtype": "float32",
        "seed": 0,
        "calibration": None,
    }
    return ConversionPlan(**{**fields, **changes})


def load_stock(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A folder as stock transformers loads it, refusing any tensor that does not fit."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def random_ids(vocab_size: int, *size: int, seed: int) -> Tensor:
    """Ordinary tokens: none of the three special ones."""
    return torch.randint(3, vocab_size, size, generator=generator(seed))


@torch.inference_mode()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.double()


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """max |Δ| over max |expected|."""
    return float((actual - expected).abs().max() / expected.abs().max())


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON object on disk; None removes the key."""
    value = {**read_json(path), **changes}
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}), encoding="utf-8")
