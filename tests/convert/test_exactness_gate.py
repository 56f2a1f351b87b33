"""A lossless conversion computes what its source computes, through the written files and stock transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_convert.convert.probe import TOKENS, probe_ids
from tests.convert.conftest import Converted, ConvertedFactory
from tests.convert.greedy import NEW_TOKENS, assert_same_text, generated
from tests.convert.support import load_stock, logits_of, random_ids, relative_difference
from tests.tolerances import HALF_OVER_SOURCE, LOGITS_FLOAT32

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

# name -> family, its sizes, the profile that must carry it
SOURCES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama, 1 KV head": ("llama", {}, "engine"),
    "llama, 2 KV heads": ("llama", {"kv_heads": 2}, "hf"),
    "llama, as many KV heads as heads": ("llama", {"kv_heads": 4}, "hf"),
    "llama, 9 heads, 3 KV, tied": (
        "llama",
        {"heads": 9, "kv_heads": 3, "hidden_size": 144, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        "hf",
    ),
    "llama, 1 KV head, tied, ε 1e-5": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}, "engine"),
    "llama, ε 1e-5, untied": ("llama", {"rms_norm_eps": 1e-5}, "engine"),
    "llama, biases": ("llama", {"kv_heads": 2, "config": {"attention_bias": True}}, "hf"),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}, "hf"),
    "llama, linear rope": ("llama", {"kv_heads": 2, "rope_parameters": LINEAR}, "hf"),
    "mistral, 1 KV head": ("mistral", {}, "engine"),
    "mistral, 2 KV heads": ("mistral", {"kv_heads": 2, "rms_norm_eps": 1e-5}, "hf"),
    "mistral, as many KV heads as heads, tied": ("mistral", {"kv_heads": 4, "tie_word_embeddings": True}, "hf"),
    "qwen2, 1 KV head": ("qwen2", {}, "hf"),
    "qwen2, 14 heads, 2 KV, tied": (
        "qwen2",
        {"heads": 14, "kv_heads": 2, "hidden_size": 112, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
        "hf",
    ),
    "qwen2, 14 heads, 2 KV, head size 64": (
        "qwen2",
        {"heads": 14, "kv_heads": 2, "head_dim": 64, "hidden_size": 128, "num_layers": 2, "weight_std": 0.15},
        "hf",
    ),
    "qwen2, as many KV heads as heads": ("qwen2", {"kv_heads": 4}, "hf"),
}
LONGER = 3 * TOKENS


@pytest.fixture(scope="module", params=SOURCES)
def pair(request: pytest.FixtureRequest, converted: ConvertedFactory) -> tuple[Converted, Any, Any, str]:
    """The conversion, the source and the target as stock transformers load them, the profile expected."""
    family, sizes, profile = SOURCES[request.param]
    done = converted(family, sizes)
    return done, load_stock(done.source), load_stock(done.folder), profile


def test_logits_of_a_fresh_and_longer_batch(pair: tuple[Converted, Any, Any, str]) -> None:
    done, source, target, profile = pair
    ids = random_ids(97, 2, LONGER, seed=11)
    assert not torch.equal(ids[:, :TOKENS], probe_ids(97, done.plan.seed))

    assert type(target).__name__ == "DeepseekV3ForCausalLM"
    assert done.plan.profile == profile
    assert relative_difference(logits_of(target, ids), logits_of(source, ids)) <= LOGITS_FLOAT32
    assert done.manifest.reload_check.kind == "lossless-vs-source"


def ragged_batch() -> tuple[Tensor, Tensor]:
    """Four prompts of 3, 17, 29 and 40 tokens, padded on the left."""
    ids, mask = torch.zeros(4, 40, dtype=torch.int64), torch.zeros(4, 40, dtype=torch.int64)
    for row, length in enumerate((3, 17, 29, 40)):
        ids[row, 40 - length :] = random_ids(97, length, seed=20 + row)
        mask[row, 40 - length :] = 1
    return ids, mask


def test_cached_generation_is_uncached_generation_and_the_source_s(pair: tuple[Converted, Any, Any, str]) -> None:
    _, source, target, _ = pair
    ids, mask = ragged_batch()

    expected = generated(source, ids, mask, use_cache=True)
    cached = generated(target, ids, mask, use_cache=True)
    uncached = generated(target, ids, mask, use_cache=False)

    assert cached[0].shape == (4, NEW_TOKENS)
    assert_same_text(cached, expected)
    assert_same_text(uncached, cached)
    # The prompts lead somewhere: no row repeats one token, no two rows are the same.
    assert all(len(set(row.tolist())) > 3 for row in expected[0])
    # Not only their order: the logits of every step up to the first difference, which is still on equal ground.
    different = torch.nonzero((cached[0] != expected[0]).any(0)).flatten().tolist()
    steps = different[0] + 1 if different else NEW_TOKENS
    finite = expected[1][:, :steps].isfinite()
    difference = relative_difference(cached[1][:, :steps][finite], expected[1][:, :steps][finite])
    assert difference <= LOGITS_FLOAT32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [("llama", {}), ("llama", {"kv_heads": 2, "tie_word_embeddings": True}), ("qwen2", {"kv_heads": 2})],
    ids=["llama-1", "llama-2-tied", "qwen2-2"],
)
def test_a_half_precision_target_is_as_good_as_its_half_precision_source(
    converted: ConvertedFactory, family: str, sizes: dict[str, Any], dtype: str
) -> None:
    """Judged by float32 arithmetic on the source's own weights: what half arithmetic costs each of the two."""
    done = converted(family, {**sizes, "dtype": dtype})
    half = getattr(torch, dtype)
    ids = random_ids(97, 2, 60, seed=31)
    truth = logits_of(load_stock(done.source), ids)

    source_error = (logits_of(load_stock(done.source, half), ids) - truth).norm() / truth.norm()
    target_error = (logits_of(load_stock(done.folder, half), ids) - truth).norm() / truth.norm()

    assert float(target_error) <= HALF_OVER_SOURCE * float(source_error)
    assert {str(t.dtype) for t in load_stock(done.folder, "auto").state_dict().values()} == {f"torch.{dtype}"}


def test_the_bars_can_fail(converted: ConvertedFactory) -> None:
    """A conversion that is not lossless does not pass them."""
    done = converted(source={"kv_heads": 2}, kv_lora_rank=16, qk_rope_head_dim=16, rope_policy="high")
    ids = random_ids(97, 2, LONGER, seed=11)
    source, target = load_stock(done.source), load_stock(done.folder)

    assert relative_difference(logits_of(target, ids), logits_of(source, ids)) > 100 * LOGITS_FLOAT32
    with pytest.raises(AssertionError, match="row"):
        assert_same_text(
            generated(target, *ragged_batch(), use_cache=True), generated(source, *ragged_batch(), use_cache=True)
        )
