"""`mla-convert verify` as it is typed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mla_convert.cli.main import run
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert
from mla_convert.manifests.models import MANIFEST_NAME
from tests.conftest import PicoFactory
from tests.convert.test_gguf_source import write_gguf

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def converted(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lossless conversion of `pico()`. Read only."""
    return convert(str(pico()), tmp_path_factory.mktemp("converted") / "out", ConvertOptions(lossless=True)).folder


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    """A conversion to be spoilt."""
    shutil.copytree(converted, tmp_path / "out")
    return tmp_path / "out"


def test_a_good_folder_is_ok_with_and_without_its_source(converted: Path, pico: PicoFactory, capfd: Capture) -> None:
    assert run(["verify", str(converted)]) == 0
    assert run(["verify", str(converted), "--source", str(pico())]) == 0
    assert capfd.readouterr().out.splitlines() == [f"ok: {converted}", f"ok: {converted} and its source"]


def test_json_is_one_object(converted: Path, pico: PicoFactory, capfd: Capture) -> None:
    assert run(["verify", str(converted), "--source", str(pico()), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {
        "folder": str(converted),
        "source": str(pico()),
        "ok": True,
        "problems": [],
    }


def spoil_all(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "extra [b].txt").touch()


def test_problems_are_printed_one_a_line_by_kind_and_end_with_three(copy: Path, capfd: Capture) -> None:
    spoil_all(copy)

    assert run(["verify", str(copy)]) == 3
    *problems, verdict = capfd.readouterr().out.splitlines()
    kinds = [line.split()[0] for line in problems]
    order = ["extra", "missing", "changed", "invalid"]
    assert kinds == sorted(kinds, key=order.index)
    assert {"extra", "missing", "changed"} <= set(kinds)
    assert "extra file:extra [b].txt" in problems
    assert any(line.startswith("missing file:generation_config.json: expected sha256:") for line in problems)
    assert any(line.startswith("changed file:config.json: expected ") for line in problems)
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    assert verdict == f"not ok: {copy}: {counts}"


def test_json_of_a_spoilt_folder_holds_every_problem(copy: Path, capfd: Capture) -> None:
    spoil_all(copy)

    assert run(["verify", str(copy), "--json"]) == 3
    found = json.loads(capfd.readouterr().out)
    assert found["ok"] is False
    subjects = {(problem["kind"], problem["subject"]) for problem in found["problems"]}
    assert {("extra", "file:extra [b].txt"), ("missing", "file:generation_config.json")} <= subjects


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / MANIFEST_NAME).unlink(),
        lambda folder: (folder / MANIFEST_NAME).write_text("{}", encoding="utf-8"),
        lambda folder: [path.unlink() for path in folder.iterdir()],
    ],
    ids=["no manifest", "an empty manifest", "an empty folder"],
)
def test_a_folder_without_a_valid_manifest_fails(copy: Path, capfd: Capture, spoil: Callable[[Path], object]) -> None:
    spoil(copy)

    assert run(["verify", str(copy)]) == 3
    assert MANIFEST_NAME in capfd.readouterr().out


def test_a_source_that_changed_or_is_another_fails(
    converted: Path, pico: PicoFactory, tmp_path: Path, capfd: Capture
) -> None:
    shutil.copytree(pico(), tmp_path / "source")
    with (tmp_path / "source" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    other = pico("llama", kv_heads=2)
    capfd.readouterr()

    for source in (tmp_path / "source", other):
        assert run(["verify", str(converted), "--source", str(source)]) == 3
        assert "changed source:model.safetensors" in capfd.readouterr().out


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_what_is_not_there_is_refused_with_four(
    converted: Path, tmp_path: Path, capfd: Capture, flags: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()

    assert run(["verify", str(tmp_path / "nowhere"), *flags]) == 4
    assert run(["verify", str(tmp_path / "file"), *flags]) == 4
    assert run(["verify", str(converted), "--source", "./nowhere", *flags]) == 4
    captured = capfd.readouterr()
    assert captured.err.count("error: ") == 3
    assert captured.out.count('"kind": "input-refused"') == (3 if flags else 0)


def test_usage_and_an_unreachable_hub_have_their_codes(converted: Path) -> None:
    assert run(["verify"]) == 2
    assert run(["verify", str(converted), "--source", "nobody/no-such-model"]) == 5


def test_a_gguf_file_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "cache"))
    gguf, out = tmp_path / "m.gguf", tmp_path / "out"
    write_gguf(gguf)
    convert(str(gguf), out, ConvertOptions(lossless=True))
    capfd.readouterr()

    assert run(["verify", str(out), "--source", str(gguf)]) == 0
    gguf.write_bytes(gguf.read_bytes() + b"\0")
    capfd.readouterr()
    assert run(["verify", str(out), "--source", str(gguf), "--json"]) == 3
    problems = json.loads(capfd.readouterr().out)["problems"]
    assert [(item["kind"], item["subject"]) for item in problems] == [("changed", "source:m.gguf")]


def test_neither_torch_nor_transformers_is_imported(converted: Path, pico: PicoFactory) -> None:
    code = (
        "import sys; from mla_convert.cli.main import run; code = run(sys.argv[1:]);"
        "sys.exit(code or 9 * bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "verify", str(converted), "--source", str(pico())]

    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
