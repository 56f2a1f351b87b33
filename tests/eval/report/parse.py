"""Reads a page back: its elements, and its tables as text and unrounded values."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = frozenset({"meta", "link", "img", "br", "hr", "input"})


@dataclass
class Element:
    """One start tag."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class ParsedTable:
    """One table: (text, value) of every cell of its body, value None where the cell has none."""

    caption: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[tuple[str, float | None]]] = field(default_factory=list)


class Page(HTMLParser):
    """The whole page. An end tag that closes another element than the last one opened is recorded as a fault."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.tables: list[ParsedTable] = []
        self.faults: list[str] = []
        self._open: list[Element] = []
        self.feed(text)
        self.close()
        self.faults += [f"never closed: {element.tag}" for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        if len(element.attributes) != len(attrs):
            self.faults.append(f"an attribute twice: {attrs}")
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)
        if tag == "table":
            self.tables.append(ParsedTable())
        elif tag == "tr" and self._inside("tbody"):
            self.tables[-1].rows.append([])
        elif tag in ("td", "th") and self._inside("tbody"):
            self.tables[-1].rows[-1].append(("", None))
        elif tag == "data" and self._inside("tbody"):
            self.tables[-1].rows[-1][-1] = ("", float(element.attributes["value"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1].tag != tag:
            self.faults.append(f"</{tag}> closes {self._open[-1].tag if self._open else 'nothing'}")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data
        if self._inside("caption"):
            self.tables[-1].caption += data
        elif self._inside("thead") and self._open[-1].tag == "th":
            self.tables[-1].columns.append(data)
        elif self._inside("tbody") and (self._inside("td") or self._inside("th")):
            text, value = self.tables[-1].rows[-1][-1]
            self.tables[-1].rows[-1][-1] = (text + data, value)

    def table(self, caption: str) -> ParsedTable:
        """The one table with this caption."""
        (found,) = (table for table in self.tables if table.caption == caption)
        return found

    def with_tag(self, *tags: str) -> list[Element]:
        """Elements of these tags, in order."""
        return [element for element in self.elements if element.tag in tags]

    def _inside(self, tag: str) -> bool:
        return any(element.tag == tag for element in self._open)


def values(table: ParsedTable) -> list[list[float]]:
    """The numbers of each row, cells without one left out."""
    return [[value for _, value in row if value is not None] for row in table.rows]
