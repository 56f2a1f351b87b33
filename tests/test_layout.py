"""Limits on the shape of the code that no linter checks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("adapt", "convert", "eval", "manifests", "mla_convert", "tests")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# "path" or "path::function" -> why it may be longer.
LONGER: dict[str, str] = {
    "mla_convert/cli/convert.py::command": "a line for each option, and one to hand it on",
    "mla_convert/decode/triton_kernels.py::split_kernel": "a kernel's 49 arguments are 12 lines, handed on twice",
}

# Keyword arguments that load what they should refuse. `zip(..., strict=False)` is no loader.
FORBIDDEN_KEYWORDS = {("strict", False), ("weights_only", False), ("trust_remote_code", True)}


def source_files() -> list[Path]:
    """Every Python file of the repository, each once: links are not followed."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if not _linked(path))


def _linked(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(ROOT) and parent != ROOT)


def _nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path.relative_to(ROOT).as_posix(), node


def test_the_five_folders_are_at_the_top() -> None:
    for name in ("adapt", "convert", "eval", "manifests", "tests"):
        assert (ROOT / name / "__init__.py").is_file()


def test_every_source_file_is_seen_once() -> None:
    files = source_files()

    assert ROOT / "convert" / "__init__.py" in files
    assert ROOT / "mla_convert" / "convert" / "__init__.py" not in files
    assert len({path.resolve() for path in files}) == len(files)


def test_no_file_is_too_long() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in source_files()
    }

    assert {n: size for n, size in lengths.items() if size > MAX_FILE_LINES and n not in LONGER} == {}


def test_no_function_is_too_long() -> None:
    lengths = {
        f"{path}::{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, node in _nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    assert {n: size for n, size in lengths.items() if size > MAX_FUNCTION_LINES and n not in LONGER} == {}


def test_the_list_of_longer_ones_names_only_what_exists() -> None:
    functions = {f"{path}::{node.name}" for path, node in _nodes() if isinstance(node, ast.FunctionDef)}
    files = {path.relative_to(ROOT).as_posix() for path in source_files()}

    assert set(LONGER) <= functions | files


def test_nothing_is_loaded_loosely() -> None:
    found = [
        f"{path}:{node.lineno} {keyword.arg}={keyword.value.value}"
        for path, node in _nodes()
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id == "zip")
        for keyword in node.keywords
        if isinstance(keyword.value, ast.Constant) and (keyword.arg, keyword.value.value) in FORBIDDEN_KEYWORDS
    ]

    assert found == []
