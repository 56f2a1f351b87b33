"""Where a checkpoint cannot be written is said before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_convert.convert import run
from mla_convert.convert.checkpoint_writer import absolute, check_writable
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert
from mla_convert.errors import EnvironmentFault, UsageFault
from tests.conftest import PicoFactory


@pytest.mark.parametrize("out", [".", ""])
def test_the_working_directory_is_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageFault, match="working directory"):
        absolute(Path(out))


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    assert absolute(Path("~/out")) == tmp_path / "out"


@pytest.mark.parametrize("out", ["file/out", "n" * 250])
def test_a_place_that_takes_no_folder_is_refused_before_work(
    pico: PicoFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(run, "digest_of_source", lambda _source: pytest.fail("work has begun"))

    with pytest.raises(EnvironmentFault, match="no folder can be made"):
        convert(str(pico()), tmp_path / out, ConvertOptions(lossless=True))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_look_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "newer" / "out")

    assert list(tmp_path.iterdir()) == []
