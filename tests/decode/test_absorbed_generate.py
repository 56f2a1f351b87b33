"""`generate()` of an absorbed model gives the tokens of the stock one, however it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mla_convert.convert.options import ConvertOptions
from mla_convert.decode.absorbed_module import AbsorbedOptions, use_absorbed
from tests.conftest import PicoFactory
from tests.convert.conftest import run_conversion
from tests.convert.support import load_stock
from tests.decode.stock import KINDS, apart, continuation, left_padded, logits, tiny, token_ids
from tests.tolerances import ABSORBED_LOGITS

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8},
    "several samples": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_greedy_of_every_kind_in_a_padded_batch(kind: str, backend: str) -> None:
    model = tiny(kind)
    expected = continuation(model, left_padded(3, 13))

    with use_absorbed(model, backend):
        assert torch.equal(continuation(model, left_padded(3, 13)), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_way_of_generating(way: str, page_size: int) -> None:
    model = tiny()
    expected = continuation(model, left_padded(2, 13), **WAYS[way])

    with use_absorbed(model, options=AbsorbedOptions(page_size=page_size)):
        assert torch.equal(continuation(model, left_padded(2, 13), **WAYS[way]), expected)


def test_cached_is_uncached() -> None:
    model = tiny()
    with use_absorbed(model):
        cached = continuation(model, left_padded(2, 13))
        assert torch.equal(continuation(model, left_padded(2, 13), use_cache=False), cached)


@pytest.mark.parametrize("prompt", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": True}])
def test_assisted_decoding_crops_what_was_not_accepted(prompt: dict[str, Any]) -> None:
    model = tiny()
    options = {**prompt, "assistant_model": tiny(seed=1)} if "assistant_model" in prompt else prompt
    inputs = {"input_ids": token_ids(1, 6).repeat(1, 3)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    expected = continuation(model, inputs, **options)
    assert torch.equal(expected, continuation(model, inputs))

    with use_absorbed(model) as handle:
        cache = handle.new_cache()
        assert torch.equal(continuation(model, inputs, cache=cache, **options), expected)
        # The last token is never processed; rejected rows are gone.
        assert cache.batch.cache.length(cache.batch.sequences[0]) == cache.get_seq_length() == expected.shape[1] - 1


def test_a_cache_can_be_continued() -> None:
    model = tiny()
    inputs = left_padded(2, 13)
    expected = continuation(model, inputs, max_new_tokens=16, min_new_tokens=16)

    with use_absorbed(model) as handle:
        cache = handle.new_cache(tokens=64)
        first = continuation(model, inputs, cache=cache, max_new_tokens=6, min_new_tokens=6)
        longer = torch.cat([inputs["attention_mask"], torch.ones(2, 6, dtype=torch.int64)], dim=1)
        second = continuation(
            model,
            {"input_ids": first, "attention_mask": longer},
            cache=cache,
            max_new_tokens=10,
            min_new_tokens=10,
        )

    assert torch.equal(second, expected)


def test_the_contracted_product_gives_the_same_tokens() -> None:
    model = tiny("biases")
    expected = continuation(model, left_padded(2, 13))

    with use_absorbed(model, options=AbsorbedOptions(value_side="product")):
        assert torch.equal(continuation(model, left_padded(2, 13)), expected)


def test_a_converted_model(pico: PicoFactory, tmp_path: Path) -> None:
    done = run_conversion(
        pico(), tmp_path / "out", ConvertOptions(lossless=True), tmp_path / "probe", tmp_path / "cache"
    )
    model = load_stock(done.folder)
    inputs = left_padded(2, 13)
    expected, wanted = continuation(model, inputs), logits(model, input_ids=token_ids(2, 9))

    with use_absorbed(model, options=AbsorbedOptions(expand_from=100)):
        assert apart(logits(model, input_ids=token_ids(2, 9)), wanted) < ABSORBED_LOGITS
        assert torch.equal(continuation(model, inputs), expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_masks_of_both_forms(implementation: str) -> None:
    model = tiny()
    model.set_attn_implementation(implementation)
    expected = continuation(model, left_padded(3, 13))

    with use_absorbed(model):
        assert torch.equal(continuation(model, left_padded(3, 13)), expected)
