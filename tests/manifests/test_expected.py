from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from mla_convert.errors import InputRefused
from mla_convert.manifests.expected import expected_tensors
from mla_convert.manifests.identity import Architecture
from tests.manifests.example import architecture

CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "profile": "hf"},
    "biases": {"attention_bias": True, "profile": "hf"},
    "query rank": {"q_lora_rank": 7, "profile": "hf"},
    "query rank and biases": {"q_lora_rank": 13, "attention_bias": True, "profile": "hf"},
    "one layer, many heads": {"num_hidden_layers": 1, "num_attention_heads": 9, "v_head_dim": 8},
    "no content keys": {"qk_nope_head_dim": 0},
    "four layers": {"num_hidden_layers": 4},
}


def stock_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    config = DeepseekV3Config(
        hidden_size=arch.hidden_size,
        num_hidden_layers=arch.num_hidden_layers,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_attention_heads,
        kv_lora_rank=arch.kv_lora_rank,
        q_lora_rank=arch.q_lora_rank,
        qk_nope_head_dim=arch.qk_nope_head_dim,
        qk_rope_head_dim=arch.qk_rope_head_dim,
        v_head_dim=arch.v_head_dim,
        vocab_size=arch.vocab_size,
        intermediate_size=arch.intermediate_size,
        attention_bias=arch.attention_bias,
        tie_word_embeddings=arch.tie_word_embeddings,
        first_k_dense_replace=arch.num_hidden_layers,
        num_mtp_layers=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes_are_those_of_the_frameworks_own_class(name: str) -> None:
    arch = architecture(**CASES[name])
    derived = {tensor.name: tensor.shape for tensor in expected_tensors(arch).values()}
    assert derived == stock_shapes(arch)


@pytest.mark.parametrize(
    ("tied", "profile", "optional"),
    [(False, "hf", []), (True, "hf", ["lm_head.weight"]), (True, "engine", []), (False, "engine", [])],
)
def test_only_a_head_that_the_runtime_ties_may_be_left_out(tied: bool, profile: str, optional: list[str]) -> None:
    tensors = expected_tensors(architecture(tie_word_embeddings=tied, profile=profile)).values()
    assert [tensor.name for tensor in tensors if tensor.optional] == optional


def test_an_unknown_model_type_is_refused() -> None:
    with pytest.raises(InputRefused, match="no tensor list is known"):
        expected_tensors(architecture(model_type="mla"))
