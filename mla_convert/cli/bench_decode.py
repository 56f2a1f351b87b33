"""`mla-convert bench decode`: decoding from the latent cache beside stock transformers and beside the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mla_convert.cli.common import Debug, JsonFlag, Seed, run_command

if TYPE_CHECKING:
    from rich.console import Console

    from mla_convert.bench.decode import DecodeReport

EXAMPLES = """
mla-convert bench decode
mla-convert bench decode --subject layer --history 1024 --history 8192
mla-convert bench decode --backend reference --json
"""
SUBJECTS = ("smollm2", "layer")
DEFAULT_HISTORIES = "4096, 16384"


def command(
    subject: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"{' or '.join(SUBJECTS)}. Can be repeated.", show_default="both"),
    ] = None,
    history: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Cached tokens before the step; rising.", show_default=DEFAULT_HISTORIES),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 7,
    prefill_tokens: Annotated[int, typer.Option(min=1, help="Prompt whose prefill is compared.")] = 1024,
    backend: Annotated[str, typer.Option(metavar="NAME", help="Decode backend of the absorbed contender.")] = "auto",
    seed: Seed = 0,
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Time one decode step of three contenders by turns, and print ratios.

    Stock transformers expands the latent cache of the converted model, ours reads it as it is, the source reads the
    keys and values of its own heads. Ends with exit code 3 where a bar does not hold.
    """

    def body() -> DecodeResult:
        from mla_convert.bench.decode import DecodeRequest, run_decode
        from mla_convert.errors import UsageFault

        standard = DecodeRequest()
        names = tuple(subject) if subject else standard.subjects
        unknown = [name for name in names if name not in SUBJECTS]
        if unknown:
            raise UsageFault("no such subject", expected=", ".join(SUBJECTS), found=unknown[0], where="--subject")
        histories = tuple(history) if history else standard.histories
        if list(histories) != sorted(set(histories)):
            raise UsageFault("histories must rise", found=", ".join(map(str, histories)), where="--history")
        request = DecodeRequest(names, histories, repeats, prefill_tokens, backend, seed)
        return DecodeResult(run_decode(request))

    run_command(json_output, body, debug=debug)


@dataclass(frozen=True)
class DecodeResult:
    """A report and how it is printed."""

    report: DecodeReport

    @property
    def exit_code(self) -> int:
        """3 where a bar does not hold."""
        return 3 if self.report.missed else 0

    def to_json(self) -> Mapping[str, object]:
        """See `DecodeReport.to_json`."""
        return self.report.to_json()

    def render(self, console: Console) -> None:
        """One table for all subjects."""
        from rich.table import Table

        table = Table(title=f"One decode step, batch 1, {self.report.threads} threads; ratios of medians by turns")
        for heading in ("subject", "cached", "stock / ours", "source / ours", "our cache", "source's cache"):
            table.add_column(heading, justify="left" if heading == "subject" else "right")
        for subject in self.report.subjects:
            for row in subject.rows:
                table.add_row(
                    subject.name,
                    f"{row.history:,}",
                    f"{row.stock_over_absorbed:.2f}",
                    f"{row.source_over_absorbed:.2f}",
                    f"{row.cache_bytes:,} B",
                    f"{row.source_cache_bytes:,} B",
                )
        console.print(table)
        for subject in self.report.subjects:
            console.print(
                f"{subject.name}: {subject.description}; prefill over stock's {subject.prefill_over_stock:.3f}"
            )
        for line in self.report.missed:
            console.print(f"missed: {line}", style="red")
