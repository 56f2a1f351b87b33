"""The entry point `mla-convert`: a table of subcommands, and the exit codes of usage errors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.markup import escape
from typer.exceptions import TyperException

from mla_convert.cli import common
from mla_convert.version import __version__

# In the order in which they are used. Their modules import only typer and `common` at the top.
COMMANDS: Mapping[str, str] = {
    "inspect": "mla_convert.cli.inspect",
    "frontier": "mla_convert.cli.frontier",
    "convert": "mla_convert.cli.convert",
    "verify": "mla_convert.cli.verify",
    "eval": "mla_convert.cli.eval",
    "harness": "mla_convert.cli.harness",
    "report": "mla_convert.cli.report",
    "generate": "mla_convert.cli.generate",
    "ledger": "mla_convert.cli.ledger",
    "bench": "mla_convert.cli.bench",
    "demo": "mla_convert.cli.demo",
}


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mla-convert {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Turn trained MHA and GQA checkpoints into Multi-head Latent Attention checkpoints, with evidence."""


def build_app(commands: Mapping[str, str] = COMMANDS) -> typer.Typer:
    """The application with one subcommand for each name and module of `commands`.

    A module has `HELP`, `EXAMPLES` and `command`: a function, or a `typer.Typer` with subcommands of its own.
    """
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, path in commands.items():
        module = importlib.import_module(path)
        text, examples = escape(module.HELP), common.epilog(module.EXAMPLES)
        if isinstance(module.command, typer.Typer):
            app.add_typer(module.command, name=name, help=text, epilog=examples, no_args_is_help=True)
        else:
            app.command(name, help=text, epilog=examples)(module.command)
    return app


def run(arguments: Sequence[str], commands: Mapping[str, str] = COMMANDS) -> int:
    """Run the command line on `arguments` and return the exit code."""
    json_output = "--json" in arguments
    try:
        outcome = build_app(commands)(list(arguments), prog_name="mla-convert", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        return _report_usage(error, json_output)
    except BrokenPipeError:
        return common.silence_broken_pipe()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the outermost frame
        return common.report_error(error, json_output, debug=common.debug_requested())
    return outcome if isinstance(outcome, int) else 0


def _report_usage(error: TyperException, json_output: bool) -> int:
    from typer import rich_utils

    rich_utils.rich_format_error(error)  # type: ignore[arg-type]
    if json_output:
        fields = {"kind": "usage", "message": error.format_message(), "exit_code": error.exit_code}
        common.write_json({"error": fields})
    return error.exit_code


def main() -> None:
    """Entry point of the installed command."""
    common.heed_termination()
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
