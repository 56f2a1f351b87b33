"""All prompts of a suite, made before any model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from mla_convert.eval.tasks import text_tasks, token_tasks
from mla_convert.eval.tasks.prompts import CannotPose, Encoder, Prompt, PromptSet
from mla_convert.eval.tasks.sizes import TaskLength, TaskSizes
from mla_convert.manifests.evaluation.tasks import LeftOut, TaskName

Poser = Callable[[Encoder, Random, int, int], list[Prompt]]
WITHOUT_DEPTH: Final[dict[TaskName, Poser]] = {
    "passkey": text_tasks.passkey,
    "key-value": text_tasks.key_value,
    "copy": token_tasks.copy,
    "induction": token_tasks.induction,
    "counting": text_tasks.counting,
}


@dataclass(frozen=True)
class Posed:
    """What is asked, and what cannot be."""

    sets: tuple[PromptSet, ...]
    left_out: tuple[LeftOut, ...]


def pose_all(encoder: Encoder, sizes: TaskSizes, positions: int, seed: int) -> Posed:
    """Make the prompts of every task at every length.

    Each passage has a seed of its own, so that a task's prompts do not depend on which others were posed.

    Args:
        encoder: The source's.
        sizes: Of the suite.
        positions: Of the model; no prompt with its answer is longer.
        seed: Of all choices.
    """
    sets: list[PromptSet] = []
    left_out: list[LeftOut] = []
    for length in sizes.within(positions):
        try:
            sets.extend(_needles(encoder, length, seed))
        except CannotPose as reason:
            left_out.append(LeftOut(task="needle", length=length.tokens, reason=str(reason)))
        for task, pose in WITHOUT_DEPTH.items():
            try:
                prompts = [
                    prompt
                    for random in _randoms(task, length, seed)
                    for prompt in pose(encoder, random, length.tokens, sizes.questions)
                ]
            except CannotPose as reason:
                left_out.append(LeftOut(task=task, length=length.tokens, reason=str(reason)))
            else:
                sets.append(PromptSet(task, length.tokens, None, tuple(prompts)))
    return Posed(tuple(sets), tuple(left_out))


def _needles(encoder: Encoder, length: TaskLength, seed: int) -> list[PromptSet]:
    passages = [
        text_tasks.needle(encoder, random, length.tokens) for random in _randoms("needle", length, seed)
    ]  # by passage, then by depth
    return [
        PromptSet("needle", length.tokens, depth, tuple(prompts[place] for prompts in passages))
        for place, depth in enumerate(text_tasks.DEPTHS)
    ]


def _randoms(task: TaskName, length: TaskLength, seed: int) -> list[Random]:
    return [Random(f"{seed} {task} {length.tokens} {number}") for number in range(length.passages)]
