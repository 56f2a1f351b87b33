"""Heat maps of rectangular cells, with empty and uninformative ones told apart by hatching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mla_convert.eval.report.chart import COLOUR_STEPS, FAULT, GRID, INK, SURFACE

COLOURS: Final = colormaps["viridis"].resampled(COLOUR_STEPS)
_DARK_BELOW = 0.55
_DECADE = 10.0
_FEW_DECADES = 2


@dataclass(frozen=True)
class Grid:
    """Cells by row and column.

    Attributes:
        values: None where there is no cell.
        rows: Names, from the top.
        columns: Names, from the left.
        hatched: Cells that say nothing, as (row, column).
        marked: Cells with a cross, as (row, column).
        texts: Written into the cells; empty for none.
    """

    values: tuple[tuple[float | None, ...], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    hatched: frozenset[tuple[int, int]] = frozenset()
    marked: frozenset[tuple[int, int]] = frozenset()
    texts: tuple[tuple[str, ...], ...] = ()

    @property
    def shown(self) -> list[float]:
        """Values of the cells that are coloured."""
        return [
            value
            for i, line in enumerate(self.values)
            for j, value in enumerate(line)
            if value is not None and (i, j) not in self.hatched
        ]


def log_scale(values: Sequence[float]) -> LogNorm | None:
    """A logarithmic scale over the positive values, None where there are none."""
    positive = [value for value in values if value > 0]
    if not positive:
        return None
    low, high = min(positive), max(positive)
    # One value alone has no scale: it is given a decade.
    return LogNorm(low, high) if low < high else LogNorm(low / _DECADE, high * _DECADE)


def linear_scale(values: Sequence[float]) -> Normalize | None:
    """A linear scale over the values, None where there are none."""
    if not values:
        return None
    low, high = min(values), max(values)
    return Normalize(low, high) if low < high else Normalize(low - 1, high + 1)


def draw_grid(axes: Any, grid: Grid, scale: Normalize | None) -> None:
    """Draw the cells; those without a place on the scale, such as a zero on a logarithmic one, stay grey."""
    for i, line in enumerate(grid.values):
        for j, value in enumerate(line):
            if value is not None:
                _draw_cell(axes, grid, scale, (i, j), value)
    axes.set_xlim(-0.5, len(grid.columns) - 0.5)
    axes.set_ylim(len(grid.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(grid.rows)), labels=grid.rows)
    _name_columns(axes, grid.columns)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def add_colour_bar(figure: Any, axes: Any, scale: Normalize | None, label: str) -> None:
    """The scale beside the cells."""
    if scale is not None:
        bar = figure.colorbar(ScalarMappable(scale, COLOURS), ax=axes, label=label, pad=0.01, fraction=0.05, aspect=28)
        if isinstance(scale, LogNorm):
            plain_log_ticks(bar.ax.yaxis, float(scale.vmin or 1), float(scale.vmax or 1))
        bar.outline.set_visible(False)
        bar.ax.grid(visible=False)


def plain_log_ticks(axis: Any, low: float, high: float) -> None:
    """Ticks of a logarithmic axis as plain numbers, with some between powers of ten where there are few of those."""
    few = high < low * _DECADE**_FEW_DECADES
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_cell(axes: Any, grid: Grid, scale: Normalize | None, place: tuple[int, int], value: float) -> None:
    i, j = place
    coloured = scale is not None and place not in grid.hatched and not (isinstance(scale, LogNorm) and value <= 0)
    share = float(np.clip(scale(value), 0, 1)) if coloured and scale is not None else math.nan
    face = COLOURS(share) if coloured else GRID
    hatch = "////" if place in grid.hatched else None
    axes.add_patch(
        Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=face, edgecolor=SURFACE, linewidth=0.5, hatch=hatch),
    )
    if grid.texts:
        ink = INK if not coloured else "#ffffff" if share < _DARK_BELOW else "#000000"
        axes.text(j, i, grid.texts[i][j], ha="center", va="center", color=ink, fontsize=8)
    if place in grid.marked:
        axes.plot(j, i, marker="X", color=FAULT, markeredgecolor=SURFACE, markersize=9, linestyle="none")


def _name_columns(axes: Any, names: tuple[str, ...]) -> None:
    """At most some sixteen names: more would lie on each other."""
    step = math.ceil(len(names) / 16)
    places = range(0, len(names), step)
    axes.set_xticks(list(places), labels=[names[place] for place in places])
