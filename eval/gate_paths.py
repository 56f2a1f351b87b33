"""Names of the figures of an evaluation receipt that a bar can be set for.

A path follows the receipt's fields from one of its parts: `ladder`, `decomposition`, `quality`, `tasks`, `generation`,
`systems`. It ends at

- a number;
- a figure with an interval, which stands for its value, or at its `.low` or `.high`;
- a list of records, which stands for how many there are;
- a text that may be absent (`systems.withheld`), which is 1 where it is there and 0 where it is not.

Items of a list are chosen by `[…]`: `*` for each of them, or the first of their keys (`KEYS`), comma-separated, as in
`tasks.cells[needle,512,0.5].difference.low` or `tasks.cells[needle].target_match`. A text is found by its name or by
the end of its path. `tasks.lost` and `tasks.needle.lost` count cells by verdict, of all tasks or of one.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Union, get_args, get_origin

from mla_convert.errors import InputRefused
from mla_convert.manifests.evaluation.figure import Figure
from mla_convert.manifests.evaluation.ladder import CacheRows, ErrorPart, LayerLadder
from mla_convert.manifests.evaluation.quality import PositionBucket, TextQuality
from mla_convert.manifests.evaluation.receipt import EvaluationReceipt
from mla_convert.manifests.evaluation.systems import CacheFigures, SpeedRow
from mla_convert.manifests.evaluation.tasks import TaskCell, TaskName, TasksSection, Verdict
from mla_convert.manifests.record import Record

PARTS: Final = ("ladder", "decomposition", "quality", "tasks", "generation", "systems")
KEYS: Mapping[type[Record], tuple[str, ...]] = {
    CacheFigures: ("subject", "tokens"),
    CacheRows: ("layer",),
    ErrorPart: ("name",),
    LayerLadder: ("index",),
    PositionBucket: ("first",),
    SpeedRow: ("subject", "prompt_tokens", "batch"),
    TaskCell: ("task", "length", "depth"),
    TextQuality: ("name",),
}
# A name in brackets may itself hold dots and brackets: it ends at the last one before a dot or the end.
_STEP = re.compile(r"(?P<name>[A-Za-z0-9_-]+)(?:\[(?P<selector>.+?)\](?=\.|$))?(?:\.(?=.)|$)")


@dataclass(frozen=True)
class Step:
    """One part of a path: a field, and which items of it where it is a list."""

    name: str
    selector: str | None


@dataclass(frozen=True)
class FoundFigure:
    """A figure by its whole name; None where the receipt does not have it."""

    figure: str
    value: float | None


@dataclass(frozen=True)
class GatePath:
    """A path that `parse_path` has checked against the receipt's fields."""

    text: str
    steps: tuple[Step, ...]

    def resolve(self, receipt: EvaluationReceipt) -> tuple[FoundFigure, ...]:
        """What the receipt has under this path, at least one; of items that are not there, one without a value."""
        found = tuple(_resolve(receipt, self.steps, ""))
        return found or (FoundFigure(self.text, None),)


def parse_path(text: str) -> GatePath:
    """Read a path.

    Raises:
        InputRefused: If the receipt's fields have no such figure.
    """
    steps, position = list[Step](), 0
    while position < len(text):
        match = _STEP.match(text, position)
        if match is None:
            raise InputRefused("not the name of a figure", expected="as in quality.overall.ratio", found=text)
        steps.append(Step(match["name"], match["selector"]))
        position = match.end()
    path = GatePath(text, tuple(steps))
    if not steps or steps[0].name not in PARTS:
        raise InputRefused("no such figure", expected=f"one that begins with {', '.join(PARTS)}", found=text)
    _check(EvaluationReceipt, path)
    return path


def _check(root: type[Record], path: GatePath) -> None:
    """Follow the fields' types.

    Raises:
        InputRefused: Where they do not lead to a number.
    """
    at, optional = root, False
    for number, step in enumerate(path.steps):
        if at is TasksSection and _counts(path.steps[number:]):
            return
        if step.name not in at.model_fields:
            raise InputRefused("no such figure", expected=_one_of(at), found=path.text)
        kind, optional = _without_none(at.model_fields[step.name].annotation)
        last = number + 1 == len(path.steps)
        if get_origin(kind) is tuple:
            kind = get_args(kind)[0]
            _check_items(kind, step, last, path)
            if step.selector is None:
                return
        elif step.selector is not None:
            raise InputRefused(f"{step.name} is no list to choose from", found=path.text)
        if isinstance(kind, type) and issubclass(kind, Record):
            at = kind
        elif not last:
            raise InputRefused(f"{step.name} has no parts", found=path.text)
        else:
            _check_end(kind, optional, step, path)
            return
    if at is not Figure:
        raise InputRefused("a part, where one figure is wanted", expected=_one_of(at), found=path.text)


