from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from mla_convert.convert.checkpoint import SourceCheckpoint, open_source
from mla_convert.convert.inspection import Inspection, inspect_source, preview_conversion
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import ProfileName, RopePolicy
from mla_convert.convert.planning import make_plan
from mla_convert.convert.tensor_files import TensorFiles
from mla_convert.errors import InputRefused, UsageFault
from tests.conftest import PicoFactory
from tests.pico import make_pico

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Llama-3.1-8B's rope: the first 29 of its 64 pairs are unscaled.
LLAMA31 = {**LLAMA3, "rope_theta": 500_000.0, "original_max_position_embeddings": 8192}
SMALL = {"num_layers": 1, "tokenizer": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one KV head": ("llama", {"tokenizer": False}),
    "grouped": ("llama", {"kv_heads": 2, **SMALL}),
    "MHA": ("llama", {"kv_heads": 4, "head_dim": 12, **SMALL}),
    "9 query heads": ("llama", {"heads": 9, "kv_heads": 3, "hidden_size": 144, **SMALL}),
    "14 query heads and biases": ("qwen2", {"heads": 14, "kv_heads": 2, "head_dim": 8, "hidden_size": 112, **SMALL}),
    "narrow hidden": ("llama", {"kv_heads": 4, "head_dim": 32, **SMALL}),
    "one pair a head": ("llama", {"head_dim": 2, **SMALL}),
    "wide heads": ("llama", {"heads": 2, "head_dim": 128, **SMALL}),
    "SmolLM2's shape": ("llama", {"heads": 9, "kv_heads": 3, "head_dim": 64, "hidden_size": 576, **SMALL}),
    "mistral": ("mistral", {"kv_heads": 2, **SMALL}),
    "tied": ("llama", {"tie_word_embeddings": True, **SMALL}),
    "llama3 rope": ("llama", {"kv_heads": 2, "rope_parameters": LLAMA3, **SMALL}),
    "Llama-3.1's rope": ("llama", {"heads": 2, "head_dim": 128, "rope_parameters": LLAMA31, **SMALL}),
    "linear rope": (
        "llama",
        {"kv_heads": 2, "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}, **SMALL},
    ),
    "bfloat16": ("llama", {"kv_heads": 2, "dtype": "bfloat16", **SMALL}),
    "float16": ("llama", {"kv_heads": 2, "dtype": "float16", **SMALL}),
}


@pytest.fixture
def opened(pico: PicoFactory, request: pytest.FixtureRequest) -> SourceCheckpoint:
    family, options = CASES[request.param]
    return open_source(str(pico(family, **options)))


def inspect_case(pico: PicoFactory, name: str) -> Inspection:
    family, options = CASES[name]
    return inspect_source(open_source(str(pico(family, **options))))


@pytest.mark.parametrize("opened", CASES, indirect=True)
def test_every_suggested_plan_is_one_that_planning_accepts(opened: SourceCheckpoint) -> None:
    found = inspect_source(opened)

    assert found.plans[0].lossless
    for suggested in found.plans:
        plan = make_plan(opened, suggested.options(*(() if suggested.lossless else ("text.txt",))))
        numbers = plan.kv_lora_rank + plan.qk_rope_head_dim
        assert (plan.profile, plan.lossless) == (suggested.profile, suggested.lossless)
        assert (plan.kv_lora_rank, plan.qk_rope_head_dim) == (suggested.kv_lora_rank, suggested.qk_rope_head_dim)
        assert not plan.padded
        assert suggested.cache.numbers_per_token_per_layer == numbers
        itemsize = 4 if plan.attention_dtype == "float32" else 2
        assert suggested.cache.bytes_per_token == numbers * opened.num_layers * itemsize
        assert suggested.share == numbers / opened.shape.cached_numbers
        assert suggested.lossless or suggested.share <= 0.5


@pytest.mark.parametrize("opened", CASES, indirect=True)
def test_the_widths_of_a_profile_are_legal_up_to_their_ends_and_not_beyond(opened: SourceCheckpoint) -> None:
    found = inspect_source(opened)
    for facts in found.profiles:
        if facts.qk_rope_head_dim is None:
            continue
        for rope in (facts.qk_rope_head_dim.lowest, facts.qk_rope_head_dim.highest):
            for rank in (found.rank_width.lowest, found.largest_rank(rope)):
                assert make_plan(opened, wanted(facts.name, rank, rope)).kv_lora_rank == rank
            with pytest.raises(UsageFault, match="out of range"):
                make_plan(opened, wanted(facts.name, found.largest_rank(rope) + 1, rope))
        beyond = facts.qk_rope_head_dim.highest + facts.qk_rope_head_dim.step
        with pytest.raises((UsageFault, InputRefused)):
            make_plan(opened, wanted(facts.name, found.rank_width.lowest, beyond))


@pytest.mark.parametrize("policy", sorted(set(get_args(RopePolicy)) - {"rorope"}))
@pytest.mark.parametrize("opened", ["one KV head", "9 query heads", "MHA"], indirect=True)
def test_the_rope_widths_of_a_policy(opened: SourceCheckpoint, policy: RopePolicy) -> None:
    width = inspect_source(opened).rope_widths[policy]
    every = range(width.lowest, width.highest + 1, width.step)

    assert every[-1] == width.highest
    for rope in range(width.highest + 2 * width.step):
        options = wanted("hf", 1, rope, policy)
        if rope in every:
            assert make_plan(opened, options).qk_rope_head_dim == rope
        else:
            with pytest.raises(UsageFault, match="does not fit policy"):
                make_plan(opened, options)


def wanted(profile: ProfileName, rank: int, rope: int, policy: RopePolicy = "optimal") -> ConvertOptions:
    return ConvertOptions(
        kv_lora_rank=rank, qk_rope_head_dim=rope, profile=profile, rope_policy=policy, calibration=("text.txt",)
    )


def widths(found: Inspection, profile: str) -> list[tuple[int, int]]:
    chosen = [plan for plan in found.plans if plan.profile == profile and not plan.lossless]
    return [(plan.qk_rope_head_dim, plan.kv_lora_rank) for plan in chosen]


def test_the_suggestions_split_the_cache_as_was_measured_best(pico: PicoFactory) -> None:
    found = inspect_case(pico, "SmolLM2's shape")

    assert found.cache.numbers_per_token_per_layer == 384
    assert widths(found, "engine") == [(48, 144), (36, 108), (32, 64)]
    assert widths(found, "hf") == [(48, 144), (36, 108), (32, 64)]
    assert [plan.share for plan in found.plans] == [1.0, *[0.5, 0.375, 0.25] * 2]


def test_a_rank_beyond_the_hidden_width_is_not_suggested(pico: PicoFactory) -> None:
    found = inspect_case(pico, "narrow hidden")

    assert found.rank_width.highest == 48
    assert widths(found, "hf") == [(32, 48), (24, 48), (16, 48)]


def test_a_cache_too_small_to_split_has_no_suggestion_but_the_lossless_plan(pico: PicoFactory) -> None:
    found = inspect_case(pico, "one pair a head")

    assert [(plan.lossless, plan.qk_rope_head_dim, plan.kv_lora_rank) for plan in found.plans] == [(True, 2, 2)]


@pytest.mark.parametrize(
    ("name", "profile"),
    [("one KV head", "engine"), ("grouped", "hf"), ("14 query heads and biases", "hf"), ("llama3 rope", "hf")],
)
def test_which_profile_holds_the_lossless_plan(pico: PicoFactory, name: str, profile: str) -> None:
    found = inspect_case(pico, name)

    assert found.plans[0].profile == profile
    assert next(facts.name for facts in found.profiles if facts.lossless_refusal is None) == profile


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("14 query heads and biases", "no biases and the source has self_attn.k_proj.bias"),
        ("linear rope", "linearly scaled rope"),
        ("float16", "cannot hold float16"),
    ],
)
def test_what_the_engine_profile_cannot_carry_is_said_and_not_suggested(
    pico: PicoFactory, name: str, reason: str
) -> None:
    found = inspect_case(pico, name)
    engine, hf, full = found.profiles

    assert reason in (engine.refusal or "")
    assert engine.qk_rope_head_dim is None
    assert hf.refusal is None
    assert "not available yet" in (full.refusal or "")
    assert {plan.profile for plan in found.plans} == {"hf"}


