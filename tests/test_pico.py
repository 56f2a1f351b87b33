"""The tiny models are what the other tests take them for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import PicoFactory
from tests.pico import FAMILIES, make_pico

TEXT = "Keys: [k], values?\n  Two  spaces."


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_options_give_the_same_bytes_and_another_seed_other_weights(tmp_path: Path, family: str) -> None:
    first = digests(make_pico(tmp_path / "a", family))
    second = digests(make_pico(tmp_path / "b", family))
    other = digests(make_pico(tmp_path / "c", family, seed=1))

    assert first == second
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sharded": True, "tie_word_embeddings": True},
        {"weight_format": "bin", "dtype": "float16"},
        {"weight_format": "bin", "sharded": True, "dtype": "bfloat16"},
    ],
    ids=["plain", "sharded-tied", "bin", "bin-sharded"],
)
def test_transformers_finds_exactly_the_tensors_it_wants(
    pico: PicoFactory, family: str, options: dict[str, object]
) -> None:
    folder = pico(family, **options)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)

    assert not any(report.values()), report
    assert str(model.dtype) == f"torch.{options.get('dtype', 'float32')}"
    weights = [path for path in folder.iterdir() if path.suffix in {".safetensors", ".bin"}]
    assert (len(weights) > 1) is bool(options.get("sharded"))
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied is bool(options.get("tie_word_embeddings"))


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_fixture_f_and_no_tensor_is_trivial(pico: PicoFactory, family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(pico(family))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (4 * 16, 48)
    assert shapes["model.layers.3.self_attn.k_proj.weight"] == (16, 48)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (64, 48)
    assert shapes["lm_head.weight"] == (97, 48)
    assert ("model.layers.0.self_attn.k_proj.bias" in shapes) is (family == "qwen2")
    for name, tensor in model.state_dict().items():
        assert tensor.std() > 0.15, name
        if name.endswith("norm.weight"):
            assert 0.5 <= tensor.min() < tensor.max() <= 1.5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_gives_one_token_a_character_and_gives_the_text_back(pico: PicoFactory, family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pico(family, chat_template=True))
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids

    assert len(ids) == len(TEXT)
    assert max(ids) < 97
    assert tokenizer.decode(ids) == TEXT
    assert "user: hi" in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_making_a_model_leaves_the_random_numbers_of_the_test_alone(tmp_path: Path) -> None:
    expected = torch.rand(3)
    torch.manual_seed(0)
    make_pico(tmp_path)

    assert torch.equal(torch.rand(3), expected)
