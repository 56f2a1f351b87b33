"""Mutation run on the attention module: `python -m tests.mla.mutation_run` prints each change that no check finds.

Every operator, comparison, condition and number of `mla/attention.py` and `mla/stock_factors.py` is changed by itself,
and the checks of `attention_checks` are put to the changed copy until one fails.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.mla.attention_checks import CHECKS
from tests.mla.attention_mutants import SOURCES, imported

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Change:
    """One changed copy: of which module, where, and its source."""

    where: str
    line: int
    text: str
    source: str


def changes() -> Iterator[Change]:
    for where, source in SOURCES.items():
        tree = ast.parse(source)
        skipped = _not_computed(tree)
        for number, node in enumerate(ast.walk(tree)):
            if number in skipped:
                continue
            for variant in range(_variants(node)):
                changed = copy.deepcopy(tree)
                target = next(n for index, n in enumerate(ast.walk(changed)) if index == number)
                before = ast.unparse(target)
                _change(target, variant)
                yield Change(
                    where, getattr(node, "lineno", 0), f"{before} -> {ast.unparse(target)}", ast.unparse(changed)
                )


def _not_computed(tree: ast.Module) -> set[int]:
    """Annotations and what a raised error says: changing them changes no result."""
    parts: set[int] = set()
    for node in ast.walk(tree):
        roots: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            roots = [node.returns, *(argument.annotation for argument in (*node.args.args, *node.args.kwonlyargs))]
        elif isinstance(node, ast.AnnAssign):
            roots = [node.annotation]
        elif isinstance(node, ast.Raise):
            roots = [node.exc]
        parts |= {id(part) for root in roots if root is not None for part in ast.walk(root)}
    return {number for number, node in enumerate(ast.walk(tree)) if id(node) in parts}


def _variants(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp):
        return int(type(node.op) in BINARY)
    if isinstance(node, ast.Compare):
        return sum(type(op) in COMPARED for op in node.ops)
    if isinstance(node, ast.UnaryOp):
        return int(isinstance(node.op, ast.Not | ast.Invert | ast.USub))
    if isinstance(node, ast.Constant):
        return int(isinstance(node.value, int | float | bool))
    return int(isinstance(node, ast.BoolOp))


def _change(node: ast.AST, variant: int) -> None:
    if isinstance(node, ast.BinOp):
        node.op = BINARY[type(node.op)]()
    elif isinstance(node, ast.Compare):
        known = [index for index, op in enumerate(node.ops) if type(op) in COMPARED]
        node.ops[known[variant]] = COMPARED[type(node.ops[known[variant]])]()
    elif isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd() if not isinstance(node.op, ast.Not) else ast.Not()
        if isinstance(node.op, ast.Not):
            node.operand = ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.BoolOp):
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1


def killer(change: Change) -> str | None:
    """The check that fails on the changed copy, or None."""
    try:
        with imported({**SOURCES, change.where: change.source}) as modules:
            for name, check in CHECKS.items():
                try:
                    check(modules)
                except KeyboardInterrupt:
                    raise
                except BaseException:  # noqa: BLE001 - a changed copy fails in any way, and pytest's Failed is no Exception
                    return name
    except (SyntaxError, TypeError, ValueError, RuntimeError, AttributeError):
        return "import"
    return None


def main() -> int:
    """Print the survivors and how many there were of how many."""
    total, survivors = 0, 0
    for change in changes():
        total += 1
        if killer(change) is None:
            survivors += 1
            print(f"survived: {change.where}:{change.line}: {change.text}", flush=True)
    print(f"{total} changes, {survivors} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
