"""Position and retrieval tasks that need no download, source and target on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.eval.bootstrap import DEFAULT_CONFIDENCE, DEFAULT_RESAMPLES
from mla_convert.eval.loading import load_model
from mla_convert.eval.serving import STOCK, Served, served
from mla_convert.eval.suite_context import SuiteContext
from mla_convert.eval.tasks.prompt_sets import Posed, pose_all
from mla_convert.eval.tasks.prompts import Encoder, Prompt, PromptSet
from mla_convert.eval.tasks.reader import AnswerScore, Reader
from mla_convert.eval.tasks.scoring import INFORMATIVE_MATCH, RULE, PromptScore, make_cell
from mla_convert.eval.tasks.sizes import TASKS
from mla_convert.manifests.evaluation.figure import Resampling
from mla_convert.manifests.evaluation.tasks import TasksSection
from mla_convert.progress import track


def measure_tasks(context: SuiteContext) -> TasksSection:
    """Put the same seeded prompts to the source and to the target; one model is in memory at a time.

    Prompts are scored as a served model reads them, see `Reader`. Intervals are over prompts; those of one passage
    share its text, so where a length has a single passage its interval does not show how passages differ.

    Args:
        context: The checked pair.

    Raises:
        CheckFailed: If a model computes NaN or infinity.
        InputRefused: If a model cannot be loaded, or its head is more than a matrix product.
    """
    source = context.prepared.source
    encoder = Encoder(load_tokenizer(context.source_folder))
    posed = pose_all(encoder, TASKS[context.suite], int(source.config.max_position_embeddings), context.seed)
    prompts = reading_order(posed.sets)
    with served(load_model(context.source_folder), STOCK) as running:
        expected = score_source(running, prompts)
    with served(load_model(context.target), context.prepared.options.backend) as running:
        found = score_target(running, prompts)
        ran = str(running.receipt["ran"])
    return _section(posed, expected, found, ran, context.seed)


def reading_order(sets: Sequence[PromptSet]) -> tuple[Prompt, ...]:
    """Every prompt once, those with the same text side by side."""
    return tuple(sorted({prompt for part in sets for prompt in part.prompts}, key=lambda prompt: prompt.context))


def score_source(running: Served, prompts: Sequence[Prompt]) -> dict[Prompt, PromptScore]:
    """Each prompt's answer and its wrong answer."""
    reader = Reader(running)
    return {
        prompt: PromptScore(
            reader.score(prompt.context, prompt.answer), reader.score(prompt.context, prompt.wrong).logprob
        )
        for prompt in track(prompts, "tasks: source", unit="prompt")
    }


def score_target(running: Served, prompts: Sequence[Prompt]) -> dict[Prompt, AnswerScore]:
    """Each prompt's answer."""
    reader = Reader(running)
    return {
        prompt: reader.score(prompt.context, prompt.answer) for prompt in track(prompts, "tasks: target", unit="prompt")
    }


def _section(
    posed: Posed, source: dict[Prompt, PromptScore], target: dict[Prompt, AnswerScore], ran: str, seed: int
) -> TasksSection:
    return TasksSection(
        seed=seed,
        informative_match=INFORMATIVE_MATCH,
        rule=RULE,
        ran=ran,
        cells=tuple(
            make_cell(
                part, [source[prompt] for prompt in part.prompts], [target[prompt] for prompt in part.prompts], seed
            )
            for part in posed.sets
        ),
        left_out=posed.left_out,
        resampling=Resampling(resamples=DEFAULT_RESAMPLES, confidence=DEFAULT_CONFIDENCE, seed=seed),
    )
