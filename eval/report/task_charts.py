"""Position and retrieval tasks: needle heat maps, source beside converted, and the table of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mla_convert.eval.report.chart import Chart
from mla_convert.eval.report.grids import Grid, add_colour_bar, draw_grid, linear_scale
from mla_convert.eval.report.table import Row, Table, figure_columns, row, table
from mla_convert.eval.report.words import percent
from mla_convert.manifests.evaluation.tasks import TaskCell, TasksSection

WIDTH = 9.0
_LABEL_COLUMNS = 8
COLUMNS = (
    "task",
    "length",
    "depth",
    "prompts",
    "tokens of an answer",
    "source log p",
    "converted log p",
    "chance log p",
    *figure_columns("difference"),
    "source right",
    "converted right",
    "verdict",
)


def needle_chart(tasks: TasksSection) -> Chart | None:
    """Log-probability of the needle by depth and length, side by side; None where it was not run."""
    cells = [cell for cell in tasks.cells if cell.task == "needle" and cell.depth is not None]
    if not cells:
        return None
    depths, lengths = sorted({cell.depth or 0.0 for cell in cells}), sorted({cell.length for cell in cells})
    places = {(cell.depth, cell.length): cell for cell in cells}
    source = _grid(places, depths, lengths, of_source=True)
    target = _grid(places, depths, lengths, of_source=False)

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        scale = linear_scale([*source.shown, *target.shown])
        for axes, grid, name in ((left, source, "source"), (right, target, "converted")):
            draw_grid(axes, grid, scale)
            axes.set_title(name)
            axes.set_xlabel("length, tokens")
        left.set_ylabel("depth")
        add_colour_bar(figure, [left, right], scale, "log p of the answer, nats")

    silent = sum(cell.verdict == "uninformative" for cell in cells)
    lost = sum(cell.verdict == "lost" for cell in cells)
    words = (
        "Colour: log-probability of the answer; number: share of prompts answered right. "
        f"{len(cells)} cells: {lost} lost, {silent} uninformative (hatched: the source itself fails there)."
    )
    title = "Needle in a haystack: source and converted"
    content = table(title, COLUMNS, map(task_row, cells))
    return Chart("needle", title, words, WIDTH, 1.5 + 0.36 * max(3, len(depths)), draw, content)


def task_table(tasks: TasksSection, *, needle: bool) -> Table | None:
    """Every cell that no chart shows; None where there is none."""
    cells = [cell for cell in tasks.cells if cell.task != "needle" or cell.depth is None or needle]
    return table("Position and retrieval tasks", COLUMNS, map(task_row, cells)) if cells else None


def task_row(cell: TaskCell) -> Row:
    """All figures of one cell; uninformative ones are muted."""
    contents = [
        cell.task,
        cell.length,
        cell.depth,
        cell.prompts,
        cell.answer_tokens,
        cell.source_logprob,
        cell.target_logprob,
        cell.chance_logprob,
        cell.difference,
        cell.source_match,
        cell.target_match,
        cell.verdict,
    ]
    return row(contents, muted=cell.verdict == "uninformative", bad=cell.verdict == "lost")


def _grid(
    places: dict[tuple[float | None, int], TaskCell],
    depths: Sequence[float],
    lengths: Sequence[int],
    *,
    of_source: bool,
) -> Grid:
    cells = [[places.get((depth, length)) for length in lengths] for depth in depths]
    texts = [[_match(cell, of_source=of_source) for cell in line] for line in cells]
    return Grid(
        values=tuple(
            tuple(None if cell is None else cell.source_logprob if of_source else cell.target_logprob for cell in line)
            for line in cells
        ),
        rows=tuple(percent(depth) for depth in depths),
        columns=tuple(f"{length:,}" for length in lengths),
        hatched=frozenset(
            (i, j)
            for i, line in enumerate(cells)
            for j, cell in enumerate(line)
            if cell is not None and cell.verdict == "uninformative"
        ),
        texts=tuple(map(tuple, texts)) if len(lengths) <= _LABEL_COLUMNS else (),
    )


def _match(cell: TaskCell | None, *, of_source: bool) -> str:
    if cell is None:
        return ""
    return f"{100 * (cell.source_match if of_source else cell.target_match):.0f} %"
