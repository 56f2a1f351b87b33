"""`mla-convert report`: one HTML file of a conversion and its evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_convert.cli.common import Debug, JsonFlag, run_command
from mla_convert.errors import UsageFault

if TYPE_CHECKING:
    from rich.console import Console

REPORT_NAME = "report.html"
HELP = (
    "Write one self-contained HTML file of a converted folder: what was converted, how it was evaluated, and every "
    "figure as a chart and as a table. It opens from disk without network. The folder is verified first; parts that "
    "have not been evaluated are named as such."
)
EXAMPLES = """
mla-convert report OUT
mla-convert report OUT --frontier frontier.json --output page.html
mla-convert report OUT --figures figures --format svg
"""


class FigureFormat(StrEnum):
    """Of the figures' files."""

    png = "png"
    svg = "svg"


def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Converted folder.")],
    receipt: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Receipt of its evaluation; else the newest in OUT/receipts."),
    ] = None,
    frontier: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What mla-convert frontier --json printed.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each chart into this folder as well, for a paper.")
    ] = None,
    image_format: Annotated[
        FigureFormat | None, typer.Option("--format", help="Format of those files; png where none is named.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"Where to write; else OUT/{REPORT_NAME}.")
    ] = None,
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Write the report of `out`."""

    def body() -> ReportResult:
        folder = out.expanduser()
        target = folder / REPORT_NAME if output is None else output.expanduser()
        _refuse_places(folder, target, figures, image_format)
        from mla_convert.eval.report.inputs import read_inputs
        from mla_convert.eval.report.page import Report

        given = read_inputs(folder, receipt, frontier)
        report = Report.of(given)
        drawn: tuple[Path, ...] = ()
        if figures is not None:
            figures.expanduser().mkdir(exist_ok=True)
            drawn = report.write_figures(figures.expanduser(), (image_format or FigureFormat.png).value)
        size = report.write(target)
        used = None if given.receipt_file is None else given.receipt_file.path
        return ReportResult(target, size, used, given.manifest_sha256, report.missing, drawn)

    run_command(json_output, body, debug=debug)


def _refuse_places(folder: Path, target: Path, figures: Path | None, image_format: FigureFormat | None) -> None:
    """What would do nothing, has no folder to be written to, or would make the converted folder fail `verify`."""
    if image_format is not None and figures is None:
        raise UsageFault("--format would do nothing", expected="--figures DIR with it", where="--format")
    places = [("--output", target)] + ([] if figures is None else [("--figures", figures.expanduser())])
    for option, place in places:
        if not place.absolute().parent.is_dir():
            raise UsageFault("no folder to write to", where=str(place.parent))
        inside = place.resolve().is_relative_to(folder.resolve())
        if inside and place.resolve() != (folder / REPORT_NAME).resolve():
            raise UsageFault(
                "a converted folder holds what its manifest lists",
                expected=f"{REPORT_NAME} in it, or a place outside",
                found=str(place),
                where=option,
            )
    if target.is_dir():
        raise UsageFault("a folder", expected="a file", where=str(target))
    if figures is not None and figures.expanduser().exists() and not figures.expanduser().is_dir():
        raise UsageFault("a file", expected="a folder", where=str(figures))


@dataclass(frozen=True)
class ReportResult:
    """What was written.

    Attributes:
        path: The report.
        size: Bytes of it.
        receipt: The evaluation that it shows, None for a conversion alone.
        manifest_sha256: Of the manifest that it shows.
        missing: Sections that had nothing to show.
        figures: Files of the charts.
    """

    path: Path
    size: int
    receipt: Path | None
    manifest_sha256: str
    missing: tuple[str, ...]
    figures: tuple[Path, ...]

    def to_json(self) -> Mapping[str, object]:
        """All of it."""
        return {
            "report": self.path,
            "bytes": self.size,
            "receipt": self.receipt,
            "manifest_sha256": self.manifest_sha256,
            "missing": self.missing,
            "figures": self.figures,
        }

    def render(self, console: Console) -> None:
        """Where it is, what it is made of and what is missing."""
        from rich.text import Text

        lines = [f"report   {self.path} ({self.size:,} bytes)"]
        lines.append(f"receipt  {'none: the conversion alone' if self.receipt is None else self.receipt}")
        if self.missing:
            lines.append(f"missing  {', '.join(self.missing)}")
        if self.figures:
            lines.append(f"figures  {len(self.figures)} in {self.figures[0].parent}")
        for line in lines:
            console.print(Text(line), soft_wrap=True)
