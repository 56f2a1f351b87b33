"""What every subcommand shares: options, output on the right stream, and exit codes.

A subcommand hands `run_command` a function that does the work and returns a result. Everything printed
meanwhile goes to standard error, so that standard output holds the result and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import platform
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from types import FrameType
from typing import Annotated, Protocol, TextIO, runtime_checkable

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from mla_convert.errors import EnvironmentFault, MLAConvertError
from mla_convert.version import __version__

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_BROKEN_PIPE = 141
EXIT_INTERNAL = 70
DEBUG_VARIABLE = "MLA_CONVERT_DEBUG"
WIDTH_WITHOUT_TERMINAL = 120

# Errors of the machine, not of the input or of this program.
_ENVIRONMENT_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ENOMEM,
        errno.EROFS,
        errno.EMFILE,
        errno.ENFILE,
        errno.EIO,
        errno.EACCES,
        errno.EPERM,
    }
)
# torch raises a plain RuntimeError for lack of host memory; importing torch to ask is too slow here.
_OUT_OF_MEMORY_PHRASES = ("DefaultCPUAllocator", "not enough memory", "CUDA out of memory")

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of every random choice.")]
Backend = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, stock (transformers as it is), torch, reference, triton, triton-interpret, flashmla or flashinfer.",
    ),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", envvar=DEBUG_VARIABLE, help="Show the full traceback of an unexpected error."),
]


class CommandResult(Protocol):
    """What the body of a subcommand returns."""

    def to_json(self) -> Mapping[str, object]:
        """The whole result as one object of JSON types (paths and tuples are converted)."""

    def render(self, console: Console) -> None:
        """Print the result for a reader."""


@runtime_checkable
class Judged(Protocol):
    """A result that may end the process with another code than 0, such as 3 where a check did not hold."""

    @property
    def exit_code(self) -> int:
        """The exit code, once the result has been printed."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM), and ends as it does for Ctrl-C: cleaning up on its way out."""


def heed_termination() -> None:
    """Turn the first SIGTERM into `Terminated`; a second one ends the process at once."""

    def handler(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    signal.signal(signal.SIGTERM, handler)


def run_command(json_output: bool, body: Callable[[], CommandResult], *, debug: bool = False) -> None:
    """Run `body`, print its result on standard output, and end the process with the right code.

    Args:
        json_output: Print `to_json()` as one JSON object, also for an error: `{"error": {...}}`.
        body: The work. Whatever it prints goes to standard error.
        debug: Show the traceback of an unexpected error instead of writing it to a file.

    Raises:
        typer.Exit: With the exit code, where that is not 0.
    """
    try:
        with standard_output_reserved():
            result = body()
        code = _deliver(result, json_output)
    except typer.Exit:
        raise
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - where errors become exit codes
        code = report_error(error, json_output, debug=debug)
    if code:
        raise typer.Exit(code)


def epilog(examples: str) -> str:
    """`examples`, one command a line, as typer prints them: line by line and with brackets kept."""
    lines = [escape(line.strip()) for line in examples.strip().splitlines() if line.strip()]
    return "\n".join(["[bold]Examples[/bold]", *lines])


@contextlib.contextmanager
def standard_output_reserved() -> Iterator[None]:
    """Send everything written to standard output to standard error, also by libraries and child processes."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        # Both buffers may hold text written before the descriptor goes back: Python's and the C library's.
        sys.stdout.flush()
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)


def write_json(payload: Mapping[str, object]) -> None:
    """Print `payload` as one JSON object, keys in their order, numbers unrounded.

    JSON has no infinities: they and NaN are written as the strings "Infinity", "-Infinity" and "NaN".
    """
    sys.stdout.write(json.dumps(_jsonable(payload), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def report_error(error: BaseException, json_output: bool, *, debug: bool = False) -> int:
    """Print one error, on standard error and, with `json_output`, as an object; return its exit code."""
    code, payload, line = _explain(error)
    if code == EXIT_INTERNAL:
        line = f"{line}{_keep_traceback(error, debug)}"
    Console(stderr=True).print(Text(f"error: {line}", style="bold red"), soft_wrap=True)
    if json_output:
        try:
            write_json({"error": {**payload, "exit_code": code}})
        except BrokenPipeError:
            silence_broken_pipe()
    return code


def silence_broken_pipe() -> int:
    """The reader of standard output is gone (as with `| head`): drop what is left of it, without a word."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return EXIT_BROKEN_PIPE


def debug_requested() -> bool:
    """Whether the environment asks for tracebacks, for errors outside of any subcommand."""
    return os.environ.get(DEBUG_VARIABLE, "").lower() in {"1", "true", "yes", "on"}


class _OutputConsole(Console):
    def on_broken_pipe(self) -> None:
        """Let the caller see it: rich would exit with code 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def output_console(file: TextIO | None = None) -> Console:
    """A console on standard output, wide enough for the tables where that is no terminal."""
    console = _OutputConsole(file=file)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH_WITHOUT_TERMINAL
    return console


def _deliver(result: CommandResult, json_output: bool) -> int:
    try:
        if json_output:
            write_json(result.to_json())
        else:
            result.render(output_console())
            sys.stdout.flush()
    except BrokenPipeError:
        return silence_broken_pipe()
    return result.exit_code if isinstance(result, Judged) else 0


def _jsonable(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def _explain(error: BaseException) -> tuple[int, dict[str, object], str]:
    """Exit code, fields for JSON, and the line to print."""
    if isinstance(error, Terminated):
        return EXIT_TERMINATED, _fields("terminated", "terminated"), "terminated"
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, _fields("interrupted", "interrupted"), "interrupted"
    if isinstance(error, MLAConvertError):
        return error.exit_code, dict(error.to_json()), error.render()
    if (message := _environment_message(error)) is not None:
        return EnvironmentFault.exit_code, _fields(EnvironmentFault.kind, message), message
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return EXIT_INTERNAL, _fields("internal", message), f"unexpected {message.splitlines()[0]}"


def _fields(kind: str, message: str) -> dict[str, object]:
    return {"kind": kind, "message": message}


def _environment_message(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in _ENVIRONMENT_ERRNOS:
        place = f" ({error.filename})" if error.filename else ""
        return f"{(error.strerror or str(error)).lower()}{place}"
    first_line = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemoryError):
        return f"out of memory: {first_line}" if first_line else "out of memory"
    if isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _OUT_OF_MEMORY_PHRASES):
        return f"out of memory: {first_line}"
    return None


def _keep_traceback(error: BaseException, debug: bool) -> str:
    """Print the traceback where asked, else write it to a file; returns the end of the error's line."""
    text = "".join(traceback.format_exception(error))
    if debug:
        sys.stderr.write(text)
        return ""
    versions = f"mla-convert {__version__}, Python {platform.python_version()}, {platform.platform()}"
    try:
        descriptor, name = tempfile.mkstemp(prefix="mla-convert-", suffix=".traceback.txt")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{versions}\n{sys.argv}\n{text}")
    except OSError:
        sys.stderr.write(text)
        return " (the traceback is above: it could not be written to a file)"
    return f" (traceback: {Path(name)}; {DEBUG_VARIABLE}=1 shows it)"
