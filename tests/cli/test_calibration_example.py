"""The shipped mixture of calibration texts, followed as it stands."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import yaml

from mla_convert.cli.main import run
from mla_convert.manifests.models import load
from tests.conftest import PicoFactory

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "calibration.yaml"
WIDTHS = ("--qk-rope-head-dim", "4", "--kv-lora-rank", "12")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with all that the example names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "400")
    for folder in ("articles", "code/deep", "docs"):
        (tmp_path / "texts" / folder).mkdir(parents=True)
    prose = "The articles are about many things. " * 40
    for name in ("articles/one.txt", "articles/two.md", "code/deep/a.py", "code/b.py", "docs/manual.rst"):
        (tmp_path / "texts" / name).write_text(f"{name}: {prose}")
    chat = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": prose}]}
    (tmp_path / "texts" / "chat.jsonl").write_text(json.dumps(chat))
    (tmp_path / "texts" / "other-languages.jsonl").write_text(json.dumps({"text": prose.upper()}))
    return tmp_path


def test_the_example_says_what_it_will_do(texts: Path, pico: PicoFactory) -> None:
    source = pico("llama", num_layers=1, max_position_embeddings=4096, chat_template=True)
    output = io.StringIO()

    with contextlib.redirect_stdout(output):
        code = run(["convert", str(source), "out", *WIDTHS, "--config", str(EXAMPLE), "--dry-run"])

    assert code == 0
    assert "20,480 tokens in windows of 512 of texts/articles/ (25.0%), texts/chat.jsonl (25.0%)" in output.getvalue()
    assert "and 8,192 in windows of 2,048: 2.6 times the scores to measure" in output.getvalue()
    assert sorted(path.name for path in texts.iterdir()) == ["texts"]


def test_the_example_converts(texts: Path, pico: PicoFactory) -> None:
    source = pico("llama", num_layers=1, chat_template=True)
    smaller = ("--calibration-tokens", "512", "--calibration-window", "64", "--calibration-long", "2")

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        code = run(["convert", str(source), "out", *WIDTHS, "--config", str(EXAMPLE), *smaller])

    assert code == 0
    record = load(texts / "out").calibration
    assert record is not None
    given = [name.partition("::")[0] for name in yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["calibration"]]
    assert [text.name for text in record.texts] == given
    assert [text.kind for text in record.texts] == ["folder", "jsonl", "files", "folder", "jsonl", "self"]
    assert [text.windows for text in record.texts] == [2, 2, 1, 1, 1, 1]
    assert record.self_text is not None
    assert (record.long_windows, record.long_window_length) == (2, 512)
