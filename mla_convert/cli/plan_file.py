"""Options of a command from a YAML file, with the types that they have on the command line."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from mla_convert.errors import UsageFault


def read_plan_file(path: Path, options: Mapping[str, Any]) -> dict[str, object]:
    """Options by parameter name, from a YAML mapping whose keys are the long option names.

    Dashes and underscores are the same. Null stands for the default. Ranges are left to the command line, which
    takes what is returned here as its defaults.

    Args:
        path: The file.
        options: Type of each legal option, without `Annotated`.

    Raises:
        UsageFault: If the file is no such mapping, or a key is unknown or repeated, or a value has another type
            than its option; with file and line.
    """
    found: dict[str, object] = {}
    for key, line, value in _rows(path):
        where, name = f"{path}, line {line}", key.replace("-", "_")
        if name not in options:
            (nearest,) = difflib.get_close_matches(name, options, n=1, cutoff=0.0)
            raise UsageFault("no such option", found=key, where=where, remedy=f"The nearest is {nearest}.")
        if name in found:
            raise UsageFault("an option set twice", found=key, where=where)
        found[name] = None if value is None else _of_type(options[name], value, f"{where}, {key}")
    return found


def _rows(path: Path) -> list[tuple[str, int, object]]:
    """Key, line and value of each entry; keys written twice come twice."""
    import yaml

    try:
        document = yaml.compose(path.expanduser().read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if document is None:
            return []
        if not isinstance(document, yaml.MappingNode):
            raise UsageFault("not a mapping", expected="an option and its value on each line", where=str(path))
        build = yaml.constructor.SafeConstructor().construct_object
        return [(str(key.value), key.start_mark.line + 1, build(value, deep=True)) for key, value in document.value]
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageFault(f"unreadable YAML: {' '.join(str(error).split())}", where=str(path)) from error


def _of_type(hint: Any, value: object, where: str) -> object:
    """`value` as an option of this type takes it.

    YAML reads `0123456` as a number and `off` as a truth value, so nothing is turned into text here.
    """
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kind = next(member for member in members if member is not types.NoneType)
    if kind is bool:
        right, expected = isinstance(value, bool), "true or false"
    elif kind is int:
        right, expected = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif kind is float:
        right, expected = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif get_origin(kind) is Literal:
        choices = get_args(kind)
        # freqfold: 2 is as good as freqfold: "2"; a truth value never stands for a word.
        number = isinstance(value, int) and not isinstance(value, bool) and str(value) in choices
        value = str(value) if number else value
        right, expected = value in choices, f"one of {', '.join(choices)}"
    elif get_origin(kind) is list:
        value = [value] if isinstance(value, str) else value
        right = isinstance(value, list) and all(isinstance(item, str) for item in value)
        expected = "a string or a list of strings"
    else:
        right, expected = isinstance(value, str), "a string, in quotes where it looks like something else"
    if not right:
        raise UsageFault("a value of another type", expected=expected, found=repr(value), where=where)
    return value
