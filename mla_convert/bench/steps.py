"""Steps of the demo: the command line run as a user would run it, each in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_convert.bench.usage import Usage, UsageMeter
from mla_convert.errors import CheckFailed, EnvironmentFault, InputRefused, MLAConvertError, UsageFault

_FAULTS = {fault.exit_code: fault for fault in (UsageFault, CheckFailed, InputRefused, EnvironmentFault)}


@dataclass(frozen=True)
class Step:
    """One finished command.

    Attributes:
        name: Subcommand and what it is for.
        arguments: Arguments after `mla-convert`.
        result: The JSON object that it printed.
        usage: Time and memory.
    """

    name: str
    arguments: tuple[str, ...]
    result: dict[str, Any]
    usage: Usage

    def to_json(self) -> dict[str, object]:
        """Name, command line, time and memory, without the result."""
        return {
            "name": self.name,
            "command": command_line(self.arguments),
            "seconds": self.usage.seconds,
            "peak_rss_bytes": self.usage.peak_rss_bytes,
        }


def command_line(arguments: Sequence[str]) -> str:
    """`mla-convert` and its arguments as one types them."""
    return shlex.join(["mla-convert", *arguments])


def run_step(name: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> Step:
    """Print a command line on standard error, run it, and read its JSON result.

    Args:
        name: What the step is called.
        arguments: Arguments after `mla-convert`, `--json` among them.
        variables: Further environment variables.

    Raises:
        MLAConvertError: Of the kind that the command's exit code stands for, with its message.
    """
    print(f"$ {command_line(arguments)}", file=sys.stderr, flush=True)
    # transformers' bars for weights that load in a second would bury the commands.
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **(variables or {})}
    command = [sys.executable, "-m", "mla_convert.cli.main", *arguments]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process,
        UsageMeter(process.pid) as meter,
    ):
        output, _ = process.communicate()
    if process.returncode != 0:
        raise _fault(name, process.returncode, output)
    print(
        f"  {meter.usage.seconds:.1f} s, {meter.usage.peak_rss_bytes / 1e9:.2f} GB",
        file=sys.stderr,
        flush=True,
    )
    return Step(name, tuple(arguments), json.loads(output), meter.usage)


def _fault(name: str, code: int, output: str) -> MLAConvertError:
    kind = _FAULTS.get(code, MLAConvertError)
    try:
        error = json.loads(output)["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        message = "it printed no error object; see above"
    return kind(f"step {name!r} ended with exit code {code}: {message}")
