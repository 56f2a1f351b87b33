"""`mla-convert generate` as it is typed."""

from __future__ import annotations

import json

import pytest

from mla_convert.cli.main import run
from tests.conftest import PicoFactory


def test_json_holds_prompt_text_and_tokens(pico: PicoFactory, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(pico()), "--prompt", "hello", "--max-new-tokens", "5", "--json"]

    assert run(command) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["prompt"] == "hello"
    assert found["prompt_ids"][0] == 1
    assert (found["new_tokens"], len(found["new_ids"])) == (5, 5)
    assert found["cache"]["bytes_per_token"] == 4 * 32 * 4


def test_prompt_and_continuation_are_printed_with_nothing_read_as_markup(
    pico: PicoFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    prompt = "[bold]x[/bold] :smile:"
    command = ["generate", str(pico()), "--prompt", prompt, "--max-new-tokens", "5"]

    assert run(command) == 0
    printed = capfd.readouterr().out
    assert printed.startswith(prompt)
    assert "5 tokens in" in printed
    assert "512 bytes per token" in printed


def test_chat_prints_the_reply_alone(pico: PicoFactory, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(pico("llama", chat_template=True))

    assert run(["generate", folder, "--chat", "--prompt", "hello there", "--max-new-tokens", "5"]) == 0
    assert "hello there" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--prompt", "x", "--chat"], 4),
        (["--prompt", "x", "--max-new-tokens", "9999"], 4),
        (["--prompt", "x", "--max-new-tokens", "0"], 2),
        (["--prompt", "x", "--temperature", "-1"], 2),
        (["--prompt", "x", "--temperature", "1e-320"], 2),
        ([], 2),
    ],
)
def test_refusals_have_their_exit_codes(pico: PicoFactory, options: list[str], code: int) -> None:
    assert run(["generate", str(pico()), *options]) == code
