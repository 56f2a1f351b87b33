"""The gate as users have it: a fresh process, stock transformers, nothing of the writer in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mla_convert.convert import reload_check, reload_child
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.reload_check import check_reload
from mla_convert.convert.reload_child import relative
from mla_convert.convert.run import convert
from mla_convert.convert.states import MEMORY_BUDGET_BYTES
from mla_convert.errors import CheckFailed
from mla_convert.manifests.models import ReloadCheck
from mla_convert.manifests.verify import verify_folder
from mla_convert.tolerances import RELOAD_RELATIVE
from tests.conftest import PicoFactory
from tests.convert.conftest import Converted, ConvertedFactory
from tests.convert.mutants import Mutant, damaged
from tests.convert.support import read_json


@pytest.fixture(scope="module")
def lossy(converted: ConvertedFactory) -> Converted:
    return converted(source={"kv_heads": 2}, kv_lora_rank=24, qk_rope_head_dim=16, rope_policy="high")


def check(done: Converted, folder: Path, probe: Path, whole_model_bytes: int = MEMORY_BUDGET_BYTES) -> ReloadCheck:
    expected = load_file(done.probe / "expected.safetensors")
    scale = read_json(done.probe / "settings.json")["softmax_scale"]
    return check_reload(folder, probe, done.plan, scale, expected["ids"], expected["logits"], whole_model_bytes)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload_check, "_run_child", reload_child.compare)


@pytest.fixture
def probe(lossy: Converted, tmp_path: Path) -> Path:
    """A copy: the check writes what it expects beside the stages."""
    return shutil.copytree(lossy.probe, tmp_path / "probe")


def test_a_conversion_with_the_real_gate(pico: PicoFactory, tmp_path: Path) -> None:
    done = convert(str(pico(kv_heads=2)), tmp_path / "out", ConvertOptions(lossless=True))

    gate = done.manifest.reload_check
    assert gate.kind == "lossless-vs-source"
    assert gate.passed
    assert gate.probe_tokens == 80
    assert gate.tolerance == RELOAD_RELATIVE["float32"]
    assert 0 < gate.relative_error <= 1e-4
    assert gate.relative_error == gate.max_abs_logit_error / gate.max_abs_logit
    assert len(gate.layer_errors) == 4
    assert gate.whole_model
    assert verify_folder(done.folder, pico(kv_heads=2)).ok


def test_a_lossy_conversion_is_held_to_the_reference(lossy: Converted, probe: Path) -> None:
    gate = check(lossy, lossy.folder, probe)

    assert gate.kind == "lossy-vs-reference"
    assert gate == lossy.manifest.reload_check


def test_a_folder_that_does_not_load_is_a_failed_check(lossy: Converted, probe: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(lossy.folder, tmp_path / "copy")
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)

    with pytest.raises(CheckFailed, match="cannot load") as caught:
        check(lossy, folder, probe)
    assert str(folder) in str(caught.value.where)
    assert caught.value.found


def test_not_a_number_is_no_small_difference(lossy: Converted, probe: Path, tmp_path: Path) -> None:
    """Comparisons with NaN are false both ways: the check must be written so that this one fails."""
    folder = shutil.copytree(lossy.folder, tmp_path / "copy")
    config = read_json(folder / "config.json")
    config["rope_parameters"]["short_factor"] = config["rope_parameters"]["long_factor"] = [1e-300] * 8
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckFailed) as caught:
        check(lossy, folder, probe)
    assert "nan" in str(caught.value.found)


@pytest.mark.usefixtures("in_this_process")
def test_a_model_beyond_the_budget_is_checked_layer_by_layer_alone(
    lossy: Converted, probe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_arguments: object) -> None:
        raise AssertionError("the whole model was loaded")

    held: list[set[str]] = []

    def watched(layer: Any, *arguments: Any) -> Any:
        model = written[0].model
        held.append({n.split(".layers.")[-1].split(".")[0] for n, p in model.named_parameters() if not p.is_meta})
        return original(layer, *arguments)

    def opened(folder: Path) -> Any:
        written.append(open_written(folder))
        return written[0]

    written: list[Any] = []
    original, open_written = reload_child._run_with_stages, reload_child.WrittenCheckpoint.open
    monkeypatch.setattr(reload_child, "_load_whole", loaded)
    monkeypatch.setattr(reload_child, "_run_with_stages", watched)
    monkeypatch.setattr(reload_child.WrittenCheckpoint, "open", opened)
    parameters = sum(value.numel() for value in load_file(lossy.folder / "model.safetensors").values())

    gate = check(lossy, lossy.folder, probe, 4 * parameters - 1)

    assert not gate.whole_model
    assert held == [{"0"}, {"1"}, {"2"}, {"3"}]
    assert gate.layer_errors == lossy.manifest.reload_check.layer_errors
    assert 0 < gate.relative_error <= lossy.manifest.reload_check.relative_error
    with pytest.raises(AssertionError, match="the whole model"):
        check(lossy, lossy.folder, probe, 4 * parameters)


@pytest.mark.usefixtures("in_this_process")
def test_what_only_the_whole_model_gets_wrong_is_caught(
    lossy: Converted, probe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(folder: Path) -> Any:
        model, problems = original(folder)
        model.lm_head.weight.data *= 1.01
        return model, problems

    original = reload_child._load_whole
    monkeypatch.setattr(reload_child, "_load_whole", spoiled)

    with pytest.raises(CheckFailed) as caught:
        check(lossy, lossy.folder, probe)
    assert caught.value.where == "logits"
    assert check(lossy, lossy.folder, probe, 0).passed


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("whole", [0, MEMORY_BUDGET_BYTES], ids=["by layer", "whole"])
def test_names_and_shapes_are_those_of_the_class_and_no_others(
    converted: ConvertedFactory, tmp_path: Path, whole: int
) -> None:
    def extra(mutant: Mutant) -> None:
        # transformers skips this one without a word: layer 61 of DeepSeek-V3 itself predicts further tokens.
        mutant.state["model.layers.61.self_attn.o_proj.weight"] = torch.ones(1)

    def head(mutant: Mutant) -> None:
        mutant.state["lm_head.weight"] = mutant.state["model.embed_tokens.weight"].clone()

    def missing(mutant: Mutant) -> None:
        del mutant.state["model.norm.weight"]

    def shape(mutant: Mutant) -> None:
        mutant.change("o_proj.weight", lambda weight: weight[:, :-1], layers=(2,))

    damages = {
        "unexpected keys: model.layers.61.self_attn.o_proj.weight": extra,
        "unexpected keys: lm_head.weight": head,
        "missing keys: model.norm.weight": missing,
        "mismatched keys: model.layers.2.self_attn.o_proj.weight": shape,
    }
    done = converted(source={"tie_word_embeddings": True}, lossless=True, profile="hf")
    for number, (named, damage) in enumerate(damages.items()):
        folder = damaged(done, tmp_path / str(number), damage)
        with pytest.raises(CheckFailed) as caught:
            check(done, folder, shutil.copytree(done.probe, tmp_path / f"probe{number}"), whole)
        assert caught.value.where == named


def test_relative_errors_of_what_should_be_zero_are_absolute() -> None:
    zeros = torch.zeros(3)

    assert relative(zeros, zeros) == 0
    assert relative(zeros + 2, zeros) == pytest.approx(12**0.5)
    assert relative(zeros, zeros + 2) == 1
