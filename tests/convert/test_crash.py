"""A process that dies in the middle of a conversion, without a chance to clean up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mla_convert.convert import reload_check, reload_child
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert
from mla_convert.manifests.digest import sha256_file
from mla_convert.manifests.verify import verify_folder
from tests.conftest import PicoFactory
from tests.convert.conftest import ConvertedFactory

# Each step of the work at which the process kills itself, by the function that is about to run.
STEPS = {
    "before the first layer": "target.TargetWriter.write_layer, 0",
    "in the third layer": "target.TargetWriter.write_layer, 2",
    "before the head": "target.TargetWriter.write_head, 0",
    "before the configuration": "run.write_json, 0",
    "before the check": "run.check_reload, 0",
    "before the manifest": "run.build_manifest, 0",
    "before the rename": "checkpoint_writer.FolderTransaction.commit, 0",
    # Renames so far: of the one shard and of the manifest.
    "at the rename": "checkpoint_writer.os.replace, 2",
}
# With an old folder in the way: that one is moved aside first.
REPLACING = {"before the check": "run.check_reload, 0", "between the renames": "checkpoint_writer.os.replace, 3"}
DIE = """
import importlib, os, signal, sys
from pathlib import Path
from mla_convert.convert import reload_check, reload_child
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert

source, out, overwrite, *steps = sys.argv[1:]
reload_check._run_child = reload_child.compare

def die_at(step):
    path, calls = step.split(", ")
    module, *parts = path.split(".")
    owner = importlib.import_module(f"mla_convert.convert.{module}")
    for part in parts[:-1]:
        owner = getattr(owner, part)
    original, left = getattr(owner, parts[-1]), int(calls)

    def wrapped(*arguments, **options):
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return original(*arguments, **options)

    setattr(owner, parts[-1], wrapped)
    return lambda: setattr(owner, parts[-1], original)

for step in steps:
    # One fork for each step: importing torch takes longer than a conversion.
    child = os.fork()
    if child == 0:
        die_at(step)
        convert(source, Path(out) / step.replace(".", "-"), ConvertOptions(lossless=True), overwrite=overwrite == "yes")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir())}


def die(source: Path, parent: Path, steps: list[str], overwrite: bool = False) -> list[int]:
    """Exit codes of one conversion for each step, into `parent / step`."""
    done = subprocess.run(
        [sys.executable, "-c", DIE, str(source), str(parent), "yes" if overwrite else "no", *steps],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def place(parent: Path, step: str) -> Path:
    return parent / {**STEPS, **REPLACING}[step].replace(".", "-")


@pytest.fixture(scope="module")
def source_before(pico: PicoFactory) -> dict[str, str]:
    return digests(pico())


@dataclass(frozen=True)
class Killed:
    """Runs killed one after the other: exit code by step, outputs side by side in one folder."""

    parent: Path
    codes: dict[str, int]


@pytest.fixture(scope="module")
def killed(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory, source_before: dict[str, str]) -> Killed:
    parent = tmp_path_factory.mktemp("killed")
    codes = die(pico(), parent, list(STEPS.values()))
    return Killed(parent, dict(zip(STEPS, codes, strict=True)))


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_run_leaves_no_output(
    killed: Killed, pico: PicoFactory, source_before: dict[str, str], step: str
) -> None:
    assert killed.codes[step] == -signal.SIGKILL
    assert not place(killed.parent, step).exists()
    # What is left is hidden and says what it is.
    left = [path.name for path in killed.parent.iterdir() if place(killed.parent, step).name in path.name]
    assert len(left) == 1
    assert left[0].startswith(".")
    assert "incomplete" in left[0]
    assert digests(pico()) == source_before


def test_a_killed_run_that_replaces_leaves_the_old_folder(
    pico: PicoFactory, converted: ConvertedFactory, tmp_path: Path
) -> None:
    old = converted(source={"kv_heads": 2}).folder
    for step in REPLACING:
        shutil.copytree(old, place(tmp_path, step))

    assert die(pico(), tmp_path, list(REPLACING.values()), overwrite=True) == [-signal.SIGKILL] * 2

    assert digests(place(tmp_path, "before the check")) == digests(old)
    # In the instant between two renames no folder has the name, but the old one is whole beside it.
    aside = list(tmp_path.glob(f".{place(tmp_path, 'between the renames').name}.replaced-*"))
    assert [digests(folder) for folder in aside] == [digests(old)]


@pytest.mark.parametrize("step", ["in the third layer", "at the rename"])
def test_a_run_after_that_succeeds(
    killed: Killed, pico: PicoFactory, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(reload_check, "_run_child", reload_child.compare)
    out = place(killed.parent, step)

    convert(str(pico()), out, ConvertOptions(lossless=True), command=["test"])

    assert verify_folder(out).ok


def test_a_run_killed_from_outside_leaves_no_output(pico: PicoFactory, tmp_path: Path) -> None:
    """The parent kills as soon as the incomplete folder holds something: wherever that happens to be."""
    script = (
        "import sys; from pathlib import Path; from mla_convert.convert.options import ConvertOptions\n"
        "from mla_convert.convert.run import convert\n"
        "convert(sys.argv[1], Path(sys.argv[2]), ConvertOptions(lossless=True))"
    )
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", script, str(pico()), str(out)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".out.incomplete-*/*")):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        child.kill()
        child.wait()

    assert child.returncode == -signal.SIGKILL
    assert not out.exists()


def test_a_terminated_command_cleans_up_behind_itself(pico: PicoFactory, tmp_path: Path) -> None:
    """SIGTERM is how schedulers and containers end a process; unlike SIGKILL it leaves time to tidy up."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "mla_convert.cli.main", "convert", str(pico()), str(out), "--lossless"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob(".out.incomplete-*/*")):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        child.terminate()
        messages = child.stderr.read()

    assert child.returncode == 143
    assert messages.splitlines()[-1] == "error: terminated"
    assert list(tmp_path.iterdir()) == []
