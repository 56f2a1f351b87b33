"""Loading refuses what does not fit; the head is known to be one matrix product."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mla_convert.errors import InputRefused
from mla_convert.eval.loading import hidden_states, load_model, plain_head
from tests.conftest import PicoFactory
from tests.pico import PicoOptions, build_pico_model
from tests.tolerances import LOGITS_FLOAT32

IDS = torch.arange(3, 20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_runs_in_float32_and_its_logits_are_states_times_head(
    pico: PicoFactory, dtype: str, tied: bool
) -> None:
    model = load_model(pico("llama", dtype=dtype, tie_word_embeddings=tied))
    with torch.inference_mode():
        logits = model(input_ids=IDS[None]).logits[0]
    ours = hidden_states(model, IDS) @ plain_head(model, IDS).T

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert float((ours - logits).abs().max() / logits.abs().max()) < LOGITS_FLOAT32


def test_a_head_that_does_more_is_refused() -> None:
    model = build_pico_model("llama", PicoOptions())
    model.lm_head.bias = nn.Parameter(torch.ones(97))

    with pytest.raises(InputRefused, match="more than one matrix product"):
        plain_head(model, IDS)


def edited(source: Path, folder: Path, name: str) -> Path:
    """A copy whose tensor `name` is renamed, so that it is missing under its own name and left over."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.other.weight"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_missing_and_left_over_tensors_are_refused(pico: PicoFactory, tmp_path: Path) -> None:
    folder = edited(pico(), tmp_path / "edited", "model.layers.1.self_attn.q_proj.weight")

    with pytest.raises(InputRefused, match=r"2 places.*model\.layers\.1\.self_attn"):
        load_model(folder)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="transformers cannot load it"):
        load_model(tmp_path)


def test_weights_of_another_shape_are_refused(pico: PicoFactory, tmp_path: Path) -> None:
    folder = shutil.copytree(pico(), tmp_path / "edited")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:50].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(InputRefused):
        load_model(folder)
