"""What a verification found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Literal

from mla_convert.manifests.record import Record

ProblemKind = Literal["extra", "missing", "changed", "invalid"]


class VerifyProblem(Record):
    """One finding; `subject` is a file (`file:...`), a tensor (`tensor:...`) or a field of the manifest."""

    kind: ProblemKind
    subject: str
    expected: str | None
    found: str | None

    def render(self) -> str:
        """One line for a person."""
        parts = [f"{self.kind} {self.subject}"]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        return ": ".join([parts[0], ", ".join(parts[1:])]) if parts[1:] else parts[0]


class VerifyReport(Record):
    """Every problem of one folder; `ok` is true exactly where there is none."""

    ok: bool
    problems: tuple[VerifyProblem, ...]

    @classmethod
    def of(cls, problems: Iterable[VerifyProblem]) -> VerifyReport:
        """The report of these problems, in the order in which they were found."""
        found = tuple(problems)
        return cls(ok=not found, problems=found)


def problem(kind: ProblemKind, subject: str, expected: object = None, found: object = None) -> VerifyProblem:
    """A problem whose values are shown as JSON; None stands for 'nothing to show'."""
    return VerifyProblem(kind=kind, subject=_printable(subject), expected=_show(expected), found=_show(found))


def expect(subject: str, expected: object, found: object) -> Iterator[VerifyProblem]:
    """Nothing where both agree in value and in JSON type, else one 'changed' problem."""
    if not same(expected, found):
        shown = [json.dumps(value, default=str) for value in (expected, found)]
        yield problem("changed", subject, *shown)


def same(left: object, right: object) -> bool:
    """Equality that keeps true apart from 1 and treats tuples as lists."""
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _show(value: object) -> str | None:
    if value is None:
        return None
    return _printable(value) if isinstance(value, str) else json.dumps(value, default=str)


def _printable(text: str) -> str:
    # File and tensor names may hold bytes that are no UTF-8; they must still be nameable.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
