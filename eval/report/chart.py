"""One chart: how it is drawn, as part of the page and as a file of its own.

Charts are drawn once, in the colours of the light theme. In the page each of those is replaced by a CSS variable, so
that one drawing reads well in both themes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure as Canvas

from mla_convert.eval.report.table import Table

ImageFormat = Literal["png", "svg"]

INK, MUTED, GRID, SURFACE = "#1b1f24", "#57606b", "#d0d7df", "#fefefd"
# Okabe and Ito's palette, told apart with every common colour blindness.
SOURCE, TARGET, THIRD, FAULT = "#0072b3", "#d55e01", "#009e74", "#b00021"
VARIABLES: Final[Mapping[str, str]] = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    SURFACE: "--surface",
    SOURCE: "--source",
    TARGET: "--target",
    THIRD: "--third",
    FAULT: "--fault",
}
# Fewer than matplotlib's 50, above which it draws a colour bar as a bitmap.
COLOUR_STEPS = 48
PIXELS_PER_INCH, PAPER_DOTS_PER_INCH = 96, 300
# Below this share of its natural size the text of a chart is too small: its box scrolls instead.
SMALLEST_SHARE = 0.8
FONT_POINTS = 10


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        key: Name of its file, and prefix of its ids; lower-case letters and dashes.
        title: What it shows.
        description: How to read it, and what it says.
        width: Inches.
        height: Inches.
        draw: Draws it onto an empty figure.
        table: The same figures as text.
    """

    key: str
    title: str
    description: str
    width: float
    height: float
    draw: Callable[[Canvas], None]
    table: Table

    @property
    def pixels(self) -> int:
        """Natural width on the page."""
        return round(self.width * PIXELS_PER_INCH)

    @property
    def least_pixels(self) -> int:
        """Width below which its box scrolls."""
        return round(self.pixels * SMALLEST_SHARE)

    def inline(self) -> Markup:
        """The chart as an `svg` element for the page; what it is labelled with, matplotlib has escaped."""
        with _style("none"), warnings.catch_warnings():
            # The browser has fonts for what DejaVu lacks.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            return Markup(_inlined(self, _saved(self, "svg")))

    def write(self, folder: Path, kind: ImageFormat) -> Path:
        """Write the chart as a file for a paper: letters as outlines, 300 dots per inch, white behind."""
        path = folder / f"{self.key}.{kind}"
        with _style("path"):
            path.write_bytes(_saved(self, kind))
        return path


@contextmanager
def _style(fonttype: str) -> Iterator[None]:
    """Settings of matplotlib for the drawing, put back afterwards; some of them cannot be given otherwise."""
    settings: Any = {
        "axes.axisbelow": True,
        "axes.edgecolor": MUTED,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.labelcolor": INK,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": FONT_POINTS,
        "axes.titlecolor": INK,
        "figure.facecolor": "none",
        "font.family": "DejaVu Sans",
        "font.size": FONT_POINTS,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "hatch.color": MUTED,
        "hatch.linewidth": 0.6,
        "legend.frameon": False,
        "legend.labelcolor": INK,
        "lines.linewidth": 1.6,
        "svg.fonttype": fonttype,
        "svg.hashsalt": "mla-convert report",
        "text.color": INK,
        # A `$` in the name of a text is no formula.
        "text.parse_math": False,
        "xtick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.color": MUTED,
        "ytick.labelcolor": INK,
    }
    # On top of the defaults: the report does not depend on a user's matplotlibrc.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        yield


def _saved(chart: Chart, kind: ImageFormat) -> bytes:
    figure = Canvas(figsize=(chart.width, chart.height), layout="constrained")
    chart.draw(figure)
    buffer = io.BytesIO()
    if kind == "png":
        figure.savefig(buffer, format="png", dpi=PAPER_DOTS_PER_INCH, facecolor="white", metadata={"Software": None})
    else:
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _inlined(chart: Chart, svg: bytes) -> str:
    """The `svg` element alone, named for screen readers, its ids unique in the page, its colours variable."""
    text = svg.decode()
    body = text[text.index(">", text.index("<svg ")) + 1 : text.rindex("</svg>")]
    view_box = re.search(r'viewBox="([^"]+)"', text)
    if view_box is None:
        raise ValueError("matplotlib wrote an svg without viewBox")
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # matplotlib's own style element is for `*`: in a page it would style everything. The page's CSS has the same.
    body = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = _in_tags(body, chart.key)
    key, title, description = chart.key, escape(chart.title), escape(chart.description)
    return (
        f'<svg class="chart" viewBox="{view_box[1]}" role="img" aria-labelledby="{key}-title {key}-desc"'
        f' style="width: {chart.pixels}px; min-width: {chart.least_pixels}px">'
        f'<title id="{key}-title">{title}</title><desc id="{key}-desc">{description}</desc>{body.strip()}</svg>'
    )


def _in_tags(body: str, key: str) -> str:
    """Rewrite ids, links and colours inside tags only: between them is text, which is left as it is."""

    def rewrite(match: re.Match[str]) -> str:
        tag = re.sub(r'(?<= )id="', f'id="{key}-', match[0])
        tag = re.sub(r'xlink:href="#', f'href="#{key}-', tag)
        tag = tag.replace("url(#", f"url(#{key}-")
        tag = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", tag)
        return re.sub(r"#[0-9a-f]{6}\b", lambda colour: _variable(colour[0]), tag)

    return re.sub(r"<[^>]+>", rewrite, body)


def _variable(colour: str) -> str:
    return f"var({VARIABLES[colour]})" if colour in VARIABLES else colour
