"""Position and retrieval tasks on made-up prompts, and stability of generation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mla_convert.manifests.evaluation.figure import Figure, Resampling
from mla_convert.manifests.record import Record

TaskName = Literal["needle", "passkey", "key-value", "copy", "induction", "counting"]
Verdict = Literal["kept", "lost", "uninformative"]


class TaskCell(Record):
    """One task at one length (and depth, from 0 at the start to 1 at the end; None where it has no depth).

    Log-probabilities are of the whole answer, mean over the prompts, nats; `*_match` is the share of prompts whose
    answer is the model's likeliest continuation, token for token. `chance_logprob` is that of a wrong answer of the
    same form under the source, mean. `verdict` is `uninformative` where the source itself fails.
    """

    task: TaskName
    length: int = Field(gt=0)
    depth: float | None = Field(ge=0, le=1)
    prompts: int = Field(gt=0)
    answer_tokens: float = Field(gt=0)
    source_logprob: float
    target_logprob: float
    chance_logprob: float
    difference: Figure
    source_match: float = Field(ge=0, le=1)
    target_match: float = Field(ge=0, le=1)
    verdict: Verdict


class LeftOut(Record):
    """A task that cannot be posed at a length with this tokenizer, and why."""

    task: TaskName
    length: int = Field(gt=0)
    reason: str


class TasksSection(Record):
    """All cells, and what makes a cell informative; `ran` is what served the target."""

    seed: int = Field(ge=0)
    informative_match: float = Field(ge=0, le=1)
    rule: str
    ran: str
    cells: tuple[TaskCell, ...]
    left_out: tuple[LeftOut, ...]
    resampling: Resampling


class GenerationSample(Record):
    """One greedy continuation by both models. `identical_prefix` counts tokens until the first difference.

    `*_invalid_utf8` counts characters that the bytes of the continuation do not complete; one that only the length
    limit cuts off at the end is not counted.
    """

    prompt: str
    source_text: str
    target_text: str
    identical_prefix: int = Field(ge=0)
    source_repetition: float = Field(ge=0, le=1)
    target_repetition: float = Field(ge=0, le=1)
    source_invalid_utf8: int = Field(ge=0)
    target_invalid_utf8: int = Field(ge=0)
    source_ended: bool
    target_ended: bool


class GenerationSection(Record):
    """Greedy continuations; repetition is the share of 4-grams of tokens that occurred before in the continuation."""

    seed: int = Field(ge=0)
    prompt_tokens: int = Field(gt=0)
    new_tokens: int = Field(gt=0)
    samples: tuple[GenerationSample, ...] = Field(min_length=1)
    median_identical_prefix: float = Field(ge=0)
    source_repetition: float = Field(ge=0, le=1)
    target_repetition: float = Field(ge=0, le=1)
