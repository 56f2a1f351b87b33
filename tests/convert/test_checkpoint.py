from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_convert.convert.checkpoint import open_source
from mla_convert.errors import InputRefused
from tests.conftest import PicoFactory
from tests.convert.support import edit_json
from tests.pico import FAMILIES, PicoOptions, build_pico_model, make_pico

State = dict[str, Tensor]
Edit = Callable[[State], None]


def edited(folder: Path, edit: Edit, **options: Any) -> Path:
    """A tiny model whose tensors have been tampered with."""
    make_pico(folder, **options)
    path = folder / "model.safetensors"
    state = load_file(path)
    edit(state)
    save_file(state, path, metadata={"format": "pt"})
    return folder


def refuse(folder: Path, match: str) -> InputRefused:
    with pytest.raises(InputRefused, match=match) as caught:
        open_source(str(folder))
    return caught.value


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_and_facts_of_a_source(pico: PicoFactory, family: str) -> None:
    source = open_source(str(pico(family, heads=6, kv_heads=2, head_dim=16, hidden_size=48)))

    assert source.family.name == family
    assert (source.shape.hidden_size, source.shape.num_heads) == (48, 6)
    assert (source.shape.num_kv_heads, source.shape.head_dim) == (2, 16)
    assert (source.shape.pairs, source.shape.heads_per_group) == (8, 3)
    assert source.shape.cached_numbers == 64
    assert [source.shape.useful_rank(rope) for rope in (0, 16, 32)] == [48, 48, 32]
    assert source.num_layers == 4
    assert source.tied is False
    assert source.has_bias is (family == "qwen2")
    assert source.attention_dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_read_in_their_order(pico: PicoFactory, family: str) -> None:
    """Every head of every projection, and each head's columns of the output projection, row by row."""
    options = {"heads": 6, "kv_heads": 2}
    state = build_pico_model(family, PicoOptions(**options)).state_dict()  # type: ignore[arg-type]
    source = open_source(str(pico(family, **options)))

    for layer in (0, 3):
        weights = source.layer_weights(layer)
        prefix = f"model.layers.{layer}.self_attn."
        for part, heads in (("q", 6), ("k", 2), ("v", 2)):
            read: Tensor = getattr(weights, part)
            bias: Tensor | None = getattr(weights, f"{part}_bias")
            assert read.shape == (heads, 16, 48)
            assert read.dtype == torch.float64
            assert (bias is None) is (family != "qwen2")
            for head in range(heads):
                for row in range(16):
                    assert torch.equal(read[head, row].float(), state[f"{prefix}{part}_proj.weight"][16 * head + row])
                    if bias is not None:
                        stored = state[f"{prefix}{part}_proj.bias"]
                        assert float(bias[head, row]) == float(stored[16 * head + row])
        assert weights.o.shape == (6, 48, 16)
        for head in range(6):
            for column in range(16):
                stored = state[f"{prefix}o_proj.weight"][:, 16 * head + column]
                assert torch.equal(weights.o[head, :, column].float(), stored)
        assert weights.o_bias is None
        assert weights.softmax_scale == 0.25


def test_llama_with_attention_bias_has_all_four(pico: PicoFactory) -> None:
    source = open_source(str(pico(config={"attention_bias": True})))
    weights = source.layer_weights(1)

    assert source.has_bias
    assert weights.o_bias is not None
    assert torch.equal(weights.o_bias.float(), source.tensor("model.layers.1.self_attn.o_proj.bias"))
    assert weights.q_bias is not None
    assert weights.has_bias


