"""The page: everything filled into one template, and written in one step."""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mla_convert.eval.report.chart import Chart, ImageFormat
from mla_convert.eval.report.inputs import ReportInput
from mla_convert.eval.report.sections import Section, sections
from mla_convert.eval.report.summary import facts, failing, key_figures, source_name, verdict
from mla_convert.eval.report.words import number, visible

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Report:
    """A report that can be written.

    Attributes:
        given: What it is made of.
        sections: In their order.
    """

    given: ReportInput
    sections: tuple[Section, ...]

    @classmethod
    def of(cls, given: ReportInput) -> Report:
        """Lay out a report."""
        return cls(given, sections(given))

    @property
    def charts(self) -> tuple[Chart, ...]:
        """Every chart, in order."""
        return tuple(chart for section in self.sections for chart in section.charts)

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys of the sections that have nothing to show."""
        return tuple(section.key for section in self.sections if section.missing is not None)

    def html(self) -> str:
        """The page. The same input gives the same text."""
        style, script = (_text(name) for name in ("report.css", "report.js"))
        template = _environment().get_template("report.html.j2")
        given = self.given
        return template.render(
            title=f"{source_name(given.manifest)} → {given.name}",
            verdict=verdict(given),
            failing=failing(given.receipt),
            facts=facts(given),
            key_figures=key_figures(given),
            sections=self.sections,
            # Both are files of this package, not input.
            style=Markup(style),
            script=Markup(script),
            script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )

    def write(self, path: Path) -> int:
        """Write the page in one step and return its size in bytes."""
        content = self.html().encode()
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        return len(content)

    def write_figures(self, folder: Path, kind: ImageFormat) -> tuple[Path, ...]:
        """Write every chart as a file of its own."""
        return tuple(chart.write(folder, kind) for chart in self.charts)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["visible"] = visible
    environment.filters["number"] = number
    return environment


def _text(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
