"""What the source writes on from calibration windows: its own words, after openings that may be learned from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_convert.cache_dir import cache_root
from mla_convert.convert import continuation as module
from mla_convert.convert.continuation import Continuations, continue_windows
from mla_convert.convert.refine_fit import FitWindows
from tests.conftest import PicoFactory
from tests.convert.support import edit_json


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(pico: PicoFactory) -> Path:
    return pico()


WINDOWS = torch.arange(5 * 16).reshape(5, 16) + 3


def write(folder: Path, *, windows: Tensor = WINDOWS, tokens: int = 90, seed: int = 0, key: str = "k") -> Continuations:
    return continue_windows(folder, key, windows, [0, 2, 4], tokens, seed)


def test_whole_windows_begin_with_pieces_of_those_that_are_fitted_to(folder: Path) -> None:
    found = write(folder)

    assert found.ids.shape == (6, 16)
    assert found.record.windows == 6
    assert found.record.opening_tokens == 2
    pieces = {tuple(WINDOWS[number, start : start + 2].tolist()): number for number in range(5) for start in range(15)}
    assert len(pieces) == 5 * 15
    taken = [pieces[tuple(row[:2].tolist())] for row in found.ids]
    assert sorted(taken) == [0, 0, 2, 2, 4, 4]


def test_the_same_again_without_the_source_and_another_by_seed_or_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = write(folder)
    assert torch.equal(torch.get_rng_state(), state)
    with monkeypatch.context() as patch:
        patch.delattr(module, "SourceWriter")
        again = write(folder)
    assert torch.equal(again.ids, first.ids)
    assert again.record == first.record
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(cache_root() / "other"))
    torch.manual_seed(2)
    assert write(folder).record == first.record
    others = [write(folder, seed=1), write(folder, key="another"), write(folder, tokens=200)]
    assert others[0].record.sha256 != first.record.sha256
    # Another source or text is written anew; the same one comes out the same.
    assert others[1].record.sha256 == first.record.sha256
    assert others[2].ids.shape == (13, 16)


def test_a_source_that_always_ends_still_fills_its_windows(folder: Path) -> None:
    ends = list(range(3, 97, 2))
    edit_json(folder / "generation_config.json", eos_token_id=ends)

    written = write(folder).ids[:, 2:]

    assert not torch.isin(written, torch.tensor(ends)).any()


def test_a_fit_is_judged_by_the_users_windows_only() -> None:
    windows = FitWindows(torch.zeros(20, 4, dtype=torch.int64), given=16)

    train, held = windows.split(seed=3)

    assert len(held) == 2
    assert set(held) < set(range(16))
    assert set(train) == set(range(20)) - set(held)
