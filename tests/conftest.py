"""Environment of the test run, and the fixtures that every folder shares."""

from __future__ import annotations

import os

# Before any import of transformers, huggingface_hub or tokenizers: they read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import hypothesis
import numpy as np
import pytest
import torch

from mla_convert.assets.smollm2 import smollm2_folder
from mla_convert.assets.wikipedia import WikipediaSplits, write_splits
from mla_convert.cache_dir import cache_root
from mla_convert.errors import EnvironmentFault
from tests.pico import PicoOptions, make_pico

PicoFactory = Callable[..., Path]
REAL_ASSETS = ("smollm2", "wikipedia")
T = TypeVar("T")
# Examples are a function of the test and no deadline depends on the machine's load, here as in CI.
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Set the thread count that `MLA_CONVERT_TEST_THREADS` asks for; without it torch decides."""
    threads = os.environ.get("MLA_CONVERT_TEST_THREADS")
    if threads is not None:
        torch.set_num_threads(int(threads))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers in every test, in whatever order or process it runs."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def pico(tmp_path_factory: pytest.TempPathFactory) -> PicoFactory:
    """`pico(family="llama", **options)`: folder of a tiny model, made once per session. Read only.

    A test that changes files calls `tests.pico.make_pico` on its own folder.
    """
    made: dict[str, Path] = {}

    def get(family: str = "llama", **options: object) -> Path:
        key = f"{family} {PicoOptions(**options)!r}"  # type: ignore[arg-type]
        if key not in made:
            made[key] = make_pico(tmp_path_factory.mktemp(f"pico-{family}"), family, **options)  # type: ignore[arg-type]
        return made[key]

    return get


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that asks for a downloaded asset, so that `-m "not real_model"` leaves them out."""
    for item in items:
        if set(REAL_ASSETS) & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.real_model)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real SmolLM2-135M-Instruct in float32, kept in the cache. Read only."""
    return _obtain("SmolLM2-135M-Instruct", smollm2_folder)


@pytest.fixture(scope="session")
def wikipedia() -> WikipediaSplits:
    """Real text in two files that share no article, kept in the cache. Read only."""
    return _obtain("the Wikipedia text", lambda: write_splits(cache_root() / "text"))


def _obtain(name: str, make: Callable[[], T]) -> T:
    """What cannot be downloaded fails in CI, and is skipped with the reason elsewhere."""
    try:
        return make()
    except EnvironmentFault as fault:
        reason = f"{name} is not available: {fault}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
