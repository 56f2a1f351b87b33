"""Conversions of a tiny model, made once per session, and a cache of its own for every run of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import REAL_ASSETS, PicoFactory
from tests.eval.helpers import LOSSLESS, LOSSY, EvalPair, open_pair


@pytest.fixture(scope="session")
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that ends with the session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(request: pytest.FixtureRequest, private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of tiny models leave nothing in the user's cache; the real model's states are kept there."""
    if not set(REAL_ASSETS) & set(request.fixturenames):
        monkeypatch.setenv("MLA_CONVERT_CACHE", str(private_cache))


@pytest.fixture(scope="session")
def lossless(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory) -> EvalPair:
    """Two KV heads, everything kept. Read only."""
    return open_pair(pico("llama", kv_heads=2), tmp_path_factory.mktemp("lossless"), LOSSLESS)


@pytest.fixture(scope="session")
def lossy(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory) -> EvalPair:
    """The same source with a cache of 36 of 64 numbers. Read only."""
    return open_pair(pico("llama", kv_heads=2), tmp_path_factory.mktemp("lossy"), LOSSY)
