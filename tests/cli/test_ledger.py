"""`mla-convert ledger` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mla_convert.cli.ledger import SIZES, read_shape
from mla_convert.cli.main import run
from mla_convert.errors import InputRefused
from tests.conftest import PicoFactory

CONFIG = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "dtype": "float32",
}
KEYS = {
    "attention_linear_parameters",
    "projection_flops",
    "cache_bytes_per_token_per_layer",
    "expanded_to_latent_ratio",
    "arithmetic_intensity",
    "crossover_tokens",
    "ridge",
}


def answer(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run(["ledger", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_the_preset(capfd: pytest.CaptureFixture[str]) -> None:
    found = answer(capfd, "deepseek-v2", "--device", "h200", "--batch", "2")

    assert set(found) >= KEYS
    assert found["attention_linear_parameters"] == 149_225_472
    assert found["projection_flops"] == 596_901_888
    assert found["ridge"] == pytest.approx(206.1, abs=0.1)
    assert "NVIDIA" in found["device_source"]


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_configuration_and_its_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str], as_folder: bool) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")

    found = answer(capfd, str(tmp_path if as_folder else path), "--history", "10")

    assert found["workload"] == {"batch": 1, "queries": 1, "history": 10, "dtype": "float32"}
    assert found["cache_bytes_per_token_per_layer"] == 28 * 4
    assert found["cache_bytes"] == 28 * 4 * 10 * 3
    assert found["shape"]["q_lora_rank"] is None
    assert found["ridge"] is None


def test_a_table_for_a_reader(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", "deepseek-v2", "--device", "h800"]) == 0
    shown = capfd.readouterr().out
    for text in ("149,225,472", "1,152 bytes", "71.1 times", "656 bytes", "640.00 MiB", "241.8", "258.2", "18.75 GiB"):
        assert text in shown


def test_a_source_is_refused(pico: PicoFactory, capfd: pytest.CaptureFixture[str]) -> None:
    found = answer(capfd, str(pico("llama", kv_heads=2)), code=4)["error"]

    assert "llama with 2 key/value heads" in found["found"]
    assert "Convert it first" in found["remedy"]


@pytest.mark.parametrize("text", ["", "[]", '"text"', "{", json.dumps({**CONFIG, "v_head_dim": "wide"})])
def test_a_broken_configuration_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")

    assert answer(capfd, str(path), code=4)["error"]["kind"] == "input-refused"


def test_a_name_that_is_nothing_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "deepseek-v2" in answer(capfd, "deepseek-v9", code=4)["error"]["expected"]
    assert "config.json" in answer(capfd, str(tmp_path), code=4)["error"]["expected"]


def test_an_unknown_device_is_refused_with_the_known_ones(capfd: pytest.CaptureFixture[str]) -> None:
    assert "h200" in answer(capfd, "deepseek-v2", "--device", "abacus", code=2)["error"]["expected"]


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, '{"kv_lora_rank": ' + "9" * 5000 + "}", '{"kv_lora_rank": 1' + "0" * 400 + "}"],
    ids=["nested", "digits", "huge"],
)
def test_a_configuration_that_overwhelms_the_reader_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(InputRefused):
        read_shape(str(path))


@pytest.mark.parametrize("name", ["~nosuchuser/x", "n" * 5000, "a\0b"])
def test_a_name_that_is_no_path_is_refused(name: str) -> None:
    with pytest.raises(InputRefused):
        read_shape(name)


def test_a_folder_for_a_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputRefused, match="cannot be read"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"dtype": "torch.float32"}, "float32"), ({"dtype": None, "torch_dtype": "float16"}, "float16"), ({}, "bfloat16")],
)
def test_the_dtype_is_the_configurations(tmp_path: Path, fields: dict[str, object], expected: str) -> None:
    sizes = dict.fromkeys([*SIZES.values()], 8)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**sizes, **fields}))
    assert read_shape(str(path))[1] == expected
    path.write_text(json.dumps({**sizes, "dtype": "float8_e4m3fn"}))
    with pytest.raises(InputRefused, match="Give --dtype"):
        read_shape(str(path))
    assert read_shape(str(path), "float16")[1] == "float16"
