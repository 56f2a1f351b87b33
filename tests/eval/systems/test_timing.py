"""One run: prompts by seed, greedy tokens, the cache it leaves, and memory that comes and goes."""

from __future__ import annotations

import time

import torch
from transformers import DynamicCache

from mla_convert.eval.systems.sizes import Cell
from mla_convert.eval.systems.timing import PeakMemory, prompts, timed_run
from tests.eval.helpers import EvalPair
from tests.eval.systems.helpers import Ticking

BLOCK = 64 << 20


def test_prompts_follow_the_seed_and_stay_in_the_vocabulary() -> None:
    cell = Cell(50, 3, 1)

    found = prompts(cell, 97, seed=7)

    assert found.shape == (3, 50)
    assert (int(found.min()) >= 0, int(found.max()) < 97) == (True, True)
    assert torch.equal(found, prompts(cell, 97, seed=7))
    assert not torch.equal(found, prompts(cell, 97, seed=8))


def test_a_run_decodes_greedily_and_leaves_all_but_the_last_token_in_the_cache(lossy: EvalPair) -> None:
    model, cache = lossy.source_model(), DynamicCache()
    prompt = prompts(Cell(9, 2, 1), 97, seed=0)
    expected = DynamicCache()
    with torch.inference_mode():
        out = model.generate(prompt, cache=expected, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        again = DynamicCache()
        model(input_ids=out[:, :-1], cache=again)

    timing = timed_run(model, cache, prompt, 5, Ticking())

    assert cache.get_seq_length() == 9 + 4
    assert torch.allclose(cache.layers[3].keys, again.layers[3].keys, atol=1e-4)
    assert (timing.ttft_s, timing.tpot_s, timing.seconds) == (1.0, 0.25, 2.0)


def test_a_block_that_is_held_for_a_moment_is_seen() -> None:
    with PeakMemory() as nothing:
        time.sleep(0.02)
    with PeakMemory() as memory:
        block = torch.ones(BLOCK, dtype=torch.uint8)
        time.sleep(0.1)
        del block

    assert memory.above_start >= BLOCK * 0.9
    assert nothing.above_start < BLOCK * 0.5


def test_the_most_is_kept_when_memory_falls_again() -> None:
    sizes = iter([100, 350, *[120] * 10_000])

    with PeakMemory(lambda: next(sizes)) as memory:
        time.sleep(0.05)

    assert memory.above_start == 250
