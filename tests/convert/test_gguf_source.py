from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from mla_convert.convert import gguf_source
from mla_convert.convert.gguf_source import materialise_gguf, read_provenance
from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import sha256_file
from tests.pico import PicoOptions, build_pico_model
from tests.tolerances import DEQUANTISED_LOGITS

# A small byte-level vocabulary whose merges with digits apply or not, depending on the splitting.
SPECIAL = ["<unk>", "<s>", "</s>"]
PLAIN = [chr(code) for code in range(33, 127)] + ["Ġ"]
MERGES = ["Ġ 1", "1 2", "a b"]
TOKENS = [*SPECIAL, *PLAIN, *(merge.replace(" ", "") for merge in MERGES)]
OPTIONS = PicoOptions(num_layers=2, kv_heads=2, vocab_size=len(TOKENS), hidden_size=64, rms_norm_eps=1e-5)
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
Edit = Callable[[GGUFWriter], None]


def gguf_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of the half-split rope layout in the order that llama.cpp stores."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str | None = "smollm",
    quantised: GGMLQuantizationType | None = None,
    leave_out: str = "",
    edit: Edit | None = None,
) -> dict[str, torch.Tensor]:
    """Write a random two-layer model as llama.cpp would; returns its weights in Hugging Face's layout."""
    state = build_pico_model("llama", OPTIONS).state_dict()
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(OPTIONS.num_layers)
    writer.add_context_length(OPTIONS.max_position_embeddings)
    writer.add_embedding_length(OPTIONS.hidden_size)
    writer.add_feed_forward_length(OPTIONS.intermediate_size)
    writer.add_head_count(OPTIONS.heads)
    writer.add_head_count_kv(OPTIONS.kv_heads)
    writer.add_rope_dimension_count(OPTIONS.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(OPTIONS.rms_norm_eps)
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if edit is not None:
        edit(writer)
    for name, tensor in state.items():
        if leave_out and leave_out in name:
            continue
        stored = tensor.numpy().copy()
        heads = {"q_proj": OPTIONS.heads, "k_proj": OPTIONS.kv_heads}.get(name.split(".")[-2])
        if heads is not None:
            stored = interleaved(stored, heads)
        if quantised is not None and stored.ndim == 2:
            packed = quantize(stored, quantised)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quantised)
            state[name] = torch.from_numpy(dequantize(packed, quantised).copy())
            if heads is not None:
                state[name] = state[name].reshape(heads, -1, 2, stored.shape[1]).swapaxes(1, 2).reshape(stored.shape)
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_the_folder_computes_what_the_source_computes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    source = build_pico_model("llama", OPTIONS)

    folder = materialise_gguf(path, tmp_path / "cache")

    assert folder == tmp_path / "cache" / "gguf" / sha256_file(path)
    ids = torch.randint(len(TOKENS), (2, 40))
    with torch.no_grad():
        expected, found = source(ids).logits, load(folder)(ids).logits
    assert (found - expected).abs().max() <= DEQUANTISED_LOGITS * expected.abs().max()


def test_quantised_weights_are_the_numbers_they_stand_for(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    expected = write_gguf(path, quantised=GGMLQuantizationType.Q4_1)

    state = load(materialise_gguf(path, tmp_path / "cache")).state_dict()

    assert set(state) == set(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_config_has_the_values_of_the_file_and_no_quantisation(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)

    config = json.loads((materialise_gguf(path, tmp_path / "cache") / "config.json").read_text())

    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config["head_dim"] == OPTIONS.head_dim
    assert config["num_key_value_heads"] == OPTIONS.kv_heads
    assert config["tie_word_embeddings"] is False
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["dtype"] == "float32"


def test_a_file_without_an_output_matrix_is_tied(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, leave_out="lm_head")

    model = load(materialise_gguf(path, tmp_path / "cache"))

    assert model.config.tie_word_embeddings is True
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("smollm", ["ab", "Ġ", "1", "2"]), ("gpt-2", ["ab", "Ġ1", "2"]), ("llama-bpe", ["ab", "Ġ", "12"])],
)
def test_tokenizer_splits_as_the_file_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, pre=pre)

    tokenizer = AutoTokenizer.from_pretrained(materialise_gguf(path, tmp_path / "cache"))

    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab 12")) == pieces
    assert tokenizer.decode(tokenizer.encode("ab 12")) == "ab 12"
    assert tokenizer.encode("</s>") == [2]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer.model_max_length == OPTIONS.max_position_embeddings


