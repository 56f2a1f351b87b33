"""What the decode bench measures on: a source model and an MLA model of the same depth and heads, loaded."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mla_convert.assets.smollm2 import DESCRIPTION, smollm2_folder
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert
from mla_convert.eval.loading import load_model

# A layer of DeepSeek-V2's cache widths with the heads of an 8B model, and such a model's own attention beside it.
LAYER_HEADS, LAYER_GROUPS, LAYER_HIDDEN, LAYER_HEAD = 32, 8, 4096, 128
LAYER_LATENT, LAYER_ROPE = 512, 64
LAYER_POSITIONS = 1 << 17
# What is not attention is as small as transformers allows, so that it is attention that is timed.
LAYER_FEED_FORWARD, LAYER_VOCABULARY = 32, 32


@dataclass(frozen=True)
class Subject:
    """A pair of models that differ in their attention.

    Attributes:
        name: Of the pair.
        description: What they are.
        source: Decodes from the keys and values of its KV heads.
        converted: A stock `deepseek_v3` model.
    """

    name: str
    description: str
    source: Any
    converted: Any


def smollm2_subject(rope: int, latent: int) -> Subject:
    """SmolLM2-135M and its conversion at a width; speed does not depend on the numbers, so nothing is calibrated."""
    folder = smollm2_folder()
    options = ConvertOptions(
        qk_rope_head_dim=rope, kv_lora_rank=latent, profile="hf", rope_policy="high", weighting="weight"
    )
    with tempfile.TemporaryDirectory(prefix="mla-convert-") as work:
        out = Path(work) / "out"
        convert(str(folder), out, options)
        converted = load_model(out)
    return Subject("smollm2", f"{DESCRIPTION}; {rope}+{latent}, uncalibrated, float32", load_model(folder), converted)


def layer_subject(seed: int) -> Subject:
    """One layer of random weights: 32 heads, 512+64 cached numbers, beside GQA with 8 KV heads of 128."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

    common: dict[str, Any] = {
        "hidden_size": LAYER_HIDDEN,
        "intermediate_size": LAYER_FEED_FORWARD,
        "vocab_size": LAYER_VOCABULARY,
        "num_hidden_layers": 1,
        "num_attention_heads": LAYER_HEADS,
        "max_position_embeddings": LAYER_POSITIONS,
    }
    mla = DeepseekV3Config(
        **common,
        num_key_value_heads=LAYER_HEADS,
        kv_lora_rank=LAYER_LATENT,
        qk_rope_head_dim=LAYER_ROPE,
        qk_nope_head_dim=LAYER_HEAD,
        v_head_dim=LAYER_HEAD,
        q_lora_rank=None,
        first_k_dense_replace=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        converted: nn.Module = DeepseekV3ForCausalLM(mla).float().eval()
        gqa = LlamaConfig(**common, num_key_value_heads=LAYER_GROUPS, head_dim=LAYER_HEAD)
        source: nn.Module = LlamaForCausalLM(gqa).float().eval()
    return Subject(
        "layer",
        f"one random layer, {LAYER_HEADS} heads, {LAYER_LATENT}+{LAYER_ROPE} cached numbers, "
        f"beside GQA with {LAYER_GROUPS} KV heads of {LAYER_HEAD}; float32",
        source,
        converted,
    )
