"""What `import mla_convert` gives."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import mla_convert
from tests.conftest import PicoFactory


def test_five_lines_convert_a_model(pico: PicoFactory, tmp_path: Path) -> None:
    from mla_convert import ConvertOptions, convert_checkpoint, verify_folder

    result = convert_checkpoint(str(pico()), tmp_path / "out", ConvertOptions(lossless=True))

    assert result.manifest.reload_check.passed
    assert verify_folder(tmp_path / "out", pico()).ok


@pytest.mark.parametrize("name", mla_convert.__all__)
def test_every_public_name_is_there_and_is_no_module(name: str) -> None:
    assert not isinstance(getattr(mla_convert, name), types.ModuleType)
    assert name in dir(mla_convert)


def test_a_name_keeps_its_meaning_after_the_subpackages_are_imported() -> None:
    """Importing a subpackage sets an attribute on the package, which must hide no public name."""
    folder = Path(mla_convert.__file__).parent
    submodules = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir() if path.is_dir()}

    assert submodules & set(mla_convert.__all__) == set()


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'transform'"):
        mla_convert.transform  # noqa: B018


def test_importing_the_package_imports_nothing_of_weight() -> None:
    code = "import sys, mla_convert; print(sorted({'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_what_type_checkers_see_is_what_is_imported() -> None:
    tree = ast.parse(Path(mla_convert.__file__).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: (f"{node.module}", alias.name)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert set(seen) == set(mla_convert.__all__) - {"__version__"}
    for name, (module, attribute) in seen.items():
        found = getattr(mla_convert, name)
        assert (found.__module__, found.__name__) == (module, attribute)
