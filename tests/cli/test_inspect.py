"""`mla-convert inspect` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mla_convert.cli.main import run
from tests.conftest import PicoFactory
from tests.pico import make_pico

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}), encoding="utf-8")


def drop_tensor(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


def test_json_is_one_object(pico: PicoFactory, capfd: pytest.CaptureFixture[str]) -> None:
    folder = pico("llama", kv_heads=2)

    assert run(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["location"] == str(folder)
    assert found["cache"] == {"numbers_per_token_per_layer": 64, "bytes_per_token": 1024, "dtype": "float32"}
    assert {plan["profile"] for plan in found["plans"]} == {"engine", "hf"}
    assert found["rope_widths"]["high"] == {"lowest": 4, "highest": 32, "step": 4}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"heads": 9, "kv_heads": 3, "hidden_size": 144, "dtype": "float16"}),
        ("llama", {"kv_heads": 2, "rope_parameters": LLAMA3}),
        ("qwen2", {"kv_heads": 2}),
    ],
)
def test_the_tables_fit_a_hundred_columns(
    pico: PicoFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with (tmp_path / "out.txt").open("w+", encoding="utf-8") as file:
        monkeypatch.setattr("sys.stdout", file)
        assert run(["inspect", str(pico(family, **options))]) == 0
        file.seek(0)
        lines = file.read().splitlines()

    assert max(map(len, lines)) <= 100
    assert all("…" not in line for line in lines)


def test_the_tables_hold_the_figures(pico: PicoFactory, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(pico("llama", kv_heads=2, rope_parameters=LLAMA3))]) == 0

    text = capfd.readouterr().out
    for expected in (
        "llama (LlamaForCausalLM)",
        "llama3, theta 10000, the first 1 of 8 pairs unscaled",
        "64 numbers per token and layer, 1,024 bytes per token (float32)",
        "hf, lossless",
        "min(48, 64 - qk_rope_head_dim)",
        "2 to 2",
        "not available yet",
    ):
        assert expected in text
    rows = [line.split() for line in text.splitlines()]
    assert ["hf", "24", "8", "32", "512", "50.0%"] in rows


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: change_config(folder, model_type="gemma2"), "'gemma2'"),
        (lambda folder: change_config(folder, model_type="gpt_neox", architectures=["X"]), "'gpt_neox'"),
        (lambda folder: change_config(folder, attn_logit_softcapping=50.0), "attention soft-cap"),
        (lambda folder: change_config(folder, sliding_window=8), "sliding window"),
        (lambda folder: drop_tensor(folder, "model.layers.2.self_attn.k_proj.weight"), "layers.2.self_attn.k_proj"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    ],
)
def test_what_stops_a_source_is_named_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], spoil: Callable[[Path], object], named: str
) -> None:
    folder = make_pico(tmp_path / "source", tokenizer=False)
    spoil(folder)
    capfd.readouterr()

    assert run(["inspect", str(folder), "--json"]) == 4
    printed = capfd.readouterr()
    assert json.loads(printed.out)["error"]["kind"] == "input-refused"
    (line,) = [line for line in printed.err.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert named in line


def test_other_faults_have_their_exit_codes(pico: PicoFactory, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect"]) == 2
    assert run(["inspect", str(pico()), "--revision", "main"]) == 2
    assert run(["inspect", "./nowhere"]) == 4
    # Offline, as all tests run, and in no cache.
    assert run(["inspect", "nobody/no-such-model"]) == 5
    assert "offline mode is on" in capfd.readouterr().err


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "cache"))
    folder = make_pico(tmp_path / "source", tokenizer=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    assert run(["inspect", str(folder)]) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_revision_of_the_hubs_cache_is_found(
    pico: PicoFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--name" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(pico(), target_is_directory=True)
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit, encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    capfd.readouterr()

    for arguments in ([], ["--revision", "main"], ["--revision", commit]):
        assert run(["inspect", "org/name", *arguments, "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert (found["kind"], found["revision"]) == ("hub", commit)
    assert run(["inspect", "org/name", "--revision", "other"]) == 5