def test_the_engine_profile_takes_only_unscaled_pairs_of_llama3_rope(pico: PicoFactory) -> None:
    found = inspect_case(pico, "Llama-3.1's rope")
    engine = found.profiles[0]

    assert (found.rope.pairs, found.rope.unscaled_pairs) == (64, 29)
    assert engine.refusal is None
    assert engine.qk_rope_head_dim is not None
    assert engine.qk_rope_head_dim.highest == 58
    assert "at most 29 pairs" in (engine.lossless_refusal or "")


def test_float16_counts_the_row_of_the_norms_constant(pico: PicoFactory) -> None:
    found = inspect_case(pico, "float16")

    assert found.norm_route == "constant"
    assert (found.rank_width.lowest, found.rank_width.highest) == (2, 49)


def test_a_dtype_that_is_not_written_is_suggested_with_another(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_pico(tmp_path / "source", **SMALL)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value.to(torch.float64) for name, value in tensors.items()}, folder / "model.safetensors")
    source = open_source(str(folder))

    found = inspect_source(source)

    assert (found.cache.dtype, found.cache.bytes_per_token) == ("float64", 32 * 8)
    assert {(plan.dtype, plan.cache.dtype) for plan in found.plans} == {("float32", "float32")}
    for plan in found.plans:
        assert plan.arguments[-2:] == ("--dtype", "float32")
        assert make_plan(source, plan.options("text.txt")).attention_dtype == "float32"


