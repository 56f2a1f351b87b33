"""Case 21: a conversion holds two layers at most, whatever the depth of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.memory import memory_bound
from mla_convert.convert.statistics import LayerStatistics
from tests.conftest import PicoFactory
from tests.convert import memory_child
from tests.convert.support import measured, random_layer, tensors_of
from tests.eval.helpers import write_text
from tests.pico import make_pico

# 14 MB a layer in float32.
DEEP = {"heads": 8, "kv_heads": 2, "head_dim": 32, "hidden_size": 256, "intermediate_size": 4096, "num_layers": 12}
FLAT = {**DEEP, "intermediate_size": 64, "num_layers": 2}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="private memory is read from Linux' /proc")
def test_case_21_layers_are_streamed(tmp_path: Path) -> None:
    deep = make_pico(tmp_path / "deep", weight_std=0.02, **DEEP)
    flat = make_pico(tmp_path / "flat", weight_std=0.02, **FLAT)
    text = write_text(tmp_path / "text.txt", 2000, seed=1)
    command = [sys.executable, memory_child.__file__, str(flat), str(deep), str(text), str(tmp_path)]
    # Freed blocks go back to the system, so that what is resident is what is in use.
    frugal = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    root = str(Path(memory_child.__file__).parents[2])
    environment = {**os.environ, **frugal, "PYTHONPATH": root, "MLA_CONVERT_CACHE": str(tmp_path / "cache")}

    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    bound = memory_bound(open_source(str(deep)), 128, memory_child.BUDGET_BYTES)
    assert bound.states == memory_child.BUDGET_BYTES
    assert found["honest"] <= bound.total
    # The measurement sees the fault, and the bound leaves no room for it.
    layer = bound.layers // 4  # float32
    assert found["hoarding"] >= found["honest"] + (memory_child.KEPT_LAYERS - 1) * layer
    assert found["hoarding"] > bound.total


def test_the_bound_counts_what_there_is(pico: PicoFactory) -> None:
    source = open_source(str(pico(kv_heads=2)))
    attention, mlp = 48 * 64 * 2 + 48 * 32 * 2, 3 * 48 * 64

    bound = memory_bound(source, 100, 1 << 20)

    assert bound.embeddings == 97 * 48 * 4
    assert bound.layers == 2 * 8 * (attention + mlp + 2 * 48)
    assert bound.states == 100 * 48 * 4
    assert bound.total == bound.embeddings + bound.layers + bound.statistics + bound.states
    assert memory_bound(source, 100, 1000).states == 1000
    assert memory_bound(source, 0, 1000).statistics == memory_bound(source, 0, 1000).states == 0


def test_the_statistics_are_as_large_as_the_bound_says(pico: PicoFactory) -> None:
    source = open_source(str(pico(kv_heads=2)))
    statistics: LayerStatistics = measured(random_layer(source.shape, seed=1))
    size = sum(value.numel() * value.element_size() for value in tensors_of(statistics).values())

    # Less the number of tokens.
    assert memory_bound(source, 1, 0).statistics == 2 * (size - 8)
