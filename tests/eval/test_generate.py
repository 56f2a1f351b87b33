"""Generation by stock transformers: greedy, drawn, through a chat template, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_convert.errors import InputRefused, UsageFault
from mla_convert.eval.generate import LOWEST_TEMPERATURE, GenerateOptions, generate
from tests.conftest import PicoFactory
from tests.eval.helpers import EvalPair
from tests.pico import make_pico

PROMPT = "hello, world"
GREEDY = GenerateOptions(PROMPT, max_new_tokens=12)
DRAWN = replace(GREEDY, temperature=1.0, seed=3)


def test_greedy_takes_the_likeliest_token_each_time(lossy: EvalPair) -> None:
    done = generate(str(lossy.target), GREEDY)
    model, ids = lossy.model(), list(done.prompt_ids)
    for _ in done.new_ids:
        with torch.inference_mode():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))

    assert done.prompt_ids[0] == 1
    assert list(done.new_ids) == ids[len(done.prompt_ids) :]
    assert len(done.new_ids) == 12
    assert done.ending == "length"


def test_a_lossless_conversion_writes_what_the_source_writes(lossless: EvalPair) -> None:
    source, target = generate(lossless.source_folder, GREEDY), generate(str(lossless.target), GREEDY)

    assert source.new_ids == target.new_ids
    assert source.text == target.text
    assert source.canonical_mla_id is None
    assert target.canonical_mla_id is not None


def test_the_cache_is_counted_while_generating(lossy: EvalPair) -> None:
    source, target = generate(lossy.source_folder, GREEDY), generate(str(lossy.target), GREEDY)

    assert source.cache.numbers_per_token_per_layer == (64,) * 4
    assert target.cache.numbers_per_token_per_layer == (36,) * 4
    # The last token has been written down but not been read.
    assert target.cache.tokens == len(target.prompt_ids) + len(target.new_ids) - 1


def test_the_seed_decides_what_is_drawn(lossy: EvalPair) -> None:
    first, again, other = (generate(str(lossy.target), options) for options in (DRAWN, DRAWN, replace(DRAWN, seed=4)))

    assert first.new_ids == again.new_ids != other.new_ids


def test_drawing_leaves_the_random_numbers_of_the_caller_alone(lossy: EvalPair) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    generate(str(lossy.target), DRAWN)

    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoints_own_generation_settings_do_not_leak_in(tmp_path: Path) -> None:
    folder = make_pico(tmp_path / "source", "llama", kv_heads=2)
    plain, drawn = generate(str(folder), GREEDY), generate(str(folder), DRAWN)
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings |= {"do_sample": True, "temperature": 9.0, "top_k": 1, "top_p": 0.1, "repetition_penalty": 5.0}
    path.write_text(json.dumps(settings), encoding="utf-8")

    assert generate(str(folder), GREEDY).new_ids == plain.new_ids
    assert generate(str(folder), DRAWN).new_ids == drawn.new_ids


def test_an_end_token_ends_it(tmp_path: Path) -> None:
    folder = make_pico(tmp_path / "source", "llama", kv_heads=2)
    free = generate(str(folder), GREEDY)
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"eos_token_id": [2, free.new_ids[4]]}
    path.write_text(json.dumps(settings), encoding="utf-8")
    done = generate(str(folder), GREEDY)

    assert done.new_ids == free.new_ids[: free.new_ids.index(free.new_ids[4]) + 1]
    assert done.ending == "end-of-text"


def test_chat_goes_through_the_template(pico: PicoFactory) -> None:
    folder = str(pico("llama", chat_template=True))
    plain, chat = (generate(folder, replace(GREEDY, chat=chat)) for chat in (False, True))

    assert len(chat.prompt_ids) == len(f"user: {PROMPT}\n")
    assert len(plain.prompt_ids) == len(PROMPT) + 1


def test_chat_without_a_template_is_refused(pico: PicoFactory) -> None:
    with pytest.raises(InputRefused, match="no chat template"):
        generate(str(pico()), replace(GREEDY, chat=True))


def test_more_tokens_than_positions_are_refused(pico: PicoFactory) -> None:
    with pytest.raises(InputRefused, match="at most 512 tokens; found 13 \\+ 500"):
        generate(str(pico()), replace(GREEDY, max_new_tokens=500))


def test_a_folder_without_tokenizer_is_refused(pico: PicoFactory) -> None:
    with pytest.raises(InputRefused, match="no usable tokenizer"):
        generate(str(pico("llama", tokenizer=False)), GREEDY)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 0},
        *({"temperature": value} for value in (-1.0, float("nan"), float("inf"), 1e-320, LOWEST_TEMPERATURE / 2)),
    ],
)
def test_options_out_of_range_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UsageFault, match="out of range"):
        GenerateOptions(PROMPT, **fields)  # type: ignore[arg-type]


def test_the_lowest_temperature_draws_the_likeliest_token(pico: PicoFactory) -> None:
    folder = str(pico())

    assert generate(folder, replace(DRAWN, temperature=LOWEST_TEMPERATURE)).new_ids == generate(folder, GREEDY).new_ids


def test_json_holds_the_tokens_and_what_made_them(lossy: EvalPair) -> None:
    found = json.loads(json.dumps(generate(str(lossy.target), DRAWN).to_json()))

    assert (found["prompt"], found["seed"], found["temperature"]) == (PROMPT, 3, 1.0)
    assert len(found["new_ids"]) == found["new_tokens"]
    assert len(found["prompt_ids"]) == found["prompt_tokens"]
    assert found["seconds"] > 0
    assert found["cache"]["dtype"] == found["dtype"] == "float32"


def test_the_real_model_finishes_a_sentence(smollm2: Path) -> None:
    done = generate(str(smollm2), GenerateOptions("The capital of France is", max_new_tokens=4))

    assert "Paris" in done.text
    assert done.cache.numbers_per_token_per_layer == (384,) * 30


def test_a_prompt_of_broken_bytes_is_refused(pico: PicoFactory) -> None:
    with pytest.raises(InputRefused, match="not Unicode"):
        generate(str(pico()), GenerateOptions(prompt="caf\udce9"))
