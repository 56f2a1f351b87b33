"""Mutation runs with mutmut: `python -m tests.mutation_run attention`, or `pages`; prints each change that survives.

mutmut (`pip install 'mla-convert[mutation]'`) does not follow links between folders, so it is given a copy of the tree
in which they are real. Tests that replace text of a module are left out: in its copies each function is there often.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("adapt", "convert", "eval", "manifests")
COPIED = ("mla_convert", "tests", *LINKED, "pyproject.toml")


@dataclass(frozen=True)
class Subject:
    """What is changed, and the tests that must notice."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()


SUBJECTS: Mapping[str, Subject] = {
    "attention": Subject(
        ("mla/attention.py", "mla/stock_factors.py"),
        ("tests/mla/test_attention.py",),
        ("test_a_named_pitfall_is_found", "test_an_undamaged_copy_passes"),
    ),
    "pages": Subject(
        tuple(
            f"decode/{name}.py"
            for name in (
                "addressing",
                "merge",
                "pages",
                "pool",
                "publication",
                "reference",
                "rows",
                "store",
                "torch_backend",
                "transaction",
                "values",
            )
        ),
        tuple(
            f"tests/decode/test_{name}.py"
            for name in ("addressing", "api", "merge", "pages", "publication", "rows", "torch_backend", "values")
        ),
    ),
}


def settings(subject: Subject) -> str:
    """mutmut's `setup.cfg`."""
    lists = {
        "only_mutate": [f"mla_convert/{module}" for module in subject.modules],
        "also_copy": [name for name in COPIED if name not in ("mla_convert", "tests")],
        "pytest_add_cli_args": ["-x", "-q"],
        "pytest_add_cli_args_test_selection": [
            *subject.tests,
            *(f"--deselect={subject.tests[0]}::{name}" for name in subject.without),
        ],
    }
    lines = ["[mutmut]", "source_paths=mla_convert", "use_git_change_detection=false", "track_dependencies=false"]
    for name, values in lists.items():
        lines += [f"{name}=", *(f" {value}" for value in values)]
    return "\n".join(lines) + "\n"


def run(subject: Subject, folder: Path) -> int:
    """Run mutmut in a copy of the tree and print what survives, each as a difference."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / name)
    for name in LINKED:
        (folder / "mla_convert" / name).unlink()
        shutil.copytree(folder / name, folder / "mla_convert" / name)
    (folder / "setup.cfg").write_text(settings(subject), encoding="utf-8")
    mutmut = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = subprocess.run([*mutmut, "run", "--max-children", "1"], cwd=folder, env=environment, check=False).returncode
    listed = subprocess.run([*mutmut, "results"], cwd=folder, capture_output=True, text=True, check=True).stdout
    for name, outcome in (line.strip().split(": ") for line in listed.splitlines() if ": " in line):
        shown = subprocess.run([*mutmut, "show", name], cwd=folder, capture_output=True, text=True, check=True).stdout
        print(f"{outcome}: {name}", *(line for line in shown.splitlines() if line[:2] in ("- ", "+ ")), sep="\n")
    return code


def main() -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=sorted(SUBJECTS))
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        return run(SUBJECTS[parser.parse_args().subject], Path(folder))


if __name__ == "__main__":
    sys.exit(main())
