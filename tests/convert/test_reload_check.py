"""The gate as users have it: a fresh process, stock transformers, nothing of the writer in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.reload_check import check_reload
from mla_convert.convert.reload_child import relative
from mla_convert.convert.run import convert
from mla_convert.errors import CheckFailed
from mla_convert.manifests.models import ReloadCheck
from mla_convert.manifests.verify import verify_folder
from mla_convert.tolerances import RELOAD_RELATIVE
from tests.conftest import PicoFactory
from tests.convert.conftest import Converted, ConvertedFactory
from tests.convert.support import read_json


@pytest.fixture(scope="module")
def lossy(converted: ConvertedFactory) -> Converted:
    return converted(source={"kv_heads": 2}, kv_lora_rank=24, qk_rope_head_dim=16, rope_policy="high")


def check(done: Converted, folder: Path, probe: Path) -> ReloadCheck:
    expected = load_file(done.probe / "expected.safetensors")
    scale = read_json(done.probe / "settings.json")["softmax_scale"]
    return check_reload(folder, probe, done.plan, scale, expected["ids"], expected["logits"])


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


def test_relative_errors_of_what_should_be_zero_are_absolute() -> None:
    zeros = torch.zeros(3)

    assert relative(zeros, zeros) == 0
    assert relative(zeros + 2, zeros) == pytest.approx(12**0.5)
    assert relative(zeros, zeros + 2) == 1
