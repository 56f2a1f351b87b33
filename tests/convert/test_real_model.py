"""The exactness gate on a real pretrained model, SmolLM2-135M: tied, ε 1e-5, 9 query and 3 KV heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_convert.assets.wikipedia import WikipediaSplits
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import Conversion, convert
from mla_convert.convert.tokenizer import load_tokenizer
from tests.convert.greedy import assert_same_text, generated
from tests.convert.support import load_stock, logits_of, relative_difference
from tests.tolerances import LOGITS_FLOAT32


@pytest.fixture(scope="module")
def lossless(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    out = tmp_path_factory.mktemp("smollm2") / "out"
    return convert(str(smollm2), out, ConvertOptions(lossless=True), command=["test"])


@pytest.fixture(scope="module")
def models(lossless: Conversion, smollm2: Path) -> tuple[Any, Any]:
    """(source, target) as stock transformers loads them."""
    return load_stock(smollm2), load_stock(lossless.folder)


@pytest.fixture(scope="module")
def prompts(smollm2: Path, wikipedia: WikipediaSplits) -> tuple[Tensor, Tensor]:
    """Three beginnings of held-out articles of 5, 20 and 40 tokens, padded on the left."""
    tokenizer = load_tokenizer(smollm2)
    rows = [json.loads(line)["text"] for line in wikipedia.heldout.read_text(encoding="utf-8").splitlines()[:3]]
    ids, mask = torch.zeros(3, 40, dtype=torch.int64), torch.zeros(3, 40, dtype=torch.int64)
    for row, length in enumerate((5, 20, 40)):
        ids[row, 40 - length :] = torch.tensor(tokenizer(rows[row])["input_ids"][:length])
        mask[row, 40 - length :] = 1
    return ids, mask


def test_the_files_pass_their_own_gate(lossless: Conversion) -> None:
    assert lossless.plan.profile == "hf"
    assert lossless.manifest.reload_check.kind == "lossless-vs-source"
    assert lossless.manifest.reload_check.relative_error <= LOGITS_FLOAT32
    # All pairs of three heads and the full useful rank: the cache is as wide as the source's.
    assert lossless.plan.kv_lora_rank + lossless.plan.qk_rope_head_dim == 384


def test_logits_on_real_text(models: tuple[Any, Any], smollm2: Path, wikipedia: WikipediaSplits) -> None:
    source, target = models
    text = json.loads(wikipedia.heldout.read_text(encoding="utf-8").splitlines()[4])["text"]
    ids = torch.tensor([load_tokenizer(smollm2)(text)["input_ids"][:256]])

    expected, found = logits_of(source, ids), logits_of(target, ids)

    assert relative_difference(found, expected) <= LOGITS_FLOAT32
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_greedy_text_is_the_source_s(models: tuple[Any, Any], prompts: tuple[Tensor, Tensor]) -> None:
    source, target = models

    expected = generated(source, *prompts, use_cache=True)
    cached = generated(target, *prompts, use_cache=True)

    assert_same_text(cached, expected)


def test_cached_text_is_uncached_text(models: tuple[Any, Any], prompts: tuple[Tensor, Tensor]) -> None:
    _, target = models
    ids, mask = (part[1:2, 20:] for part in prompts)

    assert_same_text(generated(target, ids, mask, use_cache=False), generated(target, ids, mask, use_cache=True))
