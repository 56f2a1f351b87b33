"""What decides whether measured statistics may be used again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_convert.cache_dir import cache_root
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert
from mla_convert.errors import EnvironmentFault
from tests.convert.support import edit_json
from tests.pico import make_pico


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConvertOptions:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    return ConvertOptions(
        kv_lora_rank=16, qk_rope_head_dim=8, calibration=(str(text),), calibration_tokens=128, calibration_window=32
    )


def measured() -> list[Path]:
    return sorted((cache_root() / "statistics").iterdir())


def test_another_configuration_of_the_same_weights_is_measured_anew(tmp_path: Path, options: ConvertOptions) -> None:
    first = make_pico(tmp_path / "first")
    second = shutil.copytree(first, tmp_path / "second")
    edit_json(second / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})

    for source in (first, second):
        convert(str(source), tmp_path / f"{source.name}-out", options)
    assert len(measured()) == 2
    alone = tmp_path / "second-alone"
    shutil.rmtree(cache_root())
    convert(str(second), alone, options)
    again, shared = (load_file(folder / "model.safetensors") for folder in (alone, tmp_path / "second-out"))
    assert all(torch.equal(again[name], shared[name]) for name in again)


def test_a_missing_layer_is_measured_again_and_a_damaged_one_is_named(tmp_path: Path, options: ConvertOptions) -> None:
    source = str(make_pico(tmp_path / "source"))
    convert(source, tmp_path / "one", options)
    (folder,) = measured()
    layer = folder / "layer_0001.safetensors"
    layer.unlink()
    convert(source, tmp_path / "two", options)
    assert layer.is_file()

    layer.write_bytes(b"damaged")
    with pytest.raises(EnvironmentFault, match="damaged statistics") as caught:
        convert(source, tmp_path / "three", options)
    assert str(folder) == caught.value.where
    assert not (tmp_path / "three").exists()


@pytest.mark.parametrize("part", ["v_proj", "o_proj"])
def test_a_layer_that_adds_nothing_converts(tmp_path: Path, options: ConvertOptions, part: str) -> None:
    """Block-expanded models start with output projections of zero: no error there costs anything."""

    def silence(name: str, value: torch.Tensor) -> torch.Tensor:
        return value * 0 if name == f"model.layers.1.self_attn.{part}.weight" else value

    source = make_pico(tmp_path / "source", kv_heads=2)
    path = source / "model.safetensors"
    save_file({name: silence(name, value) for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    done = convert(str(source), tmp_path / "out", options)
    assert done.manifest.reload_check.passed
