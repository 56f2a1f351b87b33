"""`mla-convert bench` as it is typed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mla_convert.bench import fidelity as bench
from mla_convert.bench.fidelity import FidelityReport, FidelityRequest, run_fidelity
from mla_convert.cli import bench as cli_bench
from mla_convert.cli.main import run
from tests.conftest import PicoFactory
from tests.eval.helpers import write_text


@pytest.fixture(scope="module")
def command(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A bench of a tiny model."""
    folder = tmp_path_factory.mktemp("bench")
    texts = [str(write_text(folder / f"{name}.txt", 1200, seed)) for seed, name in enumerate(("a", "b"))]
    source = str(pico("llama", kv_heads=2))
    return [
        *("bench", "fidelity", "--source", source, "--calibration", texts[0], "--text", texts[1]),
        *("--plan", "hf:16+24", "--max-tokens", "1024", "--calibration-tokens", "512"),
    ]


@pytest.fixture(autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path_factory.getbasetemp() / "bench-cache"))
    monkeypatch.setenv("COLUMNS", "100")


def test_the_table_fits_a_hundred_columns(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(command) == 0

    captured = capfd.readouterr()
    table = [line for line in captured.out.splitlines() if not re.match("model|text", line)]
    assert max(map(len, table)) <= 100
    assert "plan 1 of 1: hf:16+24" in captured.err
    row = next(line.strip() for line in table if line.startswith(" hf:16+24"))
    assert re.match(r"hf:16\+24 +40 +640 +\d+\.\d+ +\d+\.\d{4} +\d+\.\d+–\d+\.\d+ +", row)


def test_a_missed_bar_is_printed_and_ends_with_three(
    command: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_bar(request: FidelityRequest) -> FidelityReport:
        report = run_fidelity(request)
        row = report.rows[0]
        return replace(report, rows=(replace(row, bar=bench.Bar(0.5)),))

    monkeypatch.setattr(bench, "run_fidelity", with_bar)

    assert run(command) == 3
    assert "≤0.50 FAIL" in capfd.readouterr().out
    assert run([*command, "--json"]) == 3
    found = json.loads(capfd.readouterr().out)
    assert found["passed"] is False
    assert found["plans"][0]["passed"] is False


def test_plans_that_are_none_are_refused(command: list[str]) -> None:
    assert run([*command, "--plan", "hf:16"]) == 2
    assert run([*command, "--plan", "hf:999+24"]) == 2
    assert run([*command, "--plan", "full:16+24"]) == 4


def test_a_bench_is_a_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    assert "fidelity" in capsys.readouterr().out
    assert Path(cli_bench.__file__).with_name("bench.py").is_file()
