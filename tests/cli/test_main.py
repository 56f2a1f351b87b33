"""The command line from outside: streams, exit codes, and how long `--help` takes."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from mla_convert import __version__, cli
from mla_convert.cli.main import COMMANDS, run

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Not pydantic: typer itself imports it to read a command's options.
HEAVY = ("accelerate", "datasets", "numpy", "peft", "torch", "transformers")
HELP_CPU_SECONDS = 0.5

PROBE = '''
import ctypes, logging, os, subprocess, sys, time, warnings
from typing import Annotated
import typer
from mla_convert.cli.common import Debug, JsonFlag, run_command
from mla_convert.errors import CheckFailed, EnvironmentFault, InputRefused, UsageFault

HELP = "Try things. Text in [brackets] is no markup."
EXAMPLES = """
mla-convert probe ok [OUT] --json
mla-convert probe fail
"""
ERRORS = {
    "usage": UsageFault("two options"), "check": CheckFailed("not equal"),
    "environment": EnvironmentFault("no device"),
    "refused": InputRefused("a head is [missing]", expected="3", found="2", where="layer 1", remedy="Look."),
    "disk": OSError(28, "No space left on device", "/full"), "memory": MemoryError(),
    "torch_memory": RuntimeError("[enforce fail at alloc] DefaultCPUAllocator: can't allocate memory"),
    "fault": ValueError("wrong [bold]thing\\nsecond line"), "interrupt": KeyboardInterrupt(),
    "worker_pipe": BrokenPipeError(32, "Broken pipe"),
    "permission": PermissionError(13, "Permission denied", "/root/x"),
}

class Result:
    def __init__(self, exit_code): self.exit_code = exit_code
    def to_json(self):
        from pathlib import Path
        numbers = {"pi": 3.141592653589793, "inf": float("inf"), "nan": float("nan")}
        return {**numbers, "path": Path("a/b"), "pair": (1, 2)}
    def render(self, console):
        for number in range(3000): console.print(f"row {number}")

def command(case: Annotated[str, typer.Argument()], json_output: JsonFlag = False, debug: Debug = False,
            number: Annotated[int, typer.Option(min=1)] = 1) -> None:
    def body():
        print("python noise"); warnings.warn("warning noise"); logging.warning("logging noise")
        os.write(1, b"descriptor noise\\n"); ctypes.CDLL(None).puts(b"libc noise")
        subprocess.run(["echo", "child noise"], check=True)
        if case == "sleep":
            print("sleeping", flush=True); time.sleep(60)
        if case in ERRORS: raise ERRORS[case]
        return Result(3 if case == "judged" else 0)
    run_command(json_output, body, debug=debug)
'''
START = """
import sys
from mla_convert.cli.main import run
sys.exit(run(sys.argv[1:], {"probe": "probe_command"}))
"""


@pytest.fixture(scope="module")
def probe_start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Arguments of `subprocess` that start a command line whose only subcommand is `probe`."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe_command.py").write_text(PROBE, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "MLA_CONVERT_DEBUG"}
    environment |= {"PYTHONPATH": str(folder), "TMPDIR": str(folder), "COLUMNS": "200"}
    return {"args": [sys.executable, "-c", START], "env": environment}


@pytest.fixture
def probe(probe_start: dict[str, object]) -> Run:
    """`probe("ok", "--json")`: the finished process of that command line."""

    def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [*probe_start["args"], "probe", *arguments]
        return subprocess.run(
            command, env={**probe_start["env"], **environment}, capture_output=True, text=True, timeout=60
        )

    return start


@pytest.mark.parametrize("arguments", [("ok",), ("ok", "--json")])
def test_standard_output_holds_the_result_and_nothing_else(probe: Run, arguments: tuple[str, ...]) -> None:
    done = probe(*arguments)

    assert done.returncode == 0
    assert "noise" not in done.stdout
    for source in ("python", "warning", "logging", "descriptor", "libc", "child"):
        assert f"{source} noise" in done.stderr


def test_json_is_one_object_with_unrounded_numbers(probe: Run) -> None:
    result = json.loads(probe("ok", "--json").stdout, parse_constant=pytest.fail)

    assert result == {"pi": 3.141592653589793, "inf": "Infinity", "nan": "NaN", "path": "a/b", "pair": [1, 2]}


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_result_that_did_not_hold_is_printed_and_ends_with_three(probe: Run, flags: tuple[str, ...]) -> None:
    done = probe("judged", *flags)

    assert done.returncode == 3
    assert done.stdout


@pytest.mark.parametrize(
    ("case", "code", "kind"),
    [
        ("usage", 2, "usage"),
        ("check", 3, "check-failed"),
        ("refused", 4, "input-refused"),
        ("environment", 5, "environment"),
        ("disk", 5, "environment"),
        ("memory", 5, "environment"),
        ("torch_memory", 5, "environment"),
        ("fault", 70, "internal"),
        ("permission", 5, "environment"),
        ("worker_pipe", 70, "internal"),
        ("interrupt", 130, "interrupted"),
    ],
)
def test_every_error_has_its_exit_code_one_line_and_one_object(probe: Run, case: str, code: int, kind: str) -> None:
    plain = probe(case)
    as_json = probe(case, "--json")

    assert plain.returncode == as_json.returncode == code
    assert plain.stdout == ""
    assert plain.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in plain.stderr
    error = json.loads(as_json.stdout)["error"]
    assert (error["kind"], error["exit_code"]) == (kind, code)


def test_an_error_line_says_expected_found_where_and_remedy_without_markup(probe: Run) -> None:
    line = probe("refused").stderr.splitlines()[-1]

    assert line == "error: layer 1: a head is [missing]; expected 3; found 2. Look."


def test_an_unexpected_error_keeps_its_traceback_in_a_file_or_shows_it(probe: Run) -> None:
    line = probe("fault").stderr.splitlines()[-1]
    path = Path(line.partition("traceback: ")[2].partition(";")[0])

    assert line.startswith("error: unexpected ValueError: wrong [bold]thing (traceback: ")
    kept = path.read_text(encoding="utf-8")
    assert "Traceback (most recent call last)" in kept
    assert kept.endswith("ValueError: wrong [bold]thing\nsecond line\n")
    assert "Traceback (most recent call last)" in probe("fault", "--debug").stderr
    assert "Traceback (most recent call last)" in probe("fault", MLA_CONVERT_DEBUG="1").stderr


@pytest.mark.parametrize("arguments", [("ok", "--number", "0"), ("ok", "--unknown"), ()])
def test_usage_errors_end_with_two(probe: Run, arguments: tuple[str, ...]) -> None:
    plain, as_json = probe(*arguments), probe(*arguments, "--json")

    assert plain.returncode == as_json.returncode == 2
    assert plain.stdout == ""
    assert "Error" in plain.stderr
    assert json.loads(as_json.stdout)["error"]["kind"] == "usage"


def test_interrupt_from_the_keyboard_ends_with_130(probe_start: dict[str, object]) -> None:
    # A shell's background jobs ignore this signal and so would their children.
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    interpreter, option, program = probe_start["args"]
    command = [interpreter, option, f"{heeding}\n{program}", "probe", "sleep"]
    with subprocess.Popen(command, env=probe_start["env"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while process.stderr.readline().strip() != "sleeping":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()

    assert process.returncode == 130
    assert rest.splitlines()[-1] == "error: interrupted"


def test_a_reader_that_leaves_early_is_no_error(probe_start: dict[str, object]) -> None:
    command = [*probe_start["args"], "probe", "ok"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=probe_start["env"], text=True, **streams) as process:
        process.stdout.close()
        complaint = process.stderr.read()

    assert process.returncode == 141
    assert "BrokenPipe" not in complaint
    assert "error" not in complaint


def test_help_shows_examples_line_by_line_with_their_brackets(probe: Run) -> None:
    text = probe("--help").stdout

    lines = [line.strip() for line in text.splitlines()]
    assert "Try things. Text in [brackets] is no markup." in lines
    start = lines.index("Examples")
    assert lines[start + 1 : start + 3] == ["mla-convert probe ok [OUT] --json", "mla-convert probe fail"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"mla-convert {__version__}\n"


def test_the_table_lists_every_subcommand_file() -> None:
    folder = Path(cli.__file__).parent
    files = {path.stem for path in folder.glob("*.py") if "\nHELP = " in path.read_text()}

    assert set(COMMANDS) == files
    assert all(module == f"mla_convert.cli.{name}" for name, module in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_has_help_and_examples_of_its_own(name: str) -> None:
    module = importlib.import_module(COMMANDS[name])

    assert module.HELP.strip()
    examples = module.EXAMPLES.strip().splitlines()
    assert all(line.strip().startswith(f"mla-convert {name}") for line in examples if line.strip())


@pytest.mark.parametrize("name", COMMANDS)
def test_option_texts_hold_no_markup(name: str) -> None:
    """Brackets in the text of an option would be read as rich markup and vanish."""
    module = importlib.import_module(COMMANDS[name])
    app = module.command
    if not isinstance(app, typer.Typer):
        app = typer.Typer()
        app.command()(module.command)

    for command in _commands(typer.main.get_command(app)):
        for parameter in command.params:
            assert "[" not in (getattr(parameter, "help", None) or ""), parameter.name


def _commands(command: object) -> list[object]:
    nested = getattr(command, "commands", {}).values()
    return [command, *(inner for child in nested for inner in _commands(child))]


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)], ids=lambda a: " ".join(a) or "root")
def test_help_is_quick_and_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from mla_convert.cli.main import run; code = run(sys.argv[1:]);"
        "print(sorted(m for m in sys.modules if '.' not in m), file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *arguments, "--help"]
    seconds = []
    for _ in range(3):
        # Processor time, not the clock: the bound must hold on a machine that is busy with something else.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    loaded = done.stderr.splitlines()[-1]
    assert [name for name in HEAVY if f"'{name}'" in loaded] == []
    assert "Usage: mla-convert" in done.stdout
    assert min(seconds) < HELP_CPU_SECONDS
