"""`mla-convert frontier`: what each cache width is predicted, and measured, to lose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_convert.cli.common import Debug, JsonFlag, Seed, run_command
from mla_convert.cli.convert_options import (
    CALIBRATION_TOKENS,
    CALIBRATION_WINDOW,
    CalibrationTokens,
    CalibrationWindow,
    Dtype,
    Profile,
    TextField,
)
from mla_convert.cli.inspect import Revision, Source, open_revision
from mla_convert.errors import UsageFault
from mla_convert.eval import defaults

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mla_convert.bench.frontier_report import FrontierPoint, FrontierReport

HELP = (
    "For each cache width, try how it can be split between the rotary key and the latent, and print what each split "
    "is predicted to lose, from the closed form's residuals on calibration text and without running a converted model. "
    "With --measure the best split of each width is also converted, loaded again from its files and evaluated."
)
EXAMPLES = """
mla-convert frontier SOURCE --calibration books/ --widths 192,128,96
mla-convert frontier SOURCE --calibration books/ --text heldout.txt --widths 50%,25% --measure --plot frontier.png
mla-convert frontier SOURCE --calibration books/ --text heldout.txt --widths 192 --measure-all --recipe mha2mla --json
"""
COLUMNS = ("plan", "width", "bytes", "predicted KL", "KL", "ppl", "ratio", "95 %", "top-1")

CalibrationText = Annotated[
    list[str],
    typer.Option(metavar="PATH", help="Text file, JSONL, folder of them, or datasets:NAME. Can be repeated."),
]
Widths = Annotated[
    str, typer.Option(metavar="N,N%,…", help="Cached numbers per token and layer, or shares of the source's.")
]
HeldOutText = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="Held-out text, for the source's perplexity and --measure. Can be repeated."),
]
Measure = Annotated[bool, typer.Option("--measure", help="Measure the best split of each width.")]
MeasureAll = Annotated[bool, typer.Option("--measure-all", help="Measure every split.")]
Recipe = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Published method to measure at each width as well. Can be repeated."),
]
Slots = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,…",
        help="Rotary slots to try at each width; a slot is two numbers.",
        show_default="an eighth to a half of the width",
    ),
]
MaxTokens = Annotated[int, typer.Option(min=2, help="Tokens of held-out text.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Picture of KL against cache bytes per token.")]


def command(
    source: Source,
    calibration: CalibrationText,
    widths: Widths,
    text: HeldOutText = None,
    measure: Measure = False,
    measure_all: MeasureAll = False,
    recipe: Recipe = None,
    slots: Slots = None,
    profile: Profile = "auto",
    dtype: Dtype = "source",
    calibration_tokens: CalibrationTokens = None,
    calibration_window: CalibrationWindow = CALIBRATION_WINDOW,
    max_tokens: MaxTokens = defaults.MAX_TOKENS,
    text_field: TextField = "text",
    plot: Plot = None,
    revision: Revision = None,
    seed: Seed = 0,
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Print the frontier of `source`."""

    def body() -> FrontierResult:
        from mla_convert.bench.frontier import FrontierRequest, run_frontier
        from mla_convert.convert.options import ConvertOptions

        _refuse_plot(plot)
        options = ConvertOptions(
            profile=profile,
            dtype=dtype,
            calibration=tuple(calibration),
            calibration_tokens=calibration_tokens or CALIBRATION_TOKENS,
            calibration_window=calibration_window,
            text_field=text_field,
            seed=seed,
        )
        request = FrontierRequest(
            options=options,
            widths=widths,
            text=tuple(text or ()),
            slots=None if slots is None else _counts(slots),
            recipes=tuple(dict.fromkeys(recipe or ())),
            measure="all" if measure_all else "best" if measure else "none",
            max_tokens=max_tokens,
        )
        return _finish(run_frontier(open_revision(source, revision), request), plot)

    run_command(json_output, body, debug=debug)


def _finish(report: FrontierReport, plot: Path | None) -> FrontierResult:
    if plot is not None:
        from mla_convert.bench.frontier_plot import draw

        draw(report, plot)
    return FrontierResult(report, plot)


def _refuse_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix.lower() != ".png":
        raise UsageFault("not a PNG file", expected="a name that ends in .png", found=str(plot), where="--plot")
    if not plot.expanduser().absolute().parent.is_dir():
        raise UsageFault("no folder for the picture", where=str(plot.parent))


def _counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageFault("not numbers of slots", expected="such as 16,20,24", found=text, where="--slots")
    return tuple(sorted({int(part) for part in parts}))


@dataclass(frozen=True)
class FrontierResult:
    """A frontier and how it is printed."""

    report: FrontierReport
    plot: Path | None

    def to_json(self) -> Mapping[str, object]:
        """See `FrontierReport.to_json`."""
        return {**self.report.to_json(), "plot": self.plot}

    def render(self, console: Console) -> None:
        """One table, and under it the agreement of prediction and measurement, and the conditions."""
        from rich.text import Text

        console.print(self._table())
        for line in (*self._agreement(), *self._conditions()):
            console.print(Text(line), soft_wrap=True)

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        for heading in COLUMNS:
            table.add_column(heading, justify="left" if heading == "plan" else "right", no_wrap=True)
        source = self.report.source
        perplexity = "" if source.perplexity is None else f"{source.perplexity:.2f}"
        table.add_row("source", str(source.width), f"{source.bytes_per_token:,}", "", "", perplexity)
        for point in self.report.points:
            table.add_row(*map(Text, _cells(point)), style="bold" if point.best else "")
        return table

    def _agreement(self) -> list[str]:
        lines = ["* the split of its width that is predicted to lose least"]
        for row in self.report.rank_agreement():
            where = "all plans" if row.width is None else f"width {row.width}"
            value = "no order to compare" if row.spearman is None else f"{row.spearman:.3f}"
            lines.append(f"Spearman of predicted with measured KL, {where} ({row.plans}): {value}")
        return lines

    def _conditions(self) -> list[str]:
        report, text = self.report, self.report.text
        calibrated = f"{report.calibration_tokens:,} tokens of {', '.join(report.calibration)}"
        lines = [f"model       {report.model}", f"calibrated  {calibrated}"]
        if text is not None:
            windows = f"windows of {text.window}, stride {text.stride}, seed {text.seed}; float32"
            lines += [
                f"text        {', '.join(text.names)}",
                f"sha256      {text.sha256}",
                f"tokens      {text.tokens:,} in {windows}",
            ]
        lines.append("width: numbers cached per token and layer; KL in nats per token; ratio: to the source's ppl")
        return lines if self.plot is None else [*lines, f"picture     {self.plot}"]


def _cells(point: FrontierPoint) -> tuple[str, ...]:
    predicted = "" if point.predicted_kl is None else f"{point.predicted_kl:.3g}"
    start = (
        f"{point.name}{' *' if point.best else ''}",
        str(point.width),
        f"{point.bytes_per_token:,}",
        predicted,
    )
    if point.measured is None:
        return start
    figures, intervals = point.measured.figures, point.measured.intervals
    spread = "" if intervals is None else f"{intervals.ratio.low:.3f}–{intervals.ratio.high:.3f}"
    return (
        *start,
        f"{figures.kl:.3g}",
        f"{figures.target_perplexity:.2f}",
        f"{figures.ratio:.4f}",
        spread,
        f"{figures.top1_agreement:.1%}",
    )
