"""Numbers and bytes per token, counted in live caches."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from mla_convert.errors import CheckFailed
from mla_convert.eval.cache_bytes import CacheMeasurement, count_cache, find_cache, measure_cache
from tests.conftest import PicoFactory
from tests.eval.helpers import EvalPair
from tests.pico import PicoOptions, build_pico_model


def test_a_converted_model_caches_the_compressed_row_and_nothing_else(lossy: EvalPair) -> None:
    """After 40 tokens: latent and rotary row per token and layer, not expanded keys and values (case 18)."""
    model = lossy.model()
    before = measure_cache(lossy.source_model(), torch.float32, tokens=40)
    after = measure_cache(model, torch.float32, tokens=40)

    width = model.config.kv_lora_rank + model.config.qk_rope_head_dim
    assert width == 36
    assert after.numbers_per_token_per_layer == (width,) * 4
    assert before.numbers_per_token_per_layer == (2 * 2 * 16,) * 4
    assert after.shapes == ((1, 1, 40, 20), (1, 1, 40, 16))
    assert (after.tokens, after.layers, after.bytes_per_token) == (40, 4, 4 * 36 * 4)
    assert after.bytes_per_token < before.bytes_per_token


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_source_caches_keys_and_values_of_its_kv_heads(family: str, kv_heads: int) -> None:
    model = build_pico_model(family, PicoOptions(kv_heads=kv_heads))

    assert measure_cache(model, torch.float32).numbers_per_token == 4 * 2 * kv_heads * 16


def test_the_dtype_of_the_run_and_that_of_the_files_are_told_apart(pico: PicoFactory) -> None:
    found = measure_cache(build_pico_model("llama", PicoOptions()), torch.bfloat16)

    assert (found.dtype, found.bytes_per_token, found.bytes_per_token_per_layer) == ("float32", 512, 128)
    assert (found.stored_dtype, found.stored_dtype_bytes_per_token) == ("bfloat16", 256)


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_the_measure_does_not_depend_on_the_length(tokens: int) -> None:
    model = build_pico_model("llama", PicoOptions(kv_heads=2))

    assert measure_cache(model, torch.float32, tokens=tokens).bytes_per_token == 4 * 64 * 4


def filled(tokens: int = 10) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, tokens, 6), torch.zeros(1, 1, tokens, 2), 0)
    return cache


def test_every_tensor_counts_under_whatever_name() -> None:
    cache = filled()
    plain = count_cache(cache, torch.float32)
    cache.layers[0].extra = {"scales": [torch.zeros(10, 3)]}  # type: ignore[attr-defined]

    assert plain.numbers_per_token == 8
    assert count_cache(cache, torch.float32).numbers_per_token == 11


def test_a_view_counts_with_all_the_memory_it_holds() -> None:
    cache = filled()
    cache.layers[0].keys = torch.zeros(1, 1, 10, 60)[..., :6]
    found = count_cache(cache, torch.float32)

    assert (found.numbers_per_token, found.bytes_per_token) == (8, (60 + 2) * 4)


def test_what_does_not_grow_by_token_is_refused() -> None:
    cache = filled()
    cache.layers[0].extra = torch.zeros(3)  # type: ignore[attr-defined]

    with pytest.raises(CheckFailed, match="the same for every token"):
        count_cache(cache, torch.float32)


@pytest.mark.parametrize("output", [{}, {"logits": torch.zeros(1)}, {"a": DynamicCache(), "b": DynamicCache()}])
def test_an_output_without_one_cache_is_refused(output: dict[str, Any]) -> None:
    with pytest.raises(CheckFailed, match="no cache"):
        find_cache(output)


def test_an_empty_cache_is_refused() -> None:
    with pytest.raises(CheckFailed, match="empty"):
        count_cache(DynamicCache(), torch.float32)


def test_json_brings_back_the_same_measurement() -> None:
    found = count_cache(filled(), torch.float16)

    assert CacheMeasurement.from_json(json.loads(json.dumps(found.to_json()))) == found