def test_no_token_lies_outside_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)

    tokenizer = AutoTokenizer.from_pretrained(materialise_gguf(path, tmp_path / "cache"))

    assert len(tokenizer) == len(TOKENS)
    assert max(tokenizer.encode("a <|endoftext|> b")) < len(TOKENS)


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_a_beginning_token_is_added_where_the_file_says_so(tmp_path: Path, pre: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, pre=pre, edit=lambda writer: writer.add_add_bos_token(True))

    tokenizer = AutoTokenizer.from_pretrained(materialise_gguf(path, tmp_path / "cache"))

    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab")) == ["<s>", "ab"]


def test_files_beside_the_gguf_are_not_read(tmp_path: Path, pico: Callable[..., Path]) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pico("llama") / name, tmp_path / name)

    folder = materialise_gguf(path, tmp_path / "cache")

    assert len(AutoTokenizer.from_pretrained(folder)) == len(TOKENS)
    assert load(folder).config.num_hidden_layers == OPTIONS.num_layers


def test_provenance_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    folder = materialise_gguf(path, tmp_path / "cache")

    provenance = read_provenance(folder)

    assert provenance is not None
    assert provenance.file_name == "m.gguf"
    assert provenance.sha256 == sha256_file(path)
    assert provenance.bytes == path.stat().st_size
    assert (provenance.architecture, provenance.file_type) == ("llama", "ALL_F32")
    assert provenance.tensor_types == {"F32": 2 * 9 + 3}
    assert read_provenance(tmp_path) is None


def test_a_second_call_does_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    folder = materialise_gguf(path, tmp_path / "cache")
    monkeypatch.delattr(gguf_source, "_write_model")
    renamed = path.rename(tmp_path / "other-name.gguf")

    assert materialise_gguf(renamed, tmp_path / "cache") == folder


def test_an_interrupted_run_leaves_nothing_that_looks_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_source, "_write_provenance", killed)
        with pytest.raises(KeyboardInterrupt):
            materialise_gguf(path, tmp_path / "cache")

    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
    assert (materialise_gguf(path, tmp_path / "cache") / "config.json").is_file()


def test_a_faster_run_beside_this_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    target = tmp_path / "cache" / "gguf" / sha256_file(path)
    original = gguf_source._write_provenance

    def overtaken(header: Any, digest: str, folder: Path) -> None:
        original(header, digest, folder)
        shutil.copytree(folder, target)

    monkeypatch.setattr(gguf_source, "_write_provenance", overtaken)

    assert materialise_gguf(path, tmp_path / "cache") == target
    assert [entry.name for entry in target.parent.iterdir()] == [target.name]


def refuse(path: Path, tmp_path: Path) -> InputRefused:
    with pytest.raises(InputRefused) as caught:
        materialise_gguf(path, tmp_path / "cache")
    cached = tmp_path / "cache" / "gguf"
    assert not cached.exists() or list(cached.iterdir()) == []
    assert caught.value.remedy
    return caught.value


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 a zip file")

    error = refuse(path, tmp_path)

    assert "not a GGUF file" in str(error)
    assert "b'GGUF'" in str(error.expected)
    assert "PK" in str(error.found)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "no such file" in str(refuse(tmp_path / "absent.gguf", tmp_path))


@pytest.mark.parametrize("kept", [4, 20, 300, 3_000, -1], ids=lambda kept: f"{kept} bytes")
def test_a_file_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:kept])

    assert "cut short or damaged" in str(refuse(path, tmp_path))


def test_an_architecture_that_transformers_does_not_load_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, architecture="plamo")

    assert "plamo" in str(refuse(path, tmp_path))


def test_rope_scaling_is_refused_in_both_forms(tmp_path: Path) -> None:
    stated, table = tmp_path / "stated.gguf", tmp_path / "table.gguf"
    write_gguf(stated, edit=lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"))
    factors = np.linspace(1, 8, OPTIONS.head_dim // 2, dtype=np.float32)
    write_gguf(table, edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors))

    assert "yarn" in str(refuse(stated, tmp_path).found)
    assert "rope_freqs.weight" in str(refuse(table, tmp_path).found)


def test_a_tensor_without_a_place_in_the_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    bias = np.ones(OPTIONS.heads * OPTIONS.head_dim, dtype=np.float32)
    write_gguf(path, edit=lambda writer: writer.add_tensor("blk.0.attn_q.bias", bias))

    assert "do not correspond" in str(refuse(path, tmp_path))


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, leave_out="layers.1.mlp.up_proj")

    assert "up_proj" in str(refuse(path, tmp_path).found)


@pytest.mark.parametrize("pre", ["made-up", None])
def test_an_unknown_pre_tokeniser_is_refused(tmp_path: Path, pre: str | None) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, pre=pre)

    error = refuse(path, tmp_path)

    assert repr(pre) in str(error.found)
    assert "smollm" in str(error.expected)
