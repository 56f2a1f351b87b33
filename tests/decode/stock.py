"""Tiny random stock DeepSeek-V3 models, and what is asked of them with and without absorbed attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

VOCABULARY = 97
LATENT, ROPE, LAYERS = 20, 8, 3
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 64,
}
# Each is one way that stock attention can differ.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "low-rank queries": {"q_lora_rank": 12},
    "half-split rope": {"rope_interleave": False},
    "biases": {"attention_bias": True, "q_lora_rank": 12},
    "yarn": {"rope_parameters": YARN},
    "experts": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
    },
}


def tiny(kind: str = "plain", seed: int = 0, **fields: Any) -> DeepseekV3ForCausalLM:
    """A model in float32 and evaluation mode, with an active latent norm."""
    config = DeepseekV3Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": LATENT,
            "q_lora_rank": None,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": 12,
            "first_k_dense_replace": LAYERS,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **KINDS[kind],
            **fields,
        }
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def token_ids(batch: int, length: int, seed: int = 7) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(batch: int, length: int, seed: int = 7) -> dict[str, Tensor]:
    """Prompts of unequal lengths, padded at the left: the first one by five, the second by two, the third by none."""
    ids = token_ids(batch, length, seed)
    mask = torch.ones_like(ids)
    for row, pads in zip(range(batch), (5, 2, 0), strict=False):
        mask[row, :pads] = 0
        ids[row, :pads] = 0
    return {"input_ids": ids, "attention_mask": mask}


def continuation(model: DeepseekV3ForCausalLM, inputs: Mapping[str, Tensor], **options: Any) -> Tensor:
    """`generate()` to a fixed length, all draws seeded."""
    torch.manual_seed(11)
    made = model.generate(**inputs, **{"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, **options})
    assert isinstance(made, Tensor)
    return made


def logits(model: DeepseekV3ForCausalLM, **inputs: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**inputs).logits
    return found


def apart(found: Tensor, expected: Tensor) -> float:
    """max |Δ| over max |expected|."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())
