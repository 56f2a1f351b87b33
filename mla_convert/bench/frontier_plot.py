"""The picture of a frontier: divergence against cache bytes per token, both axes logarithmic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_convert.bench.frontier_report import FrontierPoint, FrontierReport

WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 9.0, 5.5, 140
# Okabe and Ito's palette, told apart with every common colour blindness; markers differ as well.
PREDICTED, MEASURED, SOURCE = "#0072B2", "#D55E00", "#000000"
RECIPE_COLOURS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999")
RECIPE_MARKERS = ("^", "v", "D", "P", "X", "*")


@dataclass(frozen=True)
class Series:
    """Points that are drawn alike.

    Attributes:
        label: In the legend.
        colour: Hexadecimal.
        marker: matplotlib's.
        filled: Whether markers are filled.
        joined: Whether a line joins the points.
        x: Cache bytes per token, ascending where joined.
        y: `KL(source ‖ target)`, nats per token.
    """

    label: str
    colour: str
    marker: str
    filled: bool
    joined: bool
    x: tuple[int, ...]
    y: tuple[float, ...]


def series_of(report: FrontierReport) -> tuple[Series, ...]:
    """What is drawn, without empty series; a divergence of zero has no place on a logarithmic axis."""
    ours = [point for point in report.points if point.recipe is None]
    best, rest = [point for point in ours if point.best], [point for point in ours if not point.best]
    found = [
        _series("predicted, best split of each width", PREDICTED, "o", best, predicted=True, joined=True),
        _series("predicted, other splits", PREDICTED, ".", rest, predicted=True, joined=False),
        _series("measured, best split of each width", MEASURED, "s", best, predicted=False, joined=True),
        _series("measured, other splits", MEASURED, "x", rest, predicted=False, joined=False),
    ]
    names = dict.fromkeys(point.recipe for point in report.points if point.recipe is not None)
    for index, name in enumerate(names):
        colour, marker = (row[index % len(row)] for row in (RECIPE_COLOURS, RECIPE_MARKERS))
        points = [point for point in report.points if point.recipe == name]
        found.append(_series(f"measured, recipe {name}", colour, marker, points, predicted=False, joined=True))
    return tuple(series for series in found if series.x)


def _series(
    label: str, colour: str, marker: str, points: list[FrontierPoint], *, predicted: bool, joined: bool
) -> Series:
    pairs = sorted((point.bytes_per_token, kl) for point in points if (kl := _kl(point, predicted)) is not None)
    positive = [(size, kl) for size, kl in pairs if kl > 0]
    x, y = tuple(size for size, _ in positive), tuple(kl for _, kl in positive)
    return Series(label, colour, marker, not predicted, joined, x, y)


def _kl(point: FrontierPoint, predicted: bool) -> float | None:
    if predicted:
        return point.predicted_kl
    return None if point.measured is None else point.measured.figures.kl


def title_of(report: FrontierReport) -> str:
    """Model, text and tokens, in two lines."""
    model = Path(report.model).name or report.model
    if report.text is None:
        return f"{model}\npredicted from {report.calibration_tokens:,} calibration tokens; nothing was measured"
    names = ", ".join(Path(name).name for name in report.text.names)
    return f"{model}\n{report.text.tokens:,} held-out tokens of {names}; calibrated on {report.calibration_tokens:,}"


def source_label(report: FrontierReport) -> str:
    """The source's line in the legend."""
    perplexity = report.source.perplexity
    size = f"source: KL 0 at {report.source.bytes_per_token:,} bytes ({report.source.dtype})"
    return size if perplexity is None else f"{size}, perplexity {perplexity:.2f}"


def draw(report: FrontierReport, path: Path) -> None:
    """Write the picture of a report as a PNG of 1,260 × 770 pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
    axes: Any = figure.add_subplot()
    for series in series_of(report):
        axes.plot(
            series.x,
            series.y,
            label=series.label,
            color=series.colour,
            marker=series.marker,
            markerfacecolor=series.colour if series.filled else "white",
            linestyle="-" if series.joined else "none",
            linewidth=1.2,
        )
    axes.axvline(report.source.bytes_per_token, color=SOURCE, linestyle="--", linewidth=1, label=source_label(report))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _name_ticks(axes, report)
    axes.set_xlabel(f"cache bytes per token, all layers ({report.points[0].dtype})")
    axes.set_ylabel("KL(source ‖ target), nats per token")
    axes.set_title(title_of(report), fontsize=11)
    axes.grid(visible=True, which="both", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    # Without pyplot there is no window and no global state: a figure saves itself with the Agg backend.
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _name_ticks(axes: Any, report: FrontierReport) -> None:
    """Ticks at the sizes that occur and at 1, 2 and 5 times powers of ten, as plain numbers."""
    from matplotlib.ticker import LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    sizes = sorted({report.source.bytes_per_token, *(point.bytes_per_token for point in report.points)})
    axes.set_xticks(sizes, labels=[f"{size:,}" for size in sizes], fontsize=8)
    axes.minorticks_off()
