"""Faults that have no number in cases.md, and the reload check on half-precision files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.convert.conftest import Converted, ConvertedFactory
from tests.convert.mutants import Mutant, blame, damaged, half_split, rotary, verdict
from tests.tolerances import LOGITS_FLOAT32


def test_an_undamaged_folder_passes(partial: Converted, tmp_path: Path) -> None:
    def nothing(_mutant: Mutant) -> None:
        return

    report = verdict(partial, damaged(partial, tmp_path / "copy", nothing))

    assert report.loading_problems == ()
    assert report.first_difference is None
    assert report.max_abs_error <= LOGITS_FLOAT32 * report.max_abs_logit


def test_the_order_of_heads_in_the_output_projection(partial: Converted, tmp_path: Path) -> None:
    def reversed_heads(mutant: Mutant) -> None:
        mutant.change("o_proj.weight", lambda w: w.unflatten(1, (4, -1)).flip(1).flatten(1), (1,))

    assert blame(partial, tmp_path / "out", reversed_heads) == "model.layers.1.self_attn.o_proj"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp or layer norms"),
        ("model.layers.1.post_attention_layernorm.weight", "model.layers.1.mlp or layer norms"),
        ("model.norm.weight", "logits"),
    ],
)
def test_a_fault_outside_attention_is_found_too(partial: Converted, tmp_path: Path, name: str, expected: str) -> None:
    def scale(mutant: Mutant) -> None:
        mutant.state[name] = mutant.state[name] * 1.1

    assert blame(partial, tmp_path / "out", scale) == expected


def test_a_missing_and_a_left_over_tensor_are_named(partial: Converted, tmp_path: Path) -> None:
    def missing(mutant: Mutant) -> None:
        del mutant.state["model.layers.2.self_attn.kv_b_proj.weight"]

    def extra(mutant: Mutant) -> None:
        mutant.state["model.layers.2.self_attn.k_proj.weight"] = torch.ones(2)

    assert "model.layers.2.self_attn.kv_b_proj.weight" in blame(partial, tmp_path / "missing", missing)
    assert "model.layers.2.self_attn.k_proj.weight" in blame(partial, tmp_path / "extra", extra)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_faults_stand_out_in_half_precision_too(converted: ConvertedFactory, tmp_path: Path, dtype: str) -> None:
    """The gate's tolerances are wider there: wide enough for rounding, not for a fault."""
    options = {"kv_lora_rank": 24, "qk_rope_head_dim": 16, "rope_policy": "high"}
    done = converted(source={"kv_heads": 2, "dtype": dtype}, **options)

    def softmax_ratio(mutant: Mutant) -> None:
        mutant.change("q_proj.weight", lambda w: w * (16 / 24) ** 0.5)

    def rows(mutant: Mutant) -> None:
        rank = mutant.sizes.rank
        mutant.change("kv_a_proj_with_mqa.weight", lambda w: rotary(rank, w, half_split(w[rank:])), (3,))

    def heads(mutant: Mutant) -> None:
        mutant.change("o_proj.weight", lambda w: w.unflatten(1, (4, -1))[:, [1, 0, 2, 3]].flatten(1), (2,))

    def naive_norm(mutant: Mutant) -> None:
        mutant.change("kv_a_layernorm.weight", torch.ones_like, (1,))

    prefix = "model.layers.{}.self_attn."
    assert blame(done, tmp_path / "1", softmax_ratio).startswith(prefix.format(0) + "q_proj")
    assert blame(done, tmp_path / "2", rows).startswith(prefix.format(3) + "kv_a_proj_with_mqa.weight (rope rows)")
    assert blame(done, tmp_path / "3", heads) == prefix.format(2) + "o_proj"
    assert blame(done, tmp_path / "4", naive_norm).startswith(prefix.format(1) + "kv_")
