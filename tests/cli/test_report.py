"""`mla-convert report` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mla_convert.cli.main import run
from mla_convert.manifests.digest import sha256_file
from mla_convert.manifests.models import MANIFEST_NAME
from mla_convert.manifests.verify import verify_folder
from tests.eval.report.inputs import frontier
from tests.eval.report.parse import Page
from tests.eval.report.receipts import full, minimal
from tests.manifests.example import build

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A small folder that verifies."""
    folder, _, _ = build(tmp_path)
    return folder


def add_receipt(folder: Path, sha256: str | None = None) -> Path:
    """An evaluation of the folder, or of another manifest."""
    (folder / "receipts").mkdir()
    path = folder / "receipts" / "eval-1.json"
    receipt = full(sha256 or sha256_file(folder / MANIFEST_NAME), layers=2)
    path.write_text(receipt.to_json_text(), encoding="utf-8")
    return path


def test_a_conversion_alone_is_reported_and_the_folder_still_verifies(out: Path, capfd: Capture) -> None:
    assert run(["report", str(out)]) == 0
    lines = capfd.readouterr().out.splitlines()

    page = out / "report.html"
    assert lines[0] == f"report   {page} ({page.stat().st_size:,} bytes)"
    assert lines[1] == "receipt  none: the conversion alone"
    assert "quality" in lines[2]
    assert Page(page.read_text(encoding="utf-8")).faults == []
    assert verify_folder(out).ok
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []


def test_an_evaluated_folder_with_frontier_and_figures(out: Path, tmp_path: Path, capfd: Capture) -> None:
    receipt = add_receipt(out)
    plans = tmp_path / "frontier.json"
    plans.write_text(frontier().model_dump_json(), encoding="utf-8")
    figures, page = tmp_path / "figures", tmp_path / "page.html"
    options = ["--frontier", str(plans), "--figures", str(figures), "--format", "svg", "--output", str(page)]

    assert run(["report", str(out), *options, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["report"] == str(page)
    assert found["bytes"] == page.stat().st_size
    assert found["receipt"] == str(receipt)
    assert found["manifest_sha256"] == sha256_file(out / MANIFEST_NAME)
    assert found["missing"] == []
    assert sorted(found["figures"]) == sorted(map(str, figures.iterdir()))
    assert len(found["figures"]) == 11
    assert not (out / "report.html").exists()
    assert verify_folder(out).ok


def test_a_spoilt_folder_is_refused_with_one_line_and_nothing_is_written(out: Path, capfd: Capture) -> None:
    (out / "config.json").write_text("{}", encoding="utf-8")

    assert run(["report", str(out)]) == 4
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "the folder does not verify" in line
    assert not (out / "report.html").exists()


def test_receipts_of_other_manifests_are_refused(out: Path, tmp_path: Path, capfd: Capture) -> None:
    receipt = add_receipt(out, "0" * 64)

    assert run(["report", str(out)]) == 4
    assert run(["report", str(out), "--receipt", str(receipt)]) == 4
    assert capfd.readouterr().err.count("a receipt of another manifest") == 2


def test_a_named_receipt_is_taken(out: Path, tmp_path: Path, capfd: Capture) -> None:
    path = tmp_path / "mine.json"
    path.write_text(minimal(sha256_file(out / MANIFEST_NAME)).to_json_text(), encoding="utf-8")

    assert run(["report", str(out), "--receipt", str(path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["receipt"] == str(path)


def test_what_is_no_frontier_is_refused(out: Path, tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "frontier.json").write_text('{"points": []}', encoding="utf-8")

    assert run(["report", str(out), "--frontier", str(tmp_path / "frontier.json")]) == 4
    assert run(["report", str(out), "--frontier", str(tmp_path / "none.json")]) == 4
    error = capfd.readouterr().err
    assert "not a frontier" in error
    assert "no readable frontier" in error


def test_places_that_cannot_be_written_to_are_usage_errors(out: Path, tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "file").touch()
    for options in (
        ["--format", "svg"],
        ["--format", "gif", "--figures", str(tmp_path / "f")],
        ["--output", str(out / "page.html")],
        ["--output", str(tmp_path)],
        ["--output", str(tmp_path / "none" / "page.html")],
        ["--figures", str(out / "figures")],
        ["--figures", str(tmp_path / "file")],
    ):
        assert run(["report", str(out), *options]) == 2, options
    assert run(["report", str(tmp_path / "nowhere")]) in (2, 4)
    assert verify_folder(out).ok
    assert not (out / "report.html").exists()


def test_a_failed_write_leaves_the_old_report(out: Path, capfd: Capture) -> None:
    assert run(["report", str(out)]) == 0
    before = (out / "report.html").read_bytes()
    (out / ".report.html.partial").mkdir()

    assert run(["report", str(out)]) != 0
    assert (out / "report.html").read_bytes() == before


def test_neither_torch_nor_transformers_is_imported(out: Path) -> None:
    code = (
        "import sys; from mla_convert.cli.main import run; code = run(sys.argv[1:]);"
        "sys.exit(code or 9 * bool({'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "report", str(out)]

    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