def _one_of(record: type[Record]) -> str:
    names = [*record.model_fields]
    if record is TasksSection:
        names += [f"{verdict} (a count)" for verdict in get_args(Verdict)]
    return f"one of {', '.join(names)}"


def _check_items(kind: object, step: Step, last: bool, path: GatePath) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Record)):
        raise InputRefused(f"{step.name} is no figure", found=path.text)
    if step.selector is None and not last:
        raise InputRefused("a list without a choice", expected=f"{step.name}[*] or one of it", found=path.text)
    if step.selector is None or step.selector == "*":
        return
    if kind not in KEYS:
        raise InputRefused(f"items of {step.name} have no names", expected=f"{step.name}[*]", found=path.text)
    if len(_wanted(step.selector, KEYS[kind])) > len(KEYS[kind]):
        raise InputRefused("too many keys", expected=f"{step.name}[{','.join(KEYS[kind])}]", found=path.text)


def _check_end(kind: object, optional: bool, step: Step, path: GatePath) -> None:
    if kind not in (int, float, bool) and not (kind is str and optional):
        raise InputRefused(f"{step.name} is no number", found=path.text)


def _resolve(record: Record, steps: tuple[Step, ...], prefix: str) -> Iterator[FoundFigure]:
    """What lies under `record`; the steps have been checked, so only what is None can be missing."""
    if isinstance(record, TasksSection) and _counts(steps):
        yield FoundFigure(prefix + ".".join(step.name for step in steps), _count(record, steps))
        return
    step, rest = steps[0], steps[1:]
    inner = getattr(record, step.name)
    if step.selector is not None:
        for item in inner:
            keys = KEYS.get(type(item), ())
            if step.selector == "*" or _matches(item, step.selector, keys):
                label = ",".join(str(getattr(item, key)) for key in keys)
                yield from _resolve(item, rest, f"{prefix}{step.name}[{label}].")
    elif not rest:
        yield FoundFigure(prefix + step.name, _value(record, step.name))
    elif inner is not None:
        yield from _resolve(inner, rest, f"{prefix}{step.name}.")


def _value(record: Record, name: str) -> float | None:
    found = getattr(record, name)
    if isinstance(found, Figure):
        return found.value
    if isinstance(found, tuple):
        return float(len(found))
    kind, _ = _without_none(type(record).model_fields[name].annotation)
    if kind is str:
        return float(found is not None)
    return None if found is None else float(found)


def _counts(steps: tuple[Step, ...]) -> bool:
    """Whether steps below `tasks` count cells: a verdict, or a task and a verdict."""
    names = [step.name for step in steps]
    if any(step.selector is not None for step in steps) or not 1 <= len(names) <= 2:
        return False
    return names[-1] in get_args(Verdict) and (len(names) == 1 or names[0] in get_args(TaskName))


def _count(section: TasksSection, steps: tuple[Step, ...]) -> float | None:
    """Cells with that verdict; None where no cell was measured, so that nothing passes by not being run."""
    cells = [cell for cell in section.cells if len(steps) == 1 or cell.task == steps[0].name]
    return float(sum(cell.verdict == steps[-1].name for cell in cells)) if cells else None


def _matches(item: Record, selector: str, keys: tuple[str, ...]) -> bool:
    wanted = _wanted(selector, keys)
    return all(_same(getattr(item, key), text) for key, text in zip(keys, wanted, strict=False))


def _wanted(selector: str, keys: tuple[str, ...]) -> list[str]:
    """The keys that a selector names; a single key, which may be a path, holds its commas itself."""
    return [selector] if len(keys) == 1 else [text.strip() for text in selector.split(",")]


def _same(value: str | float | None, text: str) -> bool:
    if isinstance(value, str):
        return value == text or value.endswith(f"/{text}")
    try:
        return value is not None and value == float(text)
    except ValueError:
        return False


def _without_none(annotation: object) -> tuple[object, bool]:
    """A field's type, and whether it may be None."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    rest = [kind for kind in get_args(annotation) if kind is not type(None)]
    return rest[0], len(rest) < len(get_args(annotation))
