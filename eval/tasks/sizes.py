"""How much the tasks and the generation measure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from mla_convert.eval.suite_context import SuiteName


@dataclass(frozen=True)
class TaskLength:
    """Prompts of one length.

    Attributes:
        tokens: Of a prompt with its answer.
        passages: Texts that each task reads; several questions are put to each.
    """

    tokens: int
    passages: int


@dataclass(frozen=True)
class TaskSizes:
    """Of one suite.

    Attributes:
        lengths: Ascending. Those beyond the model's positions are replaced by the positions themselves.
        questions: Put to each passage by the tasks without depth.
    """

    lengths: tuple[TaskLength, ...]
    questions: int

    def within(self, positions: int) -> tuple[TaskLength, ...]:
        """The lengths that a model has positions for; the first one that it has not becomes all that it has."""
        fitting = [length for length in self.lengths if length.tokens <= positions]
        longer = [length for length in self.lengths if length.tokens > positions]
        if longer and (not fitting or fitting[-1].tokens < positions):
            fitting.append(TaskLength(positions, longer[0].passages))
        return tuple(fitting)


@dataclass(frozen=True)
class GenerationSizes:
    """Of one suite.

    Attributes:
        openings: Prompts from the fixed list.
        windows: Prompts that are openings of evaluation windows.
        prompt_tokens: Of each prompt.
        new_tokens: Most tokens of each continuation.
    """

    openings: int
    windows: int
    prompt_tokens: int
    new_tokens: int

    def within(self, positions: int) -> GenerationSizes:
        """What a model has positions for; at least two of them."""
        prompt = min(self.prompt_tokens, positions // 2)
        return replace(self, prompt_tokens=prompt, new_tokens=min(self.new_tokens, positions - prompt))


TASKS: Final[dict[SuiteName, TaskSizes]] = {
    "quick": TaskSizes((TaskLength(256, 2), TaskLength(1024, 1)), questions=4),
    "full": TaskSizes((TaskLength(256, 4), TaskLength(1024, 2), TaskLength(4096, 1)), questions=6),
}
GENERATION: Final[dict[SuiteName, GenerationSizes]] = {
    "quick": GenerationSizes(openings=3, windows=3, prompt_tokens=14, new_tokens=32),
    "full": GenerationSizes(openings=8, windows=8, prompt_tokens=14, new_tokens=128),
}
