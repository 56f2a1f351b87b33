"""`mla-convert harness` as it is typed."""

from __future__ import annotations

from importlib import util

import pytest

from mla_convert.cli.harness import HarnessResult
from mla_convert.cli.main import run
from mla_convert.manifests.environment import capture
from mla_convert.manifests.evaluation.harness import HarnessMetric, HarnessReceipt, HarnessTask
from mla_convert.manifests.evaluation.receipt import ComparedFiles

DIGEST = "sha256:" + "0" * 64


@pytest.mark.skipif(util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_it_ends_with_five_and_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["harness", "nowhere", "--source", "nowhere", "--tasks", "a"]) == 5

    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert "pip install 'mla-convert[harness]'" in line


def test_usage(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["harness", "out", "--source", "src"]) == 2
    assert run(["harness", "out", "--source", "src", "--tasks", "a", "--limit", "0"]) == 2
    assert run(["harness", "out", "--source", "src", "--tasks", "a,"]) == 2
    assert "no task to run" in capfd.readouterr().err


def test_the_table_fits_a_hundred_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_convert.cli.common import output_console

    monkeypatch.setenv("COLUMNS", "100")
    metrics = (
        HarnessMetric(
            task="words",
            metric="exact_match",
            filter="strict",
            higher_is_better=True,
            source=0.5,
            source_stderr=0.0123,
            target=0.25,
            target_stderr=None,
            difference=-0.25,
        ),
        HarnessMetric(
            task="words",
            metric="odd",
            filter="none",
            higher_is_better=None,
            source=None,
            source_stderr=None,
            target=1.0,
            target_stderr=None,
            difference=None,
        ),
    )
    receipt = HarnessReceipt(
        compared=ComparedFiles(
            source="s", source_digest=DIGEST, target="t", manifest_sha256="0" * 64, canonical_mla_id=DIGEST
        ),
        harness="lm_eval 0",
        asked=("words",),
        limit=None,
        batch_size=1,
        seed=0,
        dtype="float32",
        offline=True,
        tasks=(HarnessTask(task="words", version="1", shots=0, examples=3, prompts_digest=DIGEST),),
        metrics=metrics,
        task_files=(),
        environment=capture(["mla-convert"]),
    )

    HarnessResult(receipt).render(output_console())

    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    for expected in ("exact_match, strict ↑", "0.5 ± 0.012", "0.25", "-0.25", "no number", "words 3", "lm_eval 0"):
        assert expected in text
    assert HarnessResult(receipt).to_json()["harness"] == "lm_eval 0"
