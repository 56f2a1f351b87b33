"""`mla-convert eval --suite` and `--compare` as they are typed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mla_convert.cli.eval_suite import SuiteResult
from mla_convert.cli.main import run
from mla_convert.manifests.evaluation.ladder import Finding
from mla_convert.manifests.evaluation.reading import read_receipt
from tests.conftest import PicoFactory
from tests.eval.helpers import LOSSY, EvalPair, open_pair, write_text

SIZES = ("--max-tokens", "192", "--seq-len", "24")
Suite = Callable[..., int]


@pytest.fixture(scope="module")
def pair(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory) -> EvalPair:
    """A tiny conversion. Read only."""
    return open_pair(pico("llama", kv_heads=2), tmp_path_factory.mktemp("pair"), LOSSY)


@pytest.fixture
def out(pair: EvalPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the conversion, a cache of its own and a terminal of 100 columns."""
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    return Path(shutil.copytree(pair.target, tmp_path / "out"))


@pytest.fixture
def typed(out: Path, pair: EvalPair) -> Suite:
    """`typed("--part", "quality")`: the exit code of that command line."""
    arguments = ["eval", str(out), "--source", pair.source_folder, "--text", str(pair.text), *SIZES]
    return lambda *more: run([*arguments, *more])


def test_the_whole_quick_suite_prints_within_a_hundred_columns_and_writes_its_receipt(
    typed: Suite, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert typed("--suite", "quick") == 0

    lines = capfd.readouterr().out.splitlines()
    (path,) = (out / "receipts").glob("eval-*.json")
    assert read_receipt(path).receipt.systems is not None
    tables = [line for line in lines if not line.startswith(("error parts", "receipt", "took", "cache", "worst"))]
    assert max(map(len, tables)) <= 100
    text = "\n".join(lines)
    for expected in ("Quality", "Retrieval and position", "Speed", "worst layer", "worst domain", "no fault found"):
        assert expected in text
    assert str(path) in text
    assert run(["report", str(out)]) == 0
    assert (out / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert run(["verify", str(out)]) == 0


def test_a_failed_gate_ends_with_3_and_json_names_it(
    typed: Suite, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bars = tmp_path / "bars.yaml"
    bars.write_text("quality.overall.kl: {at_most: 1e-9}\n", encoding="utf-8")

    assert typed("--suite", "quick", "--part", "quality", "--gates", str(bars), "--json") == 3

    found = json.loads(capfd.readouterr().out)
    assert found["gates"][0]["passed"] is False
    assert found["alarms"] == [
        f"GATE  quality.overall.kl: at most 1e-09, found {found['quality']['overall']['kl']['value']!r}"
    ]
    assert Path(found["receipt_path"]).is_file()


def test_findings_and_withheld_figures_end_with_3(typed: Suite, out: Path) -> None:
    assert typed("--suite", "quick", "--part", "ladder") == 0
    (path,) = (out / "receipts").glob("eval-*.json")
    receipt = read_receipt(path).receipt
    assert receipt.ladder is not None
    fault = Finding(stage="rope row", layer=1, what="not rotated", measured=1.0, allowed=0.1)
    broken = receipt.model_copy(update={"ladder": receipt.ladder.model_copy(update={"findings": (fault,)})})

    assert SuiteResult(receipt, path).exit_code == 0
    assert SuiteResult(broken, path).exit_code == 3
    assert SuiteResult(broken, path).alarms == ("FAULT  layer 1, rope row: not rotated",)


def test_compare_of_two_folders(typed: Suite, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert typed("--suite", "quick", "--part", "quality") == 0
    capfd.readouterr()

    assert run(["eval", "--compare", str(out), str(out)]) == 0

    text = capfd.readouterr().out
    assert "verdict" in text
    assert [line for line in text.splitlines() if len(line) > 100 and not line.startswith(("A ", "B "))] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to evaluate"),
        (["OUT", "--source", "x"], "no --text"),
        (["OUT", "--source", "x", "--text", "y", "--strict"], "belong to a suite"),
        (["OUT", "--source", "x", "--text", "y", "--part", "ladder"], "belong to a suite"),
        (["OUT", "--source", "x", "--text", "y", "--suite", "quick", "--part", "nothing"], "no such part"),
        (["OUT", "--compare", "a", "b"], "--compare reads two receipts"),
        (["--suite", "long"], "long"),
    ],
)
def test_options_that_do_not_fit_end_with_2(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", *arguments]) == 2
    assert says in capfd.readouterr().err


def test_a_missing_gates_file_and_a_folder_without_receipts_are_refused(
    typed: Suite, out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert typed("--suite", "quick", "--gates", str(tmp_path / "none.yaml")) == 4
    assert "none.yaml" in capfd.readouterr().err
    assert run(["eval", "--compare", str(out), str(out)]) == 4
    assert "no evaluation receipt" in capfd.readouterr().err


def test_strict_refuses_a_shared_run_of_words(
    pico: PicoFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "cache"))
    shared = "the old mill by the river was sold in spring to a man from the north who never came back. "
    calibration = tmp_path / "calibration.txt"
    calibration.write_text(write_text(tmp_path / "a.txt", 300, seed=1).read_text(encoding="utf-8") + shared)
    heldout = tmp_path / "heldout.txt"
    heldout.write_text(shared + write_text(tmp_path / "b.txt", 300, seed=2).read_text(encoding="utf-8"))
    source, out = str(pico("llama", kv_heads=2)), str(tmp_path / "out")
    widths = ["--qk-rope-head-dim", "16", "--kv-lora-rank", "20", "--profile", "hf", "--rope-policy", "high"]
    made = ["convert", source, out, *widths, "--calibration", str(calibration), "--calibration-window", "24"]
    assert run([*made, "--calibration-tokens", "384"]) == 0
    evaluated = ["eval", out, "--source", source, "--text", str(heldout), *SIZES, "--suite", "quick"]
    capfd.readouterr()

    assert run([*evaluated, "--part", "decomposition", "--json"]) == 0
    overlap = json.loads(capfd.readouterr().out)["overlap"]
    assert [(item["by"], item["share"] > 0) for item in overlap] == [("n-gram", True)]
    assert run([*evaluated, "--strict"]) == 4
    assert "overlaps of the evaluation text" in capfd.readouterr().err
