"""A model whose answers are known, a tokenizer of whole words, and contexts over tiny conversions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers.cache_utils import Cache

from mla_convert.decode.receipt import ReceiptBook
from mla_convert.eval.evaluate import EvalOptions, prepare
from mla_convert.eval.serving import STOCK, Served
from mla_convert.eval.suite_context import SuiteContext, SuiteName
from mla_convert.eval.tasks import words
from mla_convert.manifests.models import load

SURE = 20.0
"""Logit of the token that a fake model predicts, the others being 0."""


class Recaller(nn.Module):
    """Predicts what followed the longest earlier repetition of its last tokens, nothing where there is none.

    Its logits are `SURE` for that token and 0 for all others. With a `window` it sees no further back, which is a
    model whose attention has lost its range.
    """

    def __init__(self, vocabulary: int, window: int | None = None, context: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(vocabulary, vocabulary, bias=False)
        nn.init.eye_(self.head.weight)
        self.window, self.context = window, context
        self.config = SimpleNamespace(model_type="recaller")
        self.forwarded = 0

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def base_model(self, input_ids: Tensor, cache: Cache | None = None, use_cache: bool = True) -> Any:
        """The cache holds the tokens read until now in place of keys."""
        ids = input_ids.reshape(1, 1, -1, 1).float()
        self.forwarded += input_ids.shape[1]
        read = ids if cache is None else cache.update(ids, ids, 0)[0]
        history = read.flatten().long().tolist()
        rows = [self._state(history[: end + 1]) for end in range(len(history) - input_ids.shape[1], len(history))]
        return SimpleNamespace(last_hidden_state=torch.stack(rows)[None])

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> Any:
        return SimpleNamespace(logits=self.head(self.base_model(input_ids).last_hidden_state))

    def _state(self, history: list[int]) -> Tensor:
        visible = history if self.window is None else history[-self.window :]
        state = torch.zeros(self.head.in_features)
        for width in range(min(self.context, len(visible) - 1), 0, -1):
            suffix = visible[-width:]
            for start in range(len(visible) - width - 1, -1, -1):
                if visible[start : start + width] == suffix:
                    state[visible[start + width]] = SURE
                    return state
        return state


def serve(model: nn.Module) -> Served:
    return Served(model, STOCK, None, ReceiptBook())


def word_tokenizer(vocabulary: Sequence[str]) -> Any:
    """A tokenizer of whole words with an opening token; everything else is unknown."""
    tokens = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def all_words(*, digits: bool = True) -> list[str]:
    """Every word that prompts are made of, and punctuation."""
    phrases = [*words.SUBJECTS, *words.VERBS, *words.PLACES, *words.TIMES, *words.CITIES, *words.KEYS, *words.GOODS]
    extra = (
        "The secret word of is pass key Remember it What Now remember once more A stranger asks for That was whole "
        "story door locked the"
    )
    found = dict.fromkeys([word for phrase in phrases for word in phrase.split()] + extra.split())
    return [*found, *'.,:{}"?', *("0123456789" if digits else "")]


@dataclass(frozen=True)
class Folders:
    """A source, its conversion and a text file."""

    source: Path
    target: Path
    text: Path

    def context(self, seq_len: int, seed: int = 0, suite: SuiteName = "quick", backend: str = "auto") -> SuiteContext:
        options = EvalOptions(max_tokens=4 * seq_len, seq_len=seq_len, seed=seed, backend=backend)
        prepared = prepare(str(self.source), [str(self.text)], options)
        return SuiteContext(prepared, self.target, load(self.target), suite)


def random_ids(count: int, vocabulary: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(vocabulary), k=count))
