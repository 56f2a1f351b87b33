"""Tables: the figures of a chart, or of a section, as text that a machine can read back unrounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mla_convert.eval.report.words import number, visible
from mla_convert.manifests.evaluation.figure import Figure


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: As shown.
        value: The unrounded number behind it, None for text.
    """

    text: str
    value: float | int | None = None


@dataclass(frozen=True)
class Row:
    """One row; its first cell is its heading.

    Attributes:
        cells: As many as there are columns.
        muted: Whether the row says nothing for or against the conversion.
        bad: Whether it says something against it.
    """

    cells: tuple[Cell, ...]
    muted: bool = False
    bad: bool = False


@dataclass(frozen=True)
class Table:
    """A caption, columns and rows."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


Content = str | float | int | Figure | None | Cell


def row(contents: Iterable[Content], *, muted: bool = False, bad: bool = False) -> Row:
    """A row; a `Figure` takes three cells: value, low and high."""
    return Row(tuple(cell for content in contents for cell in _cells(content)), muted=muted, bad=bad)


def table(caption: str, columns: Sequence[str], rows: Iterable[Row]) -> Table:
    """A table whose rows all have a cell for each column.

    Raises:
        ValueError: One has not.
    """
    made = Table(caption, tuple(columns), tuple(rows))
    if any(len(one.cells) != len(columns) for one in made.rows):
        raise ValueError(f"{caption}: a row has another number of cells than there are columns ({len(columns)})")
    return made


def figure_columns(name: str) -> tuple[str, str, str]:
    """Headings of the three cells of a `Figure`."""
    return name, f"{name}, low", f"{name}, high"


def _cells(content: Content) -> tuple[Cell, ...]:
    if isinstance(content, Figure):
        return tuple(_cell(value) for value in (content.value, content.low, content.high))
    return (_cell(content),)


def _cell(content: str | float | int | Cell | None) -> Cell:
    if isinstance(content, Cell):
        return content
    if isinstance(content, str):
        return Cell(visible(content))
    return Cell(number(content), content)
