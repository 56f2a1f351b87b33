"""Folders that transformers itself wrote verify as they are, with every option of the `hf` profile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from mla_convert.manifests.identity import Architecture, LatentNorm
from mla_convert.manifests.verify import verify_folder
from tests.manifests.example import LAYERS, THETA, architecture, manifest_of, position, write_source

CONSTANT = LatentNorm(
    route="constant",
    epsilon=1e-6,
    down_scale=(1.0,) * LAYERS,
    norm_weight=(163.3,) * LAYERS,
    up_scale=(1.0,) * LAYERS,
    constant=(400.0,) * LAYERS,
    constant_row=5,
)
CASES: dict[str, dict[str, object]] = {
    "engine": {},
    "hf, tied": {"profile": "hf", "tie_word_embeddings": True},
    "hf, biases, query rank and constant channel": {
        "profile": "hf",
        "attention_bias": True,
        "q_lora_rank": 13,
        "rms_norm_eps": 1e-5,
        "latent_norm": CONSTANT,
    },
}


def save_stock(folder: Path, arch: Architecture, rope: dict[str, object]) -> None:
    """Let transformers write a random checkpoint of this architecture, in several shards."""
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
        rms_norm_eps=arch.rms_norm_eps,
        first_k_dense_replace=arch.num_hidden_layers,
        num_mtp_layers=0,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(folder, max_shard_size="4KB")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rope_type", ["default", "longrope"])
def test_what_transformers_saves_verifies(tmp_path: Path, name: str, rope_type: str) -> None:
    arch = architecture(**CASES[name])
    source, folder = tmp_path / "source", tmp_path / "out"
    write_source(source)
    rotation = position()
    rope: dict[str, object] = {"rope_type": rope_type, "rope_theta": THETA}
    if rope_type == "longrope":
        factors = [1.0, 0.01]  # both pairs turn at frequency one
        rope |= {"short_factor": factors, "long_factor": factors, "factor": 1.0}
        rotation = position("longrope", (1.0, 1.0))
    save_stock(folder, arch, rope)
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    manifest_of(folder, source, arch, rotation).write(folder)
    assert verify_folder(folder, source).problems == ()
