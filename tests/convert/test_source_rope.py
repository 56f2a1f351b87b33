from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from mla_convert.convert.source_rope import SourceRope, read_rope
from mla_convert.errors import InputRefused
from tests.tolerances import ROTARY_FLOAT32

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "default-1e6": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": LLAMA3 | {"rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 8192},
    "llama3-short": LLAMA3 | {"rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 64},
}
CLASSES: dict[str, tuple[type[PretrainedConfig], Any]] = {
    "llama": (LlamaConfig, LlamaRotaryEmbedding),
    "mistral": (MistralConfig, MistralRotaryEmbedding),
    "qwen2": (Qwen2Config, Qwen2RotaryEmbedding),
}


def config_of(rope: dict[str, Any], dim: int = 64, kind: type[PretrainedConfig] = LlamaConfig) -> PretrainedConfig:
    return kind(hidden_size=4 * dim, num_attention_heads=4, num_key_value_heads=2, rope_parameters=dict(rope))


def rope_of(rope: dict[str, Any], dim: int = 64) -> SourceRope:
    return read_rope(config_of(rope, dim), dim, "here")


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_frequencies_are_those_of_the_source_class(family: str, setting: str) -> None:
    kind, rotary = CLASSES[family]
    config = config_of(SETTINGS[setting], kind=kind)

    found = read_rope(config, 64, "here")
    module = rotary(config)

    assert found.frequencies.dtype == torch.float64
    assert torch.allclose(found.frequencies, module.inv_freq.double(), rtol=ROTARY_FLOAT32, atol=0)
    assert module.attention_scaling == 1.0
    assert found.rope_type == SETTINGS[setting]["rope_type"]
    assert found.theta == SETTINGS[setting]["rope_theta"]


@pytest.mark.parametrize(
    ("dim", "factor", "kept"), [(128, 8.0, 29), (64, 32.0, 15)], ids=["Llama-3.1-8B", "Llama-3.2-1B"]
)
def test_the_fast_pairs_of_llama3_are_unscaled(dim: int, factor: float, kept: int) -> None:
    rope = rope_of(SETTINGS["llama3"] | {"factor": factor}, dim)

    assert rope.unscaled_pairs == kept
    assert torch.equal(rope.frequencies[:kept], rope.unscaled[:kept])
    assert bool((rope.frequencies[kept:] < rope.unscaled[kept:]).all())


def test_default_rope_scales_no_pair_and_linear_rope_all() -> None:
    assert rope_of(SETTINGS["default"]).unscaled_pairs == 32
    assert rope_of(SETTINGS["linear"]).unscaled_pairs == 0
    assert rope_of(SETTINGS["linear"] | {"factor": 1.0}).unscaled_pairs == 32


def test_the_old_spelling_of_a_configuration_means_the_same() -> None:
    old = LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0}
    )

    found = read_rope(old, 64, "here")

    assert (found.rope_type, found.theta) == ("linear", 500.0)
    assert torch.equal(
        found.frequencies, rope_of({"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}).frequencies
    )


def parameters(**rope: Any) -> PretrainedConfig:
    """A configuration as a file on disk might have it; transformers' own classes refuse some of these themselves."""
    config = config_of(SETTINGS["default"])
    config.rope_parameters = rope
    return config


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "attention factor"),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "sequence length"),
        ({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32}, "two lists"),
        ({"rope_type": "spiral", "rope_theta": 1e4}, "not known"),
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_type": "default", "rope_theta": "big"}, "rope_theta"),
        ({"rope_type": "default", "rope_theta": 1.0}, "rope_theta"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "factor"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 0}, "factor"),
        (LLAMA3 | {"rope_theta": 1e4, "factor": 8.0}, "original_max_position_embeddings"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "part of the head"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.get("rope_type")),
)
def test_what_is_not_one_list_of_frequencies_is_refused(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(InputRefused, match=named) as caught:
        read_rope(parameters(**rope), 64, "the-source")

    assert "the-source" in str(caught.value.where)
