"""Continuations: what is counted by hand, and both models end to end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.eval.generate import GenerateOptions, generate
from mla_convert.eval.serving import STOCK, served
from mla_convert.eval.tasks.generation import (
    Continuation,
    continue_greedily,
    invalid_utf8,
    make_prompts,
    make_sample,
    measure_generation,
    repetition,
)
from mla_convert.eval.tasks.sizes import GENERATION, GenerationSizes
from tests.eval.helpers import EvalPair
from tests.eval.tasks.helpers import Folders

SIZES = GenerationSizes(openings=3, windows=2, prompt_tokens=9, new_tokens=12)


@pytest.fixture(scope="module")
def bytewise() -> Any:
    """One token per byte, so that a character can be cut anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def folders(pair: EvalPair) -> Folders:
    return Folders(pair.source.location.folder, pair.target, pair.text)


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([], 0.0),
        ([1, 2, 3], 0.0),
        ([1, 2, 3, 4, 5], 0.0),
        ([7, 7, 7, 7, 7, 7], 2 / 3),
        ([1, 2, 3, 4, 1, 2, 3, 4], 1 / 5),
    ],
)
def test_repetition_by_hand(ids: list[int], share: float) -> None:
    assert repetition(ids) == pytest.approx(share)


@pytest.mark.parametrize(
    ("prompt", "new", "ended", "count"),
    [
        ("abc", "dé", False, 0),
        # The second byte of é is missing inside the text.
        ("abc", b"d\xc3e", False, 1),
        ("abc", b"\xff\xfe x", False, 2),
        # Cut off by the length limit, or given up by the model itself.
        ("abc", b"d\xc3", False, 0),
        ("abc", b"d\xc3", True, 1),
        # The prompt stops inside a character, which is completed or not.
        (b"ab\xc3", b"\xa9d", False, 0),
        (b"ab\xc3", b"d", False, 1),
        # The character itself, written out by the model, is no broken one.
        ("abc", "d\ufffde", False, 0),
        ("abc", "d\ufffd", False, 0),
        ("abc", "d\ufffd".encode() + b"\xc3e", False, 1),
        ("abc\ufffd", "d", False, 0),
    ],
)
def test_invalid_utf8_by_hand(bytewise: Any, prompt: str | bytes, new: str | bytes, ended: bool, count: int) -> None:
    before, after = (_ids(bytewise, text) for text in (prompt, new))

    assert invalid_utf8(bytewise, before, Continuation(after, ended)) == count


def _ids(tokenizer: Any, text: str | bytes) -> tuple[int, ...]:
    data = text if isinstance(text, bytes) else text.encode()
    letters = bytes_to_unicode()
    return tuple(tokenizer.convert_tokens_to_ids([letters[byte] for byte in data]))


def test_a_sample_by_hand(bytewise: Any) -> None:
    prompt, source, target = (_ids(bytewise, text) for text in ("go", " on and on", b" on \xc3nd"))
    sample = make_sample(bytewise, prompt, Continuation(source, True), Continuation(target, False))

    assert (sample.prompt, sample.source_text, sample.target_text) == ("go", " on and on", " on \ufffdnd")
    assert sample.identical_prefix == 4
    assert (sample.source_invalid_utf8, sample.target_invalid_utf8) == (0, 1)
    assert (sample.source_ended, sample.target_ended) == (True, False)


def test_prompts_are_the_openings_of_texts_and_of_windows(lossy: EvalPair) -> None:
    tokenizer = load_tokenizer(lossy.source.location.folder)
    prompts = make_prompts(tokenizer, lossy.windows, SIZES, seed=0)

    assert prompts.shape == (5, 9)
    assert (prompts[:3, 0] == 1).all()
    starts = lossy.windows.ids[:, :9].tolist()
    assert all(prompt in starts for prompt in prompts[3:].tolist())
    assert torch.equal(prompts, make_prompts(tokenizer, lossy.windows, SIZES, seed=0))
    assert not torch.equal(prompts, make_prompts(tokenizer, lossy.windows, SIZES, seed=1))


def test_more_windows_than_there_are_and_longer_prompts_than_windows(lossy: EvalPair) -> None:
    tokenizer = load_tokenizer(lossy.source.location.folder)
    many = GenerationSizes(openings=0, windows=99, prompt_tokens=99, new_tokens=1)

    assert torch.equal(make_prompts(tokenizer, lossy.windows, many, seed=0), lossy.windows.ids)


def test_sizes_leave_a_position_for_each_token() -> None:
    found = SIZES.within(12)

    assert (found.prompt_tokens, found.new_tokens) == (6, 6)
    assert SIZES.within(512) == SIZES
    assert GENERATION["full"].within(2).new_tokens == 1


@pytest.mark.parametrize("backend", ["auto", STOCK])
def test_a_batch_continues_as_each_prompt_alone(lossy: EvalPair, backend: str) -> None:
    tokenizer = load_tokenizer(lossy.source.location.folder)
    texts = ["hello, world", "some more te"]
    prompts = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
    with served(lossy.model(), backend) as running:
        found = continue_greedily(running, prompts, 12, "test")

    for text, continuation in zip(texts, found, strict=True):
        alone = generate(str(lossy.target), GenerateOptions(text, max_new_tokens=12, backend=backend))
        assert continuation == Continuation(alone.new_ids, alone.ending == "end-of-text")


def test_a_continuation_stops_at_its_end_token(lossy: EvalPair) -> None:
    model = lossy.source_model()
    prompts = lossy.windows.ids[:2, :6]
    with served(model, STOCK) as running:
        free = continue_greedily(running, prompts, 10, "test")
        model.generation_config.eos_token_id = free[0].ids[3]
        found = continue_greedily(running, prompts, 10, "test")

    stop = free[0].ids.index(free[0].ids[3]) + 1
    assert found[0] == Continuation(free[0].ids[:stop], True)
    assert not free[0].ended
    assert found[1].ids == free[1].ids[: len(found[1].ids)]


def test_a_lossless_conversion_goes_on_as_its_source(lossless: EvalPair) -> None:
    section = measure_generation(folders(lossless).context(24))

    assert (section.new_tokens, section.prompt_tokens, len(section.samples)) == (32, 14, 6)
    assert section.median_identical_prefix == 32
    assert all(sample.source_text == sample.target_text for sample in section.samples)
    assert section.source_repetition == section.target_repetition


def test_a_lossy_one_parts_and_the_seed_decides(lossy: EvalPair) -> None:
    section = measure_generation(folders(lossy).context(24))

    assert section == measure_generation(folders(lossy).context(24))
    assert section.median_identical_prefix < 32
    assert {sample.prompt for sample in section.samples} != {
        sample.prompt for sample in measure_generation(folders(lossy).context(24, seed=1)).samples
    }
