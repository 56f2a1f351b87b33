"""`mla-convert demo`: its table and its object, from steps that are made up where no real model is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_convert.bench import demo
from mla_convert.bench.steps import Step
from mla_convert.bench.usage import Usage
from mla_convert.cli.main import run
from mla_convert.errors import EnvironmentFault


def evaluation(numbers: int, perplexity: float) -> dict[str, Any]:
    """The part of `eval --json` that the demo reads."""
    return {
        "source": {"perplexity": 24.0},
        "target": {"perplexity": perplexity},
        "perplexity_ratio": perplexity / 24.0,
        "kl": 0.25,
        "top1_agreement": 0.75,
        "cache_bytes_per_token": {"source": 46080, "target": numbers * 120},
        "cache": {
            "source": {"numbers_per_token_per_layer": [384] * 30},
            "target": {"numbers_per_token_per_layer": [numbers] * 30},
        },
    }


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that the demo runs; each comes back at once."""
    seen: list[list[str]] = []

    def fake_step(name: str, arguments: Sequence[str]) -> Step:
        seen.append(list(arguments))
        numbers, perplexity = (192, 33.0) if "engine" in name else (128, 60.0)
        results = {
            "eval": evaluation(numbers, perplexity),
            "generate": {"text": f" words of {name}"},
            "report": {"report": "/out/report.html"},
        }
        return Step(name, tuple(arguments), results.get(arguments[0], {}), Usage(1.5, 2_000_000_000))

    monkeypatch.setattr(demo, "run_step", fake_step)
    monkeypatch.setattr(demo, "smollm2_folder", lambda: Path("/model"))
    splits = SimpleNamespace(calibration=Path("/text/calibration.jsonl"), heldout=Path("/text/heldout.jsonl"))
    monkeypatch.setattr(demo, "write_splits", lambda _folder: splits)
    monkeypatch.setenv("COLUMNS", "100")
    return seen


def test_the_steps_and_their_order(commands: list[list[str]], tmp_path: Path) -> None:
    assert run(["demo", "--work-dir", str(tmp_path)]) == 0

    stages = ["inspect", *["convert", "verify", "eval"] * 2, *["generate"] * 3, "eval", "report"]
    assert sorted(command[0] for command in commands) == sorted(stages)
    order = [command[0] for command in commands]
    assert order[:-2] == sorted(order[:-2], key=["inspect", "convert", "verify", "eval", "generate"].index)
    assert commands[-2][-6:] == ["--suite", "quick", "--part", "ladder", "--part", "quality"]
    assert order[-1] == "report"
    assert all("--json" in command for command in commands)
    first = str(tmp_path / "engine-40-152")
    convert, evaluate = commands[1], commands[5]
    assert convert[:3] == ["convert", "/model", first]
    assert "--overwrite" in convert
    assert evaluate == [
        *("eval", first, "--source", "/model", "--text", "/text/heldout.jsonl"),
        *("--max-tokens", "4096", "--seq-len", "512", "--stride", "512", "--json"),
    ]


def test_every_command_line_is_one_that_the_program_takes(commands: list[list[str]], tmp_path: Path) -> None:
    """Options that do not exist end with code 2; these end where the folders are missing, or print help."""
    run(["demo", "--work-dir", str(tmp_path)])

    assert {run([*command, "--help"]) for command in commands} == {0}


def test_the_table(commands: list[list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(["demo", "--work-dir", str(tmp_path)])

    lines = capfd.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if "%" in line}
    assert rows["source"] == ["384", "46,080", "24.00", "1.000", "0", "100.0%"]
    assert rows["engine:40+152"] == ["192", "23,040", "33.00", "1.375", "0.25", "75.0%"]
    assert rows["hf:32+96"] == ["128", "15,360", "60.00", "2.500", "0.25", "75.0%"]
    text = "\n".join(lines)
    for name in ("source", "engine:40+152", "hf:32+96"):
        assert f"{demo.PROMPT} words of generate, {name}" in text
    assert "4-bit" in text
    assert max(len(line) for line in lines if str(tmp_path) not in line and demo.PROMPT not in line) <= 100


def test_json(commands: list[list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(["demo", "--work-dir", str(tmp_path), "--json"])

    found = json.loads(capfd.readouterr().out)
    assert [row["width"] for row in found["rows"]] == [384, 192, 128]
    assert [row["perplexity"] for row in found["rows"]] == [24.0, 33.0, 60.0]
    assert len(found["steps"]) == len(commands)
    assert {step["peak_rss_bytes"] for step in found["steps"]} == {2_000_000_000}
    assert found["steps"][0]["command"] == "mla-convert inspect /model --json"


def test_without_a_network_it_ends_with_five(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable() -> Path:
        raise EnvironmentFault("could not download")

    monkeypatch.setattr(demo, "smollm2_folder", unreachable)

    assert run(["demo", "--work-dir", str(tmp_path)]) == 5
    assert commands == []
