"""The family table, and every feature that is named and refused before any work."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.families import FAMILIES, find_family, tensor_exists
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert
from mla_convert.errors import InputRefused
from tests.convert.support import edit_json
from tests.pico import FAMILIES as PICO_FAMILIES
from tests.pico import PicoOptions, build_pico_model, make_pico

LLAMA = next(family for family in FAMILIES if family.name == "llama")


def refused(folder: Path, out: Path) -> InputRefused:
    """Convert for real: the refusal must come before anything is written anywhere."""
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(InputRefused) as caught:
        convert(str(folder), out, ConvertOptions(lossless=True))
    assert sorted(out.parent.rglob("*")) == before
    return caught.value


def test_every_family_has_a_tiny_model_and_a_line_in_the_documentation() -> None:
    table = (Path(__file__).resolve().parents[2] / "docs" / "families.md").read_text(encoding="utf-8")

    assert {family.name for family in FAMILIES} == set(PICO_FAMILIES)
    for family in FAMILIES:
        assert f"`{family.model_type}`, `{family.architecture}`" in table


@pytest.mark.parametrize("family", PICO_FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("attention_bias", [False, True])
def test_a_row_lists_exactly_the_tensors_of_its_class(family: str, tied: bool, attention_bias: bool) -> None:
    options = PicoOptions(kv_heads=2, tie_word_embeddings=tied, config={"attention_bias": attention_bias})
    model = build_pico_model(family, options)
    row = next(row for row in FAMILIES if row.name == family)
    fields = model.config.to_dict()

    names = {item.name for item in row.model_tensors if tensor_exists(item, row, fields)}
    for layer in range(4):
        names |= {item.name.format(layer=layer) for item in row.layer_tensors if tensor_exists(item, row, fields)}

    assert names == set(model.state_dict()) - ({"lm_head.weight"} if tied else set())


def test_an_unknown_family_is_refused_with_the_ones_there_are(tmp_path: Path) -> None:
    folder = make_pico(tmp_path / "source")
    edit_json(folder / "config.json", model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"])

    error = refused(folder, tmp_path / "out")

    assert error.found == "'gpt_neox'"
    assert all(family.name in str(error.expected) for family in FAMILIES)
    assert "families.md" in str(error.remedy)


@pytest.mark.parametrize("model_type", [None, 3, "", ["llama"]])
def test_a_model_type_that_is_none_is_refused(model_type: Any) -> None:
    with pytest.raises(InputRefused, match="not in the table"):
        find_family({"model_type": model_type}, "here")


def test_another_class_of_a_known_family_is_refused() -> None:
    with pytest.raises(InputRefused, match="LlamaForSequenceClassification"):
        find_family({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "here")


# Case 6 of the faults seen elsewhere is here (soft-cap, query scalar), case 8 (q/k-norm) and case 15 (window) too.
FEATURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention soft-cap": ("llama", {"attn_logit_softcapping": 5.0}, "soft-cap"),
    "logit soft-cap": ("llama", {"final_logit_softcapping": 30.0}, "soft-cap"),
    "query scalar": ("llama", {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar=144"),
    "qk-norm": ("llama", {"use_qk_norm": True}, "q/k-norm"),
    "qk-layernorm": ("llama", {"qk_layernorm": True}, "q/k-norm"),
    "clip": ("llama", {"clip_qkv": 8.0}, "clipping"),
    "sinks": ("llama", {"attention_sinks": 4}, "sinks"),
    "sliding window of mistral": ("mistral", {"sliding_window": 8}, "sliding window"),
    "sliding window of qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None},
        "sliding window",
    ),
    "layer types": ("qwen2", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding_attention"),
    "chunked attention": ("llama", {"attention_chunk_size": 16}, "chunked"),
    "layers without rope": ("llama", {"no_rope_layers": [1, 1, 1, 0]}, "layers without rope"),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, "part of the head"),
    "interleaved source rope": ("llama", {"rope_interleaved": True}, "interleaved"),
    "experts": ("llama", {"num_local_experts": 8}, "mixture of experts"),
    "experts, other name": ("qwen2", {"num_experts": 60}, "mixture of experts"),
    "MLP bias": ("llama", {"mlp_bias": True}, "MLP"),
    "quantised": ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
    "attention multiplier": ("llama", {"attention_multiplier": 0.1}, "attention multiplier"),
    "residual multiplier": ("llama", {"residual_multiplier": 0.2}, "residual multiplier"),
    "embedding multiplier": ("llama", {"embedding_multiplier": 12.0}, "embedding multiplier"),
    "logits scaling": ("llama", {"logits_scaling": 8.0}, "logits scaling"),
    "yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "dynamic"),
    "longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            }
        },
        "longrope",
    ),
    "old spelling of yarn": (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        "yarn",
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_that_is_not_carried_is_named_before_any_work(tmp_path: Path, feature: str) -> None:
    family, changes, named = FEATURES[feature]
    folder = make_pico(tmp_path / "source", family)
    edit_json(folder / "config.json", **changes)
    # No tensor is read either: all of them are damaged.
    damage(folder / "model.safetensors")

    error = refused(folder, tmp_path / "out")

    assert named in str(error)
    assert "config.json" in str(error.where) or "source" in str(error.where)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = b"\xff" * (len(content) - start)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_logit_softcapping": None},
        {"mlp_bias": False},
        {"sliding_window": None, "use_sliding_window": False},
        {"num_local_experts": 0},
        {"partial_rotary_factor": 1.0},
        {"clip_qkv": None, "use_qk_norm": False, "layer_types": ["full_attention"] * 4},
    ],
)
def test_a_feature_that_is_switched_off_is_no_reason(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = make_pico(tmp_path / "source")
    edit_json(folder / "config.json", **changes)

    assert open_source(str(folder)).family is LLAMA


def test_a_window_that_qwen2_does_not_use_is_no_reason(tmp_path: Path) -> None:
    folder = make_pico(tmp_path / "source", "qwen2")
    edit_json(folder / "config.json", sliding_window=4096, use_sliding_window=False)

    assert open_source(str(folder)).family.name == "qwen2"


def test_mistral_without_a_word_about_windows_has_one(tmp_path: Path) -> None:
    """The class's own default is a window of 4,096: a configuration that is silent means that."""
    folder = make_pico(tmp_path / "source", "mistral")
    edit_json(folder / "config.json", sliding_window=None)

    assert "sliding_window=4096" in str(refused(folder, tmp_path / "out"))


def test_qk_norm_tensors_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_pico(tmp_path / "source")
    path = folder / "model.safetensors"
    state = load_file(path)
    for layer in range(4):
        state[f"model.layers.{layer}.self_attn.q_norm.weight"] = torch.ones(16)
        state[f"model.layers.{layer}.self_attn.k_norm.weight"] = torch.ones(16)
    save_file(state, path, metadata={"format": "pt"})

    error = refused(folder, tmp_path / "out")

    assert "8 tensor(s)" in error.message
    assert "self_attn.k_norm.weight" in str(error.found)


def test_a_refusal_takes_no_time_with_the_weights(tmp_path: Path) -> None:
    """Opening validates from headers: a sparse file of 8 GB is refused as fast as a small one."""
    folder = make_pico(tmp_path / "source")
    edit_json(folder / "config.json", attn_logit_softcapping=5.0)
    os.truncate(folder / "model.safetensors", 8_000_000_000)

    started = time.perf_counter()
    refused(folder, tmp_path / "out")

    assert time.perf_counter() - started < 5
