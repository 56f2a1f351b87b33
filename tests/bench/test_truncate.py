"""A source cut to its first layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mla_convert.bench.truncate import truncate_source
from mla_convert.convert.checkpoint import open_source
from mla_convert.errors import UsageFault
from tests.conftest import PicoFactory
from tests.convert.support import load_stock, random_ids


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_first_layers_are_the_sources(pico: PicoFactory, tmp_path: Path, family: str) -> None:
    whole = pico(family, kv_heads=2, tie_word_embeddings=family == "qwen2")

    folder = truncate_source(open_source(str(whole)), 2, tmp_path / "cut")

    assert open_source(str(folder)).num_layers == 2
    assert (folder / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()
    assert len(json.loads((folder / "config.json").read_text()).get("layer_types") or [0, 0]) == 2
    ids = random_ids(97, 1, 12, seed=1)
    with torch.inference_mode():
        states = load_stock(whole)(ids, output_hidden_states=True).hidden_states
        cut = load_stock(folder)(ids, output_hidden_states=True).hidden_states
    # The last one has been through the final norm.
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(cut[:2], states[:2], strict=True))
    assert len(cut) == 3


@pytest.mark.parametrize("layers", [0, 5])
def test_other_depths_are_refused(pico: PicoFactory, tmp_path: Path, layers: int) -> None:
    with pytest.raises(UsageFault, match="not so many layers"):
        truncate_source(open_source(str(pico())), layers, tmp_path / "cut")
    assert list(tmp_path.iterdir()) == []
