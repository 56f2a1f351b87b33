"""Faults seen in other converters, by the number they have in cases.md: the right value, and the fault caught.

Fixture F is `make_pico`'s default: 4 heads, 1 KV head of 16, hidden 48, 4 layers, vocabulary 97. Cases 6, 8 and 15
(soft-cap, q/k-norm, sliding window) are refusals: `test_families.py` has all of those. From 13 on:
`test_cases_13_to_23.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.planning import make_plan
from mla_convert.errors import InputRefused
from tests.conftest import PicoFactory
from tests.convert.conftest import Converted, ConvertedFactory
from tests.convert.mutants import Mutant, blame, damaged, error, half_split, rotary, verdict
from tests.convert.support import edit_json, load_stock, logits_of, random_ids, read_json, relative_difference
from tests.pico import make_pico
from tests.tolerances import LOGITS_FLOAT32

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_case_1_rotary_rows_are_interleaved(fixture_f: Converted, tmp_path: Path) -> None:
    def forget(mutant: Mutant) -> None:
        sizes = mutant.sizes
        mutant.change("kv_a_proj_with_mqa.weight", lambda w: rotary(sizes.rank, w, half_split(w[sizes.rank :])))

        def queries(weight: Tensor) -> Tensor:
            heads = weight.unflatten(0, (sizes.heads, -1))
            return torch.cat([torch.cat([h[: sizes.nope], half_split(h[sizes.nope :])]) for h in heads])

        mutant.change("q_proj.weight", queries)

    def wrong_flag(mutant: Mutant) -> None:
        mutant.config["rope_interleave"] = False

    assert error(fixture_f) <= LOGITS_FLOAT32
    config = read_json(fixture_f.folder / "config.json")
    assert config["rope_interleave"] is True
    assert fixture_f.manifest.identity.position.pairing_layout == "interleaved"
    assert blame(fixture_f, tmp_path / "rows", forget) == "model.layers.0.self_attn.q_proj.weight (rope rows)"
    assert "rope_parameters" in blame(fixture_f, tmp_path / "flag", wrong_flag)


def test_case_2_pairs_stay_inside_their_head(grouped: Converted, tmp_path: Path) -> None:
    source = load_file(grouped.source / "model.safetensors")

    def across_heads(mutant: Mutant) -> None:
        """The halves of all key rows taken together, so that x is in one head and y in the other."""
        sizes = mutant.sizes
        for layer in range(4):
            keys = source[f"model.layers.{layer}.self_attn.k_proj.weight"]  # (2·16, 48)
            crossed = torch.stack([keys[:16], keys[16:]], dim=1).flatten(0, 1)
            mutant.change("kv_a_proj_with_mqa.weight", lambda w, new=crossed: rotary(sizes.rank, w, new), (layer,))

    assert error(grouped) <= LOGITS_FLOAT32
    found = blame(grouped, tmp_path / "out", across_heads)
    assert found == "model.layers.0.self_attn.kv_a_proj_with_mqa.weight (rope rows)"


def test_case_4_llama3_rope_is_carried_or_refused(
    converted: ConvertedFactory, pico: PicoFactory, tmp_path: Path
) -> None:
    done = converted(source={"rope_parameters": LLAMA3})
    source = open_source(str(done.source))

    def drop(mutant: Mutant) -> None:
        mutant.config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}

    assert done.plan.profile == "hf"
    assert error(done) <= LOGITS_FLOAT32
    assert "rope_parameters" in blame(done, tmp_path / "dropped", drop)

    # 64 / 4 = 16 positions: pairs of wavelength 2π and 2π·√10 = 19.9, so one pair is unscaled.
    assert source.rope.unscaled_pairs == 1
    with pytest.raises(InputRefused, match=r"at most 1 pairs \(--qk-rope-head-dim 2\)"):
        make_plan(source, ConvertOptions(lossless=True, profile="engine"))


def test_case_4_an_engine_plan_of_unscaled_pairs_only(converted: ConvertedFactory, text: Path) -> None:
    slower = {**LLAMA3, "original_max_position_embeddings": 512}
    done = converted(
        source={"rope_parameters": slower},
        kv_lora_rank=24,
        qk_rope_head_dim=6,
        profile="engine",
        calibration=(str(text),),
        calibration_window=64,
        calibration_tokens=512,
    )

    config = read_json(done.folder / "config.json")
    source = open_source(str(done.source))
    assert config["rope_parameters"]["rope_type"] == "default"
    assert done.manifest.identity.position.frequencies == pytest.approx(source.rope.unscaled[:3].tolist(), rel=1e-12)
    assert source.rope.unscaled_pairs == 3
    assert done.manifest.reload_check.passed


def test_case_5_the_softmax_ratio_is_folded_into_the_queries(
    fixture_f: Converted, partial: Converted, tmp_path: Path
) -> None:
    def forget(mutant: Mutant) -> None:
        sizes = mutant.sizes
        ratio = ((sizes.nope + sizes.rope) / 16) ** 0.5
        mutant.change("q_proj.weight", lambda weight: weight / ratio)

    sizes = read_json(fixture_f.folder / "config.json")
    assert sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"] != 16
    assert error(fixture_f) <= LOGITS_FLOAT32
    assert blame(fixture_f, tmp_path / "f", forget) == "model.layers.0.self_attn.q_proj.weight (rope rows)"
    assert blame(partial, tmp_path / "partial", forget) == "model.layers.0.self_attn.q_proj.weight (content rows)"


def test_case_7_the_latent_norm_changes_nothing(fixture_f: Converted, grouped: Converted, tmp_path: Path) -> None:
    def naive(mutant: Mutant) -> None:
        """Factors as they are, norm weight one: what an exporter does that does not know of the norm."""
        for done_layer in range(4):
            constants = fixture_f.manifest.identity.architecture.latent_norm
            scale = constants.down_scale[done_layer]
            rank = mutant.sizes.rank
            mutant.change(
                "kv_a_proj_with_mqa.weight",
                lambda w, s=scale, r=rank: torch.cat([w[:r] / s, w[r:]]),
                (done_layer,),
            )
        mutant.change("kv_a_layernorm.weight", torch.ones_like)

    def calibrated(mutant: Mutant) -> None:
        """The same with the best fixed weight, the mean length of the latent: still no solution."""
        naive(mutant)
        for layer in range(4):
            latent = load_file(fixture_f.probe / f"layer_{layer:04d}.safetensors")["latent"]
            mean = float(latent.square().mean(-1).sqrt().mean())
            mutant.change("kv_a_layernorm.weight", lambda w, m=mean: w * m, (layer,))

    def wrong_weight(mutant: Mutant) -> None:
        mutant.change("kv_a_layernorm.weight", lambda w: w * 2, (2,))

    latent_rows = "self_attn.kv_a_proj_with_mqa.weight (latent rows) or kv_a_layernorm.weight"
    assert error(fixture_f) <= LOGITS_FLOAT32
    assert blame(fixture_f, tmp_path / "naive", naive) == f"model.layers.0.{latent_rows}"
    assert blame(fixture_f, tmp_path / "calibrated", calibrated) == f"model.layers.0.{latent_rows}"
    # A factor alone is a matter between the norm's weight and kv_b_proj, which undoes it.
    assert blame(grouped, tmp_path / "weight", wrong_weight).startswith("model.layers.2.self_attn.kv_")


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_case_9_biases_are_kept(converted: ConvertedFactory, tmp_path: Path, kv_heads: int) -> None:
    done = converted("qwen2", {"kv_heads": kv_heads})

    def no_query_bias(mutant: Mutant) -> None:
        mutant.change("q_b_proj.weight", lambda w: torch.cat([w[:, :-1], torch.zeros_like(w[:, -1:])], dim=1))

    def no_key_bias(mutant: Mutant) -> None:
        mutant.change("kv_a_proj_with_mqa.bias", torch.zeros_like)

    def no_value_bias(mutant: Mutant) -> None:
        mutant.change("o_proj.bias", torch.zeros_like)

    assert done.plan.profile == "hf"
    assert error(done) <= LOGITS_FLOAT32
    query, key = "model.layers.0.self_attn.q_b_proj.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert blame(done, tmp_path / "query", no_query_bias) == f"{query} (rope rows)"
    assert blame(done, tmp_path / "key", no_key_bias) == f"{key} (rope rows)"
    assert blame(done, tmp_path / "value", no_value_bias) == "model.layers.0.self_attn.o_proj"


def test_case_9_a_profile_without_biases_names_them(pico: PicoFactory) -> None:
    source = open_source(str(pico("qwen2")))

    with pytest.raises(InputRefused, match=r"self_attn\.k_proj\.bias.*q_proj\.bias.*v_proj\.bias.*--profile hf"):
        make_plan(source, ConvertOptions(lossless=True, profile="engine"))


def test_case_10_key_biases_are_repeated_with_their_weights(converted: ConvertedFactory, tmp_path: Path) -> None:
    done = converted(
        "qwen2",
        {"heads": 14, "kv_heads": 2, "head_dim": 64, "hidden_size": 128, "num_layers": 2, "weight_std": 0.15},
    )

    def first_head_for_all(mutant: Mutant) -> None:
        """Slots are pair by pair, head by head: every second slot takes the bias of the first head."""

        def repeat(bias: Tensor) -> Tensor:
            slots = bias[mutant.sizes.rank :].view(-1, 2, 2)  # (pair, head, xy)
            return torch.cat([bias[: mutant.sizes.rank], slots[:, :1].expand_as(slots).flatten()])

        mutant.change("kv_a_proj_with_mqa.bias", repeat, (0, 1))

    assert error(done) <= LOGITS_FLOAT32
    found = blame(done, tmp_path / "out", first_head_for_all)
    assert found == "model.layers.0.self_attn.kv_a_proj_with_mqa.weight (rope rows)"


def test_case_11_configuration_and_weights_change_together(pico: PicoFactory, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"heads": 14, "kv_heads": 2, "num_layers": 1}
    expanded = make_pico(tmp_path / "expanded", "qwen2", **sizes)
    path = expanded / "model.safetensors"
    state = load_file(path)
    for part in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"):
        name = f"model.layers.0.self_attn.{part}"
        state[name] = state[name].unflatten(0, (2, 16)).repeat_interleave(7, dim=0).flatten(0, 1)
    save_file(state, path, metadata={"format": "pt"})

    with pytest.raises(InputRefused, match="wrong shape") as caught:
        open_source(str(expanded))
    assert caught.value.found == "(224, 48)"

    # Said to be 14 key heads, it is the same model.
    edit_json(expanded / "config.json", num_key_value_heads=14)
    ids = random_ids(97, 2, 40, seed=1)
    assert open_source(str(expanded)).shape.num_kv_heads == 14
    small = load_stock(pico("qwen2", **sizes))
    assert relative_difference(logits_of(load_stock(expanded), ids), logits_of(small, ids)) <= LOGITS_FLOAT32


def test_case_11_the_target_says_how_many_heads_it_has(converted: ConvertedFactory) -> None:
    done = converted(
        "qwen2", {"heads": 14, "kv_heads": 2, "hidden_size": 112, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
    )

    config = read_json(done.folder / "config.json")
    weights = load_file(done.folder / "model.safetensors")
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 14
    rows = weights["model.layers.0.self_attn.kv_b_proj.weight"].shape[0]
    assert rows == 14 * (config["qk_nope_head_dim"] + config["v_head_dim"])


@pytest.mark.parametrize("first", [3, 0])
def test_case_12_every_layer_is_dense(fixture_f: Converted, tmp_path: Path, first: int) -> None:
    def default(mutant: Mutant) -> None:
        mutant.config["first_k_dense_replace"] = first

    assert read_json(fixture_f.folder / "config.json")["first_k_dense_replace"] == 4
    folder = damaged(fixture_f, tmp_path / "out", default)
    report = verdict(fixture_f, folder)
    assert f"model.layers.{first}.mlp" in report.loading_problems[0]
    assert f"model.layers.{first}.mlp" in blame(fixture_f, tmp_path / "again", default)
