from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mla_convert.assets.wikipedia import WikipediaSplits
from tests.tolerances import RECORDED_LOSS, RECORDED_SPECTRUM

FOLDER = Path(__file__).resolve().parent.parent / "data" / "tiny_trained"


@pytest.fixture(scope="module")
def training() -> Any:
    return json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


def test_shape_and_size() -> None:
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))

    shape = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    assert [config[name] for name in shape] == [4, 6, 2, 32, 192]
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == 2048
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "float32"
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8_000_000


def test_it_was_trained_on_enough_text(training: Any) -> None:
    recipe = training["recipe"]

    assert training["tokens_seen"] == recipe["steps"] * recipe["batch"] * recipe["sequence"] >= 5_000_000
    assert training["loss_curve"][-1]["step"] == recipe["steps"]
    assert training["train_text"]["sha256"] != training["heldout_text"]["sha256"]


def test_it_has_learned_more_than_word_frequencies(training: Any) -> None:
    assert training["heldout_loss"] < training["heldout_unigram_cross_entropy"] - 1.5
    assert training["final_train_loss"] < training["heldout_loss"]


def test_loss_on_held_out_text_is_the_recorded_one(training: Any, model: Any) -> None:
    sample = training["sample"]
    tokens = AutoTokenizer.from_pretrained(FOLDER).encode(sample["text"])
    ids = torch.tensor([tokens])

    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()

    assert len(tokens) == sample["tokens"]
    assert loss == pytest.approx(sample["loss"], rel=RECORDED_LOSS)
    assert abs(loss - training["heldout_loss"]) < 0.75


def test_recorded_spectra_are_those_of_the_weights(training: Any) -> None:
    weights = load_file(FOLDER / "model.safetensors")
    recorded = {(entry["layer"], entry["projection"]): entry["weight"] for entry in training["spectra"]}

    for layer in range(4):
        name = f"model.layers.{layer}.self_attn."
        key, value = weights[f"{name}k_proj.weight"], weights[f"{name}v_proj.weight"]
        for projection, matrix in (("k", key), ("v", value), ("kv", torch.cat([key, value]))):
            found = torch.linalg.svdvals(matrix.double()).tolist()
            assert found == pytest.approx(recorded[layer, projection], rel=RECORDED_SPECTRUM)


def test_keys_and_values_have_structure(training: Any) -> None:
    """More than half of the energy of every layer's activations lies in a quarter of the directions."""
    for entry in training["spectra"]:
        energies = [value**2 for value in entry["activation"]]
        assert sum(energies[: len(energies) // 4]) > 0.5 * sum(energies), entry["layer"]


def test_the_texts_are_still_the_same(training: Any, wikipedia: WikipediaSplits) -> None:
    assert training["train_text"]["sha256"] == wikipedia.calibration_facts.sha256
    assert training["heldout_text"]["sha256"] == wikipedia.heldout_facts.sha256
    assert training["sample"]["title"] in wikipedia.heldout.read_text(encoding="utf-8")
