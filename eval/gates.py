"""Bars that an evaluation must meet, from a YAML file, compared without rounding.

A gates file maps figures of the receipt to bars::

    quality.overall.ratio: {at_most: 1.25}
    quality.overall.ratio.high: {at_most: 1.3}     # the upper end of its interval
    quality.domains[wiki.txt].kl: {at_most: 0.2}   # one text, by its name or the end of its path
    quality.domains[*].kl: {at_most: 0.4}          # every text
    ladder.findings: {at_most: 0}                  # how many there are
    tasks.needle.lost: {at_most: 0}                # cells with that verdict
    systems.withheld: {at_most: 0}                 # 0 where nothing was withheld, else 1

`gate_paths.py` says which figures there are. A figure that the receipt does not have fails its bar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from mla_convert.errors import InputRefused
from mla_convert.eval.gate_paths import GatePath, parse_path
from mla_convert.manifests.evaluation.receipt import EvaluationReceipt, GateResult

BARS: Final = ("at_most", "at_least")
# JSON's numbers. YAML's own would let `1:30` be ninety and `1e-3` a text.
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")
EXAMPLE = "quality.overall.ratio: {at_most: 1.25}"


@dataclass(frozen=True)
class Gate:
    """One bar; at least one of its ends is given.

    Attributes:
        path: Which figure.
        at_most: Largest value that passes.
        at_least: Smallest value that passes.
    """

    path: GatePath
    at_most: float | None
    at_least: float | None

    def judge(self, figure: str, measured: float | None) -> GateResult:
        """Compare one value, exactly; None fails."""
        passed = (
            measured is not None
            and (self.at_most is None or measured <= self.at_most)
            and (self.at_least is None or measured >= self.at_least)
        )
        return GateResult(figure=figure, at_most=self.at_most, at_least=self.at_least, measured=measured, passed=passed)


def check_gates(receipt: EvaluationReceipt, gates: Sequence[Gate]) -> tuple[GateResult, ...]:
    """Hold a receipt against its bars.

    Args:
        receipt: The evaluation.
        gates: The bars.

    Returns:
        One result for each figure, in the order of the gates; a gate on several figures gives one for each.
    """
    return tuple(gate.judge(found.figure, found.value) for gate in gates for found in gate.path.resolve(receipt))


def load_gates(file: Path) -> tuple[Gate, ...]:
    """Read a gates file; everything in it is checked, so that no work is done for a bar that cannot be met.

    Raises:
        InputRefused: Naming the line of what is wrong: no such figure, a bar that is no number, a key written twice,
            no bars at all.
    """
    root = _root(file)
    gates = []
    for key, node in _pairs(root, file, "figures with their bars", EXAMPLE):
        where = _where(file, key)
        try:
            path = parse_path(str(key.value))
        except InputRefused as error:
            raise InputRefused(
                error.message, expected=error.expected, found=error.found, where=where, remedy=error.remedy
            ) from error
        gates.append(_gate(path, node, file))
    if not gates:
        raise InputRefused("no bars in it", expected=EXAMPLE, where=str(file))
    return tuple(gates)


def _root(file: Path) -> yaml.Node:
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise InputRefused("no readable gates file", where=str(file), found=error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise InputRefused("not UTF-8 text", where=str(file), found=error.reason) from error
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = str(file) if mark is None else f"{file}, line {mark.line + 1}"
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise InputRefused("not YAML", where=where, found=" ".join(str(problem).split())) from error
    except RecursionError as error:
        raise InputRefused("not a gates file: nested too deeply", where=str(file)) from error
    if root is None:
        raise InputRefused("an empty gates file", expected=EXAMPLE, where=str(file))
    return root


def _gate(path: GatePath, node: yaml.Node, file: Path) -> Gate:
    bars: dict[str, float] = {}
    for key, value in _pairs(node, file, f"a bar for {path.text}", "{at_most: 1.25}"):
        if key.value not in BARS:
            raise InputRefused(
                "an unknown kind of bar", expected=" or ".join(BARS), found=str(key.value), where=_where(file, key)
            )
        bars[key.value] = _number(value, file)
    gate = Gate(path, bars.get("at_most"), bars.get("at_least"))
    if gate.at_most is None and gate.at_least is None:
        raise InputRefused(f"no bar for {path.text}", expected=" or ".join(BARS), where=_where(file, node))
    if gate.at_most is not None and gate.at_least is not None and gate.at_most < gate.at_least:
        raise InputRefused(
            "a bar that nothing can meet",
            expected="at_least no more than at_most",
            found=f"at_least {gate.at_least:g}, at_most {gate.at_most:g}",
            where=_where(file, node),
        )
    return gate


def _pairs(node: yaml.Node, file: Path, what: str, example: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Keys and values of a mapping, each key once."""
    if not isinstance(node, yaml.MappingNode):
        raise InputRefused(f"not {what}", expected=example, found=_shown(node), where=_where(file, node))
    seen: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise InputRefused("a key that is no text", expected=example, where=_where(file, key))
        if key.value in seen:
            raise InputRefused(
                f"{key.value} is written twice", found=f"line {seen[key.value]} as well", where=_where(file, key)
            )
        seen[key.value] = key.start_mark.line + 1
        yield key, value


def _number(node: yaml.Node, file: Path) -> float:
    """A finite number, not in quotes."""
    if isinstance(node, yaml.ScalarNode) and node.style is None and _NUMBER.fullmatch(node.value):
        number = float(node.value)
        if math.isfinite(number):
            return number
    raise InputRefused("a bar that is no number", expected="a number", found=_shown(node), where=_where(file, node))


def _shown(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
    return repr(node.value) if len(node.value) <= 60 else f"{node.value[:60]!r}…"


def _where(file: Path, node: yaml.Node) -> str:
    return f"{file}, line {node.start_mark.line + 1}"
