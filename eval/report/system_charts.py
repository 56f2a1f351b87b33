"""Charts of where the error comes from, of cache and speed, and of the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mla_convert.eval.report.chart import GRID, MUTED, SOURCE, TARGET, THIRD, Chart
from mla_convert.eval.report.frontier_file import FrontierFile, FrontierPoint
from mla_convert.eval.report.grids import plain_log_ticks
from mla_convert.eval.report.table import Row, Table, row, table
from mla_convert.eval.report.words import bytes_text, number, short
from mla_convert.manifests.evaluation.ladder import DecompositionSection
from mla_convert.manifests.evaluation.systems import CacheFigures, SpeedRow, SystemsSection

WIDTH = 9.0
COLOURS: Final = {"source": SOURCE, "target": TARGET}
NAMES: Final = {"source": "source", "target": "converted"}
MEASURES: Final = (
    ("time to first token, s", "ttft_s"),
    ("time per further token, s", "tpot_s"),
    ("tokens per second", "tokens_per_s"),
    ("goodput, tokens per second", "goodput_tokens_per_s"),
)
SPEED_COLUMNS = (
    "prompt tokens",
    "new tokens",
    "batch",
    "model",
    "repeats",
    *(name for name, _ in MEASURES),
    "peak memory",
)


def decomposition_chart(section: DecompositionSection) -> Chart:
    """The parts of the error, each with the others held fixed."""
    title = "Where the error comes from"
    parts = section.parts

    def draw(figure: Any) -> None:
        axes: Any = figure.add_subplot()
        measured = [part.error for part in parts if part.error]
        if measured:
            axes.set_xscale("log")
            axes.set_xlim(min(measured) / 10, max(measured) * 10)
            plain_log_ticks(axes.xaxis, *axes.get_xlim())
        for place, part in enumerate(parts):
            if part.error:
                axes.barh(place, part.error, color=TARGET, height=0.6)
            text = "not measured" if part.error is None else number(part.error)
            at = part.error or axes.get_xlim()[0]
            axes.annotate(text, (at, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_yticks(range(len(parts)), labels=[f"{part.name}: {short(part.variant)}" for part in parts])
        axes.set_ylim(len(parts) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("relative error of the attention output, worst layer")

    rows = [row([part.name, part.variant, part.error, part.held_fixed, part.note or ""]) for part in parts]
    content = table(title, ["part", "variant", "error", "held fixed", "note"], rows)
    words = f"Each part with the others held fixed, over {section.tokens:,} tokens; the scale is logarithmic."
    return Chart("decomposition", title, words, WIDTH, 1.2 + 0.36 * max(2, len(parts)), draw, content)


def cache_chart(cache: Sequence[CacheFigures]) -> Chart:
    """Bytes per token of the live cache: by formula, held by rows, resident."""
    title = "Cache, bytes per token"

    def draw(figure: Any) -> None:
        axes: Any = figure.add_subplot()
        for place, figures in enumerate(cache):
            bars = (
                (figures.formula_bytes_per_token, GRID),
                (figures.payload_bytes_per_token, COLOURS[figures.subject]),
                (figures.resident_bytes / figures.tokens, MUTED),
            )
            for index, (value, colour) in enumerate(bars):
                at = place + 0.26 * (index - 1)
                axes.barh(at, value, height=0.24, color=colour)
                axes.annotate(
                    bytes_text(value), (value, at), (4, 0), textcoords="offset points", va="center", fontsize=8
                )
        names = [f"{NAMES[figures.subject]}, {figures.tokens:,} tokens" for figures in cache]
        axes.set_yticks(range(len(cache)), labels=names)
        axes.set_ylim(len(cache) - 0.5, -0.5)
        axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("bytes per token: by formula (light), held by rows (colour), resident (dark)")

    words = "Three bars a model: the formula's, what rows hold in the live cache, and what is resident in memory."
    return Chart("cache", title, words, WIDTH, 1.1 + 0.75 * len(cache), draw, _cache_table(title, cache))


def _cache_table(title: str, cache: Sequence[CacheFigures]) -> Table:
    columns = [
        "model",
        "tokens",
        "dtype",
        "numbers per token",
        "formula",
        "rows",
        "scales",
        "metadata",
        "page",
        "resident",
    ]
    rows = [
        row(
            [
                NAMES[figures.subject],
                figures.tokens,
                figures.dtype,
                figures.numbers_per_token,
                figures.formula_bytes_per_token,
                figures.payload_bytes_per_token,
                figures.scale_bytes,
                figures.metadata_bytes,
                figures.page_bytes,
                figures.resident_bytes,
            ]
        )
        for figures in cache
    ]
    return table(f"{title}; formula and rows are per token, the rest in all", columns, rows)


def speed_chart(systems: SystemsSection) -> Chart | None:
    """Latency and throughput beside the source; None where they were withheld or not measured."""
    if systems.withheld is not None or not systems.rows:
        return None
    title = "Speed beside the source"
    groups = list(dict.fromkeys((entry.prompt_tokens, entry.batch) for entry in systems.rows))

    def draw(figure: Any) -> None:
        for axes, (name, field) in zip(figure.subplots(2, 2).flat, MEASURES, strict=True):
            for offset, subject in ((-0.2, "source"), (0.2, "target")):
                found = [entry for entry in systems.rows if entry.subject == subject]
                places = [groups.index((entry.prompt_tokens, entry.batch)) + offset for entry in found]
                heights = [getattr(entry, field) or 0.0 for entry in found]
                axes.bar(places, heights, width=0.38, color=COLOURS[subject], label=NAMES[subject])
            axes.set_title(name)
            axes.set_xticks(range(len(groups)), labels=[f"{tokens:,}\n× {batch}" for tokens, batch in groups])
            axes.grid(visible=False, axis="x")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2)
        figure.supxlabel("prompt tokens × batch", fontsize=10)

    words = "Medians on the same machine in the same run, by prompt length and batch; for times less is better."
    return Chart("speed", title, words, WIDTH, 5.6, draw, speed_table(title, systems.rows))


def speed_table(title: str, entries: Sequence[SpeedRow]) -> Table:
    """Every figure of every run."""
    return table(title, SPEED_COLUMNS, map(_speed_row, entries))


def _speed_row(entry: SpeedRow) -> Row:
    return row(
        [
            entry.prompt_tokens,
            entry.new_tokens,
            entry.batch,
            NAMES[entry.subject],
            entry.repeats,
            *(getattr(entry, field) for _, field in MEASURES),
            entry.peak_bytes,
        ]
    )


def frontier_chart(frontier: FrontierFile) -> Chart:
    """Divergence against cache bytes, predicted and measured."""
    title = "The frontier: divergence against cache"
    points = frontier.points
    own, papers = ([p for p in points if (p.recipe is None) is ours] for ours in (True, False))

    def draw(figure: Any) -> None:
        axes: Any = figure.add_subplot()
        _series(axes, [(p, p.predicted_kl) for p in own], "predicted", SOURCE, "o")
        _series(axes, [(p, p.measured.kl if p.measured else None) for p in own], "measured", TARGET, "s")
        _series(axes, [(p, p.measured.kl if p.measured else None) for p in papers], "published methods", THIRD, "^")
        axes.axvline(
            frontier.source.bytes_per_token, color=MUTED, linestyle="--", linewidth=1, label="the source's cache"
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis, *axes.get_ylim())
        sizes = sorted({frontier.source.bytes_per_token, *(point.bytes_per_token for point in points)})
        axes.set_xticks(sizes, labels=[bytes_text(size) for size in sizes], fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("cache bytes per token, all layers")
        axes.set_ylabel("KL(source ‖ converted), nats")
        figure.legend(loc="outside upper left", ncols=4)

    words = f"Plans of {short(frontier.model, 60)}; both axes are logarithmic. Best of its width: filled."
    return Chart("frontier", title, words, WIDTH, 5.0, draw, _frontier_table(title, points))


def _frontier_table(title: str, points: Sequence[FrontierPoint]) -> Table:
    columns = [
        "plan",
        "width",
        "bytes per token",
        "predicted KL",
        "measured KL",
        "perplexity",
        "ratio",
        "same first token",
    ]
    rows = []
    for point in points:
        done = point.measured
        measured = (None,) * 4 if done is None else (done.kl, done.target_perplexity, done.ratio, done.top1_agreement)
        name = f"{point.name}{' (best of its width)' if point.best else ''}"
        rows.append(row([name, point.width, point.bytes_per_token, point.predicted_kl, *measured]))
    return table(title, columns, rows)


def _series(
    axes: Any, pairs: Sequence[tuple[FrontierPoint, float | None]], name: str, colour: str, marker: str
) -> None:
    for best in (True, False):
        chosen = [(p.bytes_per_token, kl) for p, kl in pairs if kl is not None and kl > 0 and p.best is best]
        if chosen:
            x, y = zip(*sorted(chosen), strict=True)
            axes.plot(
                x,
                y,
                color=colour,
                marker=marker,
                markerfacecolor=colour if best else "none",
                linestyle="-" if best and len(chosen) > 1 else "none",
                label=f"{name}, best" if best else name,
            )
