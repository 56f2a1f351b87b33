"""`mla-convert eval` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mla_convert.cli.main import run
from tests.conftest import PicoFactory
from tests.eval.helpers import LOSSY, EvalPair, open_pair

SIZES = ("--max-tokens", "96", "--seq-len", "24")
Evaluate = Callable[..., int]


@pytest.fixture(scope="module")
def pair(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory) -> EvalPair:
    """A tiny conversion. Read only."""
    return open_pair(pico("llama", kv_heads=2), tmp_path_factory.mktemp("pair"), LOSSY)


@pytest.fixture
def evaluate(pair: EvalPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """`evaluate("--json")`: the exit code of that command line."""
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    arguments = ["eval", str(pair.target), "--source", pair.source_folder, "--text", str(pair.text)]
    return lambda *more: run([*arguments, *SIZES, *more])


def test_json_is_the_published_object(evaluate: Evaluate, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate("--json", "--stride", "12", "--seed", "5") == 0

    found = json.loads(capfd.readouterr().out)
    assert found["target"]["perplexity"] > 1
    assert found["kl"] > 0
    assert found["cache_bytes_per_token"]["target"] == 4 * 36 * 4
    assert len(found["text"]["sha256"]) == 64
    assert (found["text"]["tokens"], found["seq_len"], found["stride"], found["seed"]) == (96, 24, 12, 5)


def test_the_table_fits_a_hundred_columns_and_holds_the_figures(
    evaluate: Evaluate, pair: EvalPair, capfd: pytest.CaptureFixture[str]
) -> None:
    assert evaluate() == 0

    lines = capfd.readouterr().out.splitlines()
    table = [line for line in lines if not line.startswith("text")]
    assert max(map(len, table)) <= 100
    text = "\n".join(lines)
    for expected in ("perplexity", "KL(source ‖ target)", "top-1 agreement", "1,024", "576", "56.2%", "96 of 401"):
        assert expected in text
    assert str(pair.text) in text


def test_a_single_window_is_printed_without_intervals(evaluate: Evaluate, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate("--max-tokens", "24") == 0
    assert "[" not in capfd.readouterr().out


def test_refusals_have_their_exit_codes(evaluate: Evaluate, pair: EvalPair, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate("--text", "nowhere.txt") == 4
    assert evaluate("--stride", "25") == 2
    assert evaluate("--seq-len", "1") == 2
    assert run(["eval", str(pair.target), "--source", pair.source_folder]) == 2
    assert run(["eval", str(pair.target), "--text", str(pair.text)]) == 2
    assert "no such text" in capfd.readouterr().err


def test_allowed_overlap_is_warned_of(pair: EvalPair, evaluate: Evaluate, tmp_path: Path) -> None:
    from mla_convert.convert.options import ConvertOptions
    from mla_convert.convert.run import convert

    options = ConvertOptions(
        profile="hf",
        qk_rope_head_dim=16,
        kv_lora_rank=20,
        calibration=(str(pair.text),),
        calibration_tokens=128,
        calibration_window=64,
    )
    convert(pair.source_folder, tmp_path / "out", options)
    command = ["eval", str(tmp_path / "out"), "--source", pair.source_folder, "--text", str(pair.text), *SIZES]

    assert run(command) == 4
    assert run([*command, "--allow-overlap"]) == 0
