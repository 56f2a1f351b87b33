"""What a prompt is, and how text becomes one of exactly the length asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mla_convert.manifests.evaluation.tasks import TaskName

Ids = tuple[int, ...]
# Every unit of a text has at least so many tokens; fewer would only make prompts shorter than asked for.
TOKENS_PER_UNIT = 4


class CannotPose(Exception):
    """A task cannot be put with this tokenizer at this length; the text says why."""


@dataclass(frozen=True)
class Prompt:
    """Tokens to read, those to answer, and a wrong answer of the same form."""

    context: Ids
    answer: Ids
    wrong: Ids


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one cell. Neighbours may begin with the same tokens, which a reader then reads once."""

    task: TaskName
    length: int
    depth: float | None
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Question:
    """What follows a passage: its last words before the answer, the answer, and a wrong one."""

    text: str
    answer: str
    wrong: str


class Encoder:
    """The source's tokenizer, as prompts need it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer("", verbose=False)["input_ids"]
        # Only what opens a text: an end token in front of a prompt would be a text that has ended.
        self.opening: Ids = tuple(token for token in added if token == tokenizer.bos_token_id)

    def encode(self, text: str) -> Ids:
        """Tokens of `text` without any that the tokenizer adds.

        Raises:
            CannotPose: If a part of the text has no token of its own.
        """
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if self.tokenizer.unk_token_id is not None and self.tokenizer.unk_token_id in ids:
            raise CannotPose("the tokenizer has no tokens for a part of its text")
        return tuple(ids)

    def split(self, context: str, answer: str) -> tuple[Ids, Ids]:
        """Tokens of the context and of the answer behind it, as the tokenizer cuts them when they are one text.

        A token that holds the end of one and the start of the other belongs to the answer.
        """
        alone, whole = self.encode(context), self.encode(context + answer)
        shared = common_prefix(alone, whole)
        return whole[:shared], whole[shared:]

    def passage(self, build: Callable[[int], str], questions: Sequence[Question], length: int) -> list[Prompt]:
        """One text with questions to it; the longest prompt with its answer has exactly `length` tokens.

        Args:
            build: Gives the text with so many units. A larger number must put more in front and change nothing
                behind; as much of the front unit is cut off as makes the length right.
            questions: Each is put to the same text.
            length: In tokens.

        Raises:
            CannotPose: If not even one unit fits, the answer has no tokens or the wrong answer is the same.
        """

        def total(units: int) -> int:
            text = build(units)
            return len(self.opening) + max(len(self.encode(text + item.text + item.answer)) for item in questions)

        units = bisect_left(range(2, length // TOKENS_PER_UNIT + 2), length, key=total) + 2
        excess = total(units) - length
        # The smallest number of units that fills the length, so at most the front unit is cut.
        if excess < 0 or total(1) > length:
            raise CannotPose(f"its text does not fit into {length} tokens")
        return [self._prompt(build(units) + item.text, item, excess) for item in questions]

    def _prompt(self, text: str, question: Question, cut: int) -> Prompt:
        context, answer = self.split(text, question.answer)
        wrong = self.split(text, question.wrong)[1]
        if not answer or not wrong or answer == wrong or len(context) <= cut:
            raise CannotPose("the tokenizer does not tell its answers apart")
        return Prompt(self.opening + context[cut:], answer, wrong)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
