"""A subpackage that is not listed in pyproject.toml vanishes from the wheel without a word. Not here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
MAPPED = {name: ROOT / folder for name, folder in SETUPTOOLS["package-dir"].items()}
LINKS = ("adapt", "convert", "eval", "manifests")


def package_folders() -> dict[str, Path]:
    """Every folder below the package's roots that holds Python files, by its dotted name."""
    found = {}
    for package, root in MAPPED.items():
        for folder, subfolders, files in os.walk(root):
            # A link leads to a folder that has a root of its own.
            subfolders[:] = [s for s in subfolders if s != "__pycache__" and not Path(folder, s).is_symlink()]
            if any(name.endswith(".py") for name in files):
                below = Path(folder).relative_to(root).parts
                found[".".join([package, *below])] = Path(folder)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy, so that nothing is left in the checkout."""
    copy = tmp_path_factory.mktemp("source") / "copy"
    copy.mkdir()
    for name in ("mla_convert", *LINKS):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(out.glob("*.whl"))


def test_the_package_list_equals_the_folders() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(package_folders())


def test_every_package_folder_has_an_init_file() -> None:
    assert [name for name, folder in package_folders().items() if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("name", LINKS)
def test_the_links_for_static_tools_are_relative_and_lead_to_the_folders(name: str) -> None:
    link = ROOT / "mla_convert" / name

    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


def test_the_wheel_holds_every_module_once_and_every_data_file(wheel: Path) -> None:
    expected = {
        f"{package.replace('.', '/')}/{path.name}"
        for package, folder in package_folders().items()
        for path in folder.glob("*.py")
    }
    expected |= {"mla_convert/py.typed"}
    expected |= {
        f"mla_convert/manifests/schemas/{path.name}" for path in (ROOT / "manifests" / "schemas").glob("*.json")
    }
    expected |= {
        f"mla_convert/eval/report/templates/{path.name}" for path in (ROOT / "eval" / "report" / "templates").iterdir()
    }
    with zipfile.ZipFile(wheel) as archive:
        held = [name for name in archive.namelist() if ".dist-info/" not in name]
        licences = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]

    assert sorted(held) == sorted(expected)
    assert len(licences) == 1


def test_the_installed_wheel_is_complete_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import mla_convert.convert, mla_convert.adapt, mla_convert.eval, mla_convert.manifests as m;"
        "from mla_convert.cli.main import run; print(m.__file__); run(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[0]).is_relative_to(tmp_path)
    assert "Usage: mla-convert" in done.stdout