def test_the_head_size_is_derived_where_it_is_not_said(tmp_path: Path) -> None:
    folder = make_pico(tmp_path, heads=3, head_dim=16, hidden_size=48)
    edit_json(folder / "config.json", head_dim=None)

    assert open_source(str(folder)).shape.head_dim == 16


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.2.self_attn.k_proj.weight", "(16, 48)"),
        ("model.layers.0.input_layernorm.weight", "(48,)"),
        ("model.layers.3.mlp.down_proj.weight", "(48, 64)"),
        ("model.norm.weight", "(48,)"),
        ("lm_head.weight", "(97, 48)"),
        ("model.embed_tokens.weight", "(97, 48)"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, shape: str) -> None:
    def remove(state: State) -> None:
        del state[name]

    error = refuse(edited(tmp_path, remove), "missing")

    assert error.expected == f"{name} of shape {shape}"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.4.self_attn.q_proj.weight",
        "model.layers.0.self_attn.sinks",
        "model.layers.0.mlp.gate.weight",
        "score.weight",
    ],
)
def test_an_extra_tensor_is_named(tmp_path: Path, name: str) -> None:
    def add(state: State) -> None:
        state[name] = torch.zeros(3)

    error = refuse(edited(tmp_path, add), "does not have")

    assert error.found == name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "(64, 48)"),
        ("model.layers.1.self_attn.o_proj.weight", "(64, 48)"),
        ("model.norm.weight", "(49,)"),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path, name: str, found: str) -> None:
    def reshape(state: State) -> None:
        state[name] = torch.zeros(shape_of(found))

    error = refuse(edited(tmp_path, reshape), "wrong shape")

    assert (error.where, error.found) == (name, found)


def shape_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.strip("()").split(",") if part.strip())


def test_heads_that_were_expanded_without_saying_so_are_refused(tmp_path: Path) -> None:
    """Key heads repeated to 4 but `num_key_value_heads` left at 1: the weights do not fit the configuration."""

    def expand(state: State) -> None:
        for layer in range(4):
            for part in ("k_proj", "v_proj"):
                name = f"model.layers.{layer}.self_attn.{part}.weight"
                state[name] = state[name].repeat(4, 1)

    error = refuse(edited(tmp_path, expand), "wrong shape")

    assert error.expected == "(16, 48) (key_value × hidden)"
    assert error.found == "(64, 48)"


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    def quantise(state: State) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        state[name] = state[name].to(torch.int8)

    assert refuse(edited(tmp_path, quantise), "not floating point").found == "torch.int8"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_when_it_is_read(tmp_path: Path, value: float) -> None:
    def poison(state: State) -> None:
        state["model.layers.2.self_attn.v_proj.weight"][3, 5] = value

    source = open_source(str(edited(tmp_path, poison)))

    source.layer_weights(1)
    with pytest.raises(InputRefused, match="not finite") as caught:
        source.layer_weights(2)
    assert caught.value.where == "model.layers.2.self_attn.v_proj.weight"


def test_a_repeated_head_is_accepted_if_it_is_the_embedding(tmp_path: Path) -> None:
    def repeat(state: State) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()

    assert open_source(str(edited(tmp_path, repeat, tie_word_embeddings=True))).tied


def test_a_repeated_head_that_differs_is_refused(tmp_path: Path) -> None:
    def repeat(state: State) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        state["lm_head.weight"][5, 7] += 1e-3

    refuse(edited(tmp_path, repeat, tie_word_embeddings=True), "not the embedding")


def test_rotary_buffers_of_old_exports_are_ignored(tmp_path: Path) -> None:
    def add(state: State) -> None:
        for layer in range(4):
            state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    source = open_source(str(edited(tmp_path, add)))

    assert source.rope.frequencies[1] < 1  # from the configuration, not from the buffer


def test_key_heads_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    folder = make_pico(tmp_path)
    edit_json(folder / "config.json", num_key_value_heads=3)

    assert refuse(folder, "multiple").found == "3"


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_an_unreadable_configuration_is_refused(tmp_path: Path, text: str) -> None:
    folder = make_pico(tmp_path)
    (folder / "config.json").write_text(text)

    assert "config.json" in str(refuse(folder, "JSON").where)


def test_a_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = make_pico(tmp_path)
    edit_json(folder / "config.json", num_hidden_layers=5)

    assert "model.layers.4" in str(refuse(folder, "missing").expected)


@pytest.mark.parametrize("changes", [{"hidden_size": "wide"}, {"head_dim": 15}, {"num_hidden_layers": True}])
def test_a_configuration_that_transformers_refuses_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = make_pico(tmp_path)
    edit_json(folder / "config.json", **changes)

    with pytest.raises(InputRefused) as caught:
        open_source(str(folder))
    assert "config.json" in str(caught.value.where)
