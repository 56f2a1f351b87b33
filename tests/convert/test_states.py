"""Hidden states in memory and on disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_convert.convert.states import StateStore
from mla_convert.errors import EnvironmentFault

SIZE = 5 * 3 * 2 * 4


@pytest.mark.parametrize("budget", [SIZE, SIZE - 1], ids=["memory", "disk"])
def test_what_is_written_is_read(tmp_path: Path, budget: int) -> None:
    states = torch.randn(5, 3, 2)
    with StateStore(5, 3, 2, budget, tmp_path / "scratch") as store:
        store.write(slice(2, 5), states[2:])
        store.write(slice(0, 2), states[:2])

        assert (store.shape, store.nbytes) == ((5, 3, 2), SIZE)
        assert store.spilled is (budget < SIZE)
        assert (tmp_path / "scratch").exists() is store.spilled
        assert torch.equal(store.read(slice(1, 4)), states[1:4])
        assert torch.equal(store.read(slice(None)), states)
        assert store.read(slice(4, 9)).shape == (1, 3, 2)


@pytest.mark.parametrize("budget", [SIZE, 0], ids=["memory", "disk"])
def test_what_is_read_is_a_copy_and_what_is_written_is_one(tmp_path: Path, budget: int) -> None:
    mine = torch.zeros(5, 3, 2)
    with StateStore(5, 3, 2, budget, tmp_path) as store:
        store.write(slice(None), mine)
        mine += 1
        store.read(slice(0, 1)).add_(1)

        assert not store.read(slice(None)).any()
        store.write(slice(0, 1), torch.ones(1, 3, 2, dtype=torch.float64).transpose(0, 0))
        assert store.read(slice(0, 2)).sum() == 6


@pytest.mark.parametrize("budget", [SIZE, 0], ids=["memory", "disk"])
def test_wrong_shapes_and_steps_are_faults(tmp_path: Path, budget: int) -> None:
    store = StateStore(5, 3, 2, budget, tmp_path)
    with pytest.raises(ValueError, match=r"\(1, 3, 2\) for 2 windows"):
        store.write(slice(0, 2), torch.zeros(1, 3, 2))
    with pytest.raises(ValueError, match="in a row"):
        store.read(slice(0, 5, 2))
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.read(slice(0, 1))


def test_what_was_never_written_is_not_read_from_disk(tmp_path: Path) -> None:
    with StateStore(5, 3, 2, 0, tmp_path) as store:
        store.write(slice(0, 2), torch.zeros(2, 3, 2))
        with pytest.raises(ValueError, match="never written"):
            store.read(slice(1, 3))


def test_a_full_disk_is_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 1, SIZE - 1))

    with pytest.raises(EnvironmentFault, match="no room on the disk") as caught:
        StateStore(5, 3, 2, 0, tmp_path)
    assert caught.value.expected == f"{SIZE} bytes"
    StateStore(5, 3, 2, SIZE, tmp_path).close()


def test_nothing_is_left_of_the_file_even_by_a_killed_process(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, torch; from pathlib import Path; from mla_convert.convert.states import StateStore\n"
        "store = StateStore(5, 3, 2, 0, Path(sys.argv[1])); store.write(slice(None), torch.ones(5, 3, 2))\n"
        "assert store.spilled and float(store.read(slice(None)).sum()) == 30; os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, env={**os.environ})

    assert ended.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
