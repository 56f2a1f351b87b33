"""A cache that holds something else than its dimensions say is a failed check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from mla_convert.errors import CheckFailed
from mla_convert.eval.serving import served
from mla_convert.eval.systems.live_cache import cache_figures
from tests.eval.helpers import EvalPair

TOKENS, NUMBERS, LAYERS = 10, 2 * 2 * 16, 4


@pytest.fixture
def filled(lossy: EvalPair) -> Any:
    """The source's own cache."""
    cache = DynamicCache()
    with torch.inference_mode():
        lossy.source_model()(input_ids=torch.arange(TOKENS)[None], cache=cache)
    return cache


def test_a_right_cache_is_counted(filled: Any) -> None:
    found = cache_figures("source", filled, NUMBERS, LAYERS, torch.float32)

    assert (found.tokens, found.numbers_per_token) == (TOKENS, NUMBERS * LAYERS)
    assert found.payload_bytes_per_token == NUMBERS * LAYERS * 4
    assert found.resident_bytes == TOKENS * NUMBERS * LAYERS * 4


def test_a_number_too_many_in_one_layer_is_found(filled: Any) -> None:
    filled.layers[2].beside = torch.zeros(TOKENS)

    with pytest.raises(CheckFailed, match="does not hold what its dimensions say"):
        cache_figures("source", filled, NUMBERS, LAYERS, torch.float32)


def test_keys_that_keep_a_larger_block_alive_are_found(filled: Any) -> None:
    filled.layers[1].keys = torch.cat([filled.layers[1].keys] * 2, dim=2)[:, :, :TOKENS]

    with pytest.raises(CheckFailed, match="does not hold what its dimensions say"):
        cache_figures("source", filled, NUMBERS, LAYERS, torch.float32)


def test_pages_of_wider_rows_than_the_dimensions_are_found(lossy: EvalPair) -> None:
    model = lossy.model()
    with served(model, "auto") as running, torch.inference_mode():
        assert running.handle is not None
        cache = running.handle.new_cache()
        model(input_ids=torch.arange(TOKENS)[None], cache=cache)

    assert cache_figures("target", cache, 36, LAYERS, torch.float32).payload_bytes_per_token == 36 * LAYERS * 4
    with pytest.raises(CheckFailed, match="560"):
        cache_figures("target", cache, 35, LAYERS, torch.float32)
