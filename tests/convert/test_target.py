"""Which tensor goes where, in which dtype, and the files copied beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_convert.convert import reload_check, reload_child
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert
from mla_convert.convert.target import cast
from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import sha256_file
from tests.conftest import PicoFactory
from tests.convert.support import read_json
from tests.pico import make_pico

LOSSLESS = ConvertOptions(lossless=True)


@pytest.fixture(autouse=True)
def _check_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload_check, "_run_child", reload_child.compare)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_dtype_is_kept_tensor_by_tensor(tmp_path: Path) -> None:
    """bf16 weights with float32 norms: each goes out as it came in."""
    source = make_pico(tmp_path / "source", dtype="bfloat16")
    path = source / "model.safetensors"
    state = {name: value.float() if "norm" in name else value for name, value in load_file(path).items()}
    save_file(state, path, metadata={"format": "pt"})

    done = convert(str(source), tmp_path / "out", LOSSLESS, command=["test"])

    written = load_file(done.folder / "model.safetensors")
    assert written["model.layers.1.input_layernorm.weight"].dtype == torch.float32
    assert written["model.layers.1.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert written["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"].dtype == torch.bfloat16
    assert torch.equal(written["model.layers.1.input_layernorm.weight"], state["model.layers.1.input_layernorm.weight"])
    assert done.manifest.source.dtype_counts == {"bfloat16": 30, "float32": 9}


def test_a_chosen_dtype_is_taken_for_all(pico: PicoFactory, tmp_path: Path) -> None:
    options = ConvertOptions(lossless=True, dtype="bfloat16")
    done = convert(str(pico()), tmp_path / "out", options, command=["test"])

    assert {value.dtype for value in load_file(done.folder / "model.safetensors").values()} == {torch.bfloat16}
    assert read_json(done.folder / "config.json")["dtype"] == "bfloat16"


SIDECARS: dict[str, bytes] = {
    "chat_template.jinja": b"{{ messages }}\r\n",
    "special_tokens_map.json": b'{"eos_token": "</s>"}',
    "added_tokens.json": b'{"<extra>":  96}\n\n',
    "merges.txt": "#version: 0.2\nĠ t\n".encode(),
    "vocab.json": b"{}",
    "tokenizer.model": bytes(range(256)),
    "LICENSE": b"Licence text\n",
    "NOTICE.txt": b"Notice\r\n",
    "USE_POLICY.md": b"Policy",
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
}


def test_sidecars_are_copied_byte_for_byte(tmp_path: Path) -> None:
    source = make_pico(tmp_path / "source", chat_template=True)
    (source / "additional_chat_templates").mkdir()
    for name, content in SIDECARS.items():
        (source / name).write_bytes(content)
    (source / "training_args.bin").write_bytes(b"not ours")
    (source / "README.md").write_text("of the source")

    done = convert(str(source), tmp_path / "out", LOSSLESS, command=["test"])

    expected = {*SIDECARS, "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    recorded = {sidecar.path: sidecar.sha256 for sidecar in done.manifest.outputs.sidecars}
    assert set(recorded) == expected
    for name in expected:
        assert (done.folder / name).read_bytes() == (source / name).read_bytes()
        assert recorded[name] == sha256_file(source / name)
    assert not (done.folder / "training_args.bin").exists()
    assert not (done.folder / "README.md").exists()


def test_a_value_that_overflows_is_refused_by_name(tmp_path: Path) -> None:
    source = make_pico(tmp_path / "source")
    path = source / "model.safetensors"
    state = load_file(path)
    state["model.layers.1.mlp.up_proj.weight"][2, 3] = 70_000.0
    save_file(state, path, metadata={"format": "pt"})

    with pytest.raises(InputRefused, match="does not fit float16") as caught:
        convert(str(source), tmp_path / "out", ConvertOptions(lossless=True, dtype="float16"))

    assert caught.value.where == "model.layers.1.mlp.up_proj.weight"
    assert caught.value.found == "70000"
    assert names(tmp_path) == ["source"]


def test_values_are_rounded_once_to_nearest() -> None:
    # 1 + 2^-8 + 2^-20 lies above the middle of two bf16 numbers; through float16 first it would round down to even.
    value = torch.tensor([1 + 2.0**-8 + 2.0**-20], dtype=torch.float64)

    assert float(cast(value, torch.bfloat16, "x")) == 1 + 2.0**-7