def test_the_facts_of_a_source(pico: PicoFactory) -> None:
    found = inspect_case(pico, "14 query heads and biases")

    assert (found.family, found.architecture, found.kind) == ("qwen2", "Qwen2ForCausalLM", "hf-folder")
    assert found.biases == ("k_proj.bias", "q_proj.bias", "v_proj.bias")
    assert found.dtype_counts == {"float32": 1 + 1 + 1 + 4 + 3 + 3 + 2}
    assert (found.num_layers, found.vocab_size, found.tied) == (1, 97, False)
    assert inspect_case(pico, "tied").tied
    assert inspect_case(pico, "one KV head").cache.bytes_per_token == 4 * 32 * 4


def test_keys_that_no_rule_knows_are_named(tmp_path: Path) -> None:
    folder = make_pico(tmp_path / "source", **SMALL)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "novel_mixing": 3}), encoding="utf-8")

    assert inspect_source(open_source(str(folder))).unknown_config_keys == ("novel_mixing",)


def test_json_is_plain_and_whole(pico: PicoFactory) -> None:
    found = inspect_case(pico, "llama3 rope")
    payload = json.loads(json.dumps(found.to_json(), allow_nan=False))

    assert payload["cache"]["bytes_per_token"] == found.cache.bytes_per_token
    assert payload["rope"] == {"rope_type": "llama3", "theta": 10_000.0, "pairs": 8, "unscaled_pairs": 1}
    assert payload["plans"][1]["arguments"] == list(found.plans[1].arguments)
    assert payload["shape"]["num_kv_heads"] == 2


def test_no_tensor_is_read(pico: PicoFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(pico("llama", kv_heads=2)))
    monkeypatch.setattr(TensorFiles, "read", lambda _files, name: pytest.fail(f"read {name}"))

    found = inspect_source(source)
    preview_conversion(source, make_plan(source, found.plans[0].options()), Path("nowhere"))


def test_large_weights_are_previewed_as_shards(pico: PicoFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(pico("llama", kv_heads=2)))
    plan = make_plan(source, ConvertOptions(lossless=True))
    whole = preview_conversion(source, plan, Path("nowhere"))
    monkeypatch.setattr("mla_convert.convert.inspection.SHARD_BYTES", whole.weight_bytes - 1)

    sharded = preview_conversion(source, plan, Path("nowhere"))

    assert "model.safetensors" in whole.files
    shards = {"model-*-of-*.safetensors", "model.safetensors.index.json"}
    assert set(sharded.files) - set(whole.files) == shards
    assert set(whole.files) - set(sharded.files) == {"model.safetensors"}
