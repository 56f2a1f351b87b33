"""Greedy continuations of both models: where they part, how they repeat themselves, broken characters, endings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.eval.generate import GenerateOptions, continue_ids, end_ids
from mla_convert.eval.loading import load_model
from mla_convert.eval.serving import STOCK, Served, served
from mla_convert.eval.suite_context import SuiteContext
from mla_convert.eval.tasks import words
from mla_convert.eval.tasks.prompts import Ids, common_prefix
from mla_convert.eval.tasks.sizes import GENERATION, GenerationSizes
from mla_convert.eval.text import EvalWindows
from mla_convert.manifests.evaluation.tasks import GenerationSample, GenerationSection
from mla_convert.progress import track

GRAM = 4
BATCH = 8
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Continuation:
    """New tokens, an end token included, and whether there is one."""

    ids: Ids
    ended: bool


def measure_generation(context: SuiteContext) -> GenerationSection:
    """Continue the same seeded prompts greedily with the source and with the target, one model at a time.

    All prompts have the same number of tokens and go through a model side by side.

    Args:
        context: The checked pair.

    Raises:
        InputRefused: If a model cannot be loaded.
    """
    tokenizer = load_tokenizer(context.source_folder)
    positions = int(context.prepared.source.config.max_position_embeddings)
    sizes = GENERATION[context.suite].within(positions)
    prompts = make_prompts(tokenizer, context.prepared.windows, sizes, context.seed)
    new_tokens = min(sizes.new_tokens, positions - prompts.shape[1])
    with served(load_model(context.source_folder), STOCK) as running:
        ours = continue_greedily(running, prompts, new_tokens, "generation: source")
    with served(load_model(context.target), context.prepared.options.backend) as running:
        theirs = continue_greedily(running, prompts, new_tokens, "generation: target")
    samples = tuple(
        make_sample(tokenizer, tuple(prompt), source, target)
        for prompt, source, target in zip(prompts.tolist(), ours, theirs, strict=True)
    )
    return GenerationSection(
        seed=context.seed,
        prompt_tokens=prompts.shape[1],
        new_tokens=new_tokens,
        samples=samples,
        median_identical_prefix=float(median(sample.identical_prefix for sample in samples)),
        source_repetition=fmean(sample.source_repetition for sample in samples),
        target_repetition=fmean(sample.target_repetition for sample in samples),
    )


def make_prompts(tokenizer: Any, windows: EvalWindows, sizes: GenerationSizes, seed: int) -> Tensor:
    """(B, T) prompts: seeded choices of the fixed openings, and of the openings of evaluation windows as they are.

    Openings that the tokenizer has no tokens for, or too few, are left out.
    """
    random, tokens = Random(f"{seed} generation"), min(sizes.prompt_tokens, windows.ids.shape[1])
    encoded = (tokenizer(text, verbose=False)["input_ids"] for text in random.sample(words.OPENINGS, sizes.openings))
    unknown = tokenizer.unk_token_id
    fixed = [ids[:tokens] for ids in encoded if len(ids) >= tokens and unknown not in ids]
    places = random.sample(range(len(windows.ids)), min(sizes.windows, len(windows.ids)))
    return torch.tensor(fixed + [windows.ids[place, :tokens].tolist() for place in sorted(places)])


def continue_greedily(running: Served, prompts: Tensor, new_tokens: int, label: str) -> list[Continuation]:
    """The likeliest continuation of each of (B, T) prompts, up to its end token or `new_tokens`."""
    options, ends = GenerateOptions("", max_new_tokens=new_tokens), end_ids(running.model)
    found = []
    for batch in track(prompts.split(BATCH), label, unit="batch"):
        new = continue_ids(running.model, batch, options).sequences[:, batch.shape[1] :]
        for ids in new.tolist():
            length = next((at for at, token in enumerate(ids, start=1) if token in ends), None)
            found.append(Continuation(tuple(ids[:length]), length is not None))
    return found


def make_sample(tokenizer: Any, prompt: Ids, source: Continuation, target: Continuation) -> GenerationSample:
    """Compare two continuations of one prompt."""
    return GenerationSample(
        prompt=_decode(tokenizer, prompt),
        source_text=_decode(tokenizer, source.ids),
        target_text=_decode(tokenizer, target.ids),
        identical_prefix=common_prefix(source.ids, target.ids),
        source_repetition=repetition(source.ids),
        target_repetition=repetition(target.ids),
        source_invalid_utf8=invalid_utf8(tokenizer, prompt, source),
        target_invalid_utf8=invalid_utf8(tokenizer, prompt, target),
        source_ended=source.ended,
        target_ended=target.ended,
    )


def repetition(ids: Sequence[int]) -> float:
    """Share of 4-grams that occurred before; 0 where there are none."""
    grams = [tuple(ids[at : at + GRAM]) for at in range(len(ids) - GRAM + 1)]
    return 0.0 if not grams else 1 - len(set(grams)) / len(grams)


def invalid_utf8(tokenizer: Any, prompt: Ids, continuation: Continuation) -> int:
    """How many replacement characters stand for bytes that are no character.

    A character that the prompt began may be completed, so both are decoded together. What the length limit cuts off
    at the end is no fault of the model, and a replacement character that the model wrote out is none either.
    """
    written = _written_out(tokenizer, continuation.ids)
    before = _decode(tokenizer, prompt)
    if not _written_out(tokenizer, prompt).at_end:
        before = before.removesuffix(REPLACEMENT)
    added = _decode(tokenizer, prompt + continuation.ids)[len(before) :]
    if not continuation.ended and not written.at_end:
        added = added.removesuffix(REPLACEMENT)
    return max(0, added.count(REPLACEMENT) - written.count)


@dataclass(frozen=True)
class _Written:
    """How often the tokens of the replacement character itself occur, and whether they come last."""

    count: int
    at_end: bool


def _written_out(tokenizer: Any, ids: Ids) -> _Written:
    own = tuple(tokenizer(REPLACEMENT, add_special_tokens=False)["input_ids"])
    if not own or _decode(tokenizer, own) != REPLACEMENT:
        return _Written(0, False)
    count, at = 0, 0
    while at < len(ids):
        found = ids[at : at + len(own)] == own
        count, at = (count + 1, at + len(own)) if found else (count, at + 1)
    return _Written(count, ids[-len(own) :] == own)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
