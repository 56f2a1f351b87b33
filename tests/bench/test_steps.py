"""Commands as processes: what is printed, what comes back, and how a failure ends."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mla_convert.bench.steps import command_line, run_step
from mla_convert.errors import InputRefused, MLAConvertError, UsageFault
from tests.conftest import PicoFactory


def test_a_command_line_can_be_typed_back() -> None:
    arguments = ["generate", "a folder", "--prompt", "it's $5"]

    assert shlex.split(command_line(arguments)) == ["mla-convert", *arguments]


def test_a_step_is_announced_run_and_measured(pico: PicoFactory, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(pico()), "--prompt", "hello", "--max-new-tokens", "3", "--json"]
    capfd.readouterr()
    step = run_step("generate, source", arguments)

    assert step.result["new_tokens"] == 3
    assert step.usage.seconds > 0
    assert step.usage.peak_rss_bytes > 50 << 20
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"$ {command_line(arguments)}\n")
    assert step.to_json()["command"] == command_line(arguments)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["generate", "nowhere", "--prompt", "x", "--json"], InputRefused, "exit code 4: no such source"),
        (["generate", "nowhere", "--json"], UsageFault, "exit code 2: Missing option"),
        (["generate", "nowhere"], UsageFault, "exit code 2: it printed no error object"),
    ],
)
def test_a_failing_command_ends_the_demo_with_its_kind_and_message(
    arguments: list[str],
    kind: type[MLAConvertError],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=message):
        run_step("generate", arguments)
