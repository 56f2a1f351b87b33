"""One lossy conversion for all tests of the ladder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import PicoFactory
from tests.eval.ladder.cases import RIGHT, Case, make_case


@pytest.fixture(scope="session")
def lossy_case(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory, private_cache: Path) -> Case:
    """Read only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_CONVERT_CACHE", str(private_cache))
        return make_case(pico, tmp_path_factory.mktemp("ladder"), *RIGHT["lossy"])


@pytest.fixture(scope="session")
def half_cases(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory, private_cache: Path) -> dict[str, Case]:
    """The same in both half types. Read only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_CONVERT_CACHE", str(private_cache))
        return {
            dtype: make_case(pico, tmp_path_factory.mktemp(dtype), *RIGHT[dtype]) for dtype in ("bfloat16", "float16")
        }
