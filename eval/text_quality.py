"""Perplexity, divergence, agreement and calibration of a target beside its source: by text, overall, by position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.eval.bootstrap import DEFAULT_CONFIDENCE
from mla_convert.eval.domain_windows import DomainWindows, TokenTexts, cut_by_text, cut_long
from mla_convert.eval.evaluate import Prepared
from mla_convert.eval.loading import load_model
from mla_convert.eval.quality import token_scores
from mla_convert.eval.serving import served
from mla_convert.eval.source_states import source_states
from mla_convert.eval.suite_context import SuiteContext, SuiteName
from mla_convert.eval.text import WindowPlan, text_digest
from mla_convert.eval.token_scores import TokenScores
from mla_convert.eval.window_table import WindowTable, position_buckets
from mla_convert.manifests.digest import sha256_json
from mla_convert.manifests.evaluation.figure import Resampling
from mla_convert.manifests.evaluation.quality import PositionBucket, QualitySection, TextQuality, WindowSums

ALL_TEXTS: Final = "all texts"
DTYPE: Final = "float32"
# Tokens of a long window that the target takes at a time: its scores are (H, chunk, T), and nothing to their right.
LONG_CHUNK: Final = 512


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        tokens: Most tokens in windows of all texts together, `--max-tokens` where that is less; None for no limit of
            its own. Never so few that a text would have no window.
        long_length: Most tokens of a long window; the model's positions where those are fewer.
        long_windows: Most long windows.
    """

    tokens: int | None
    long_length: int
    long_windows: int


SIZES: Mapping[SuiteName, Sizes] = {
    "quick": Sizes(tokens=4_096, long_length=2_048, long_windows=1),
    "full": Sizes(tokens=None, long_length=8_192, long_windows=2),
}


def measure_quality(context: SuiteContext) -> QualitySection:
    """Compare both checkpoints on the prepared texts, each window within one text.

    Windows are those of `cut_by_text`; they may span documents of their text. All sums are float64, the models'
    arithmetic float32. The source runs first, or its states are found on disk; then the target, from the pages of
    its latent cache where the backend has one.

    Args:
        context: What to compare, on what.

    Raises:
        UsageFault: If a text is given twice or `--max-tokens` is less than a window for each text.
        InputRefused: If a text is shorter than a window, or a checkpoint cannot be loaded.
        CheckFailed: If a model computes NaN or infinity, or a figure is not finite.
    """
    prepared, sizes = context.prepared, SIZES[context.suite]
    texts = TokenTexts.of(prepared.corpora, load_tokenizer(context.source_folder))
    cut = cut_by_text(texts, _limited(prepared, sizes))
    long = _cut_long(prepared, texts, sizes)
    scores, long_scores = _score(context, cut, long)
    resampling = Resampling(
        resamples=prepared.options.resamples, confidence=DEFAULT_CONFIDENCE, seed=prepared.options.seed
    )
    table = WindowTable.of(scores)
    return QualitySection(
        dtype=DTYPE,
        seq_len=prepared.plan.seq_len,
        stride=prepared.plan.stride,
        bos_policy=cut.windows.bos_policy,
        overall=_text_quality(ALL_TEXTS, text_digest(prepared.corpora), table, resampling),
        domains=tuple(
            _text_quality(text.name, text.sha256, table.take(_rows_of(cut, index)), resampling)
            for index, text in enumerate(cut.texts)
        ),
        buckets=_buckets(cut, scores, resampling),
        long_context=() if long is None else _buckets(long, long_scores, resampling),
        long_seq_len=None if long is None else long.windows.ids.shape[1],
        windows=_window_sums(cut, table),
        resampling=resampling,
    )


def _limited(prepared: Prepared, sizes: Sizes) -> WindowPlan:
    plan = prepared.plan
    if sizes.tokens is None:
        return plan
    enough = max(sizes.tokens, len(prepared.corpora) * plan.seq_len)
    return replace(plan, max_tokens=min(plan.max_tokens, enough))


def _cut_long(prepared: Prepared, texts: TokenTexts, sizes: Sizes) -> DomainWindows | None:
    length = min(sizes.long_length, int(prepared.source.config.max_position_embeddings))
    if length <= prepared.plan.seq_len:
        return None
    return cut_long(texts, length, sizes.long_windows, prepared.plan.seed)


def _score(
    context: SuiteContext, cut: DomainWindows, long: DomainWindows | None
) -> tuple[tuple[TokenScores, ...], tuple[TokenScores, ...]]:
    """Scores of both sets of windows; one model is in memory at a time."""
    prepared = context.prepared
    states = source_states(prepared.source, prepared.digests, cut.windows)
    long_states = None if long is None else source_states(prepared.source, prepared.digests, long.windows)
    model = load_model(context.target)
    with served(model, prepared.options.backend, from_pages=True) as running:
        scores = tuple(token_scores(states, running, cut.windows))
        if long is None or long_states is None:
            return scores, ()
        # One head for both: it is the largest thing here beside the model.
        long_states = replace(long_states, head=states.head)
        return scores, tuple(token_scores(long_states, running, long.windows, LONG_CHUNK))


def _rows_of(cut: DomainWindows, text: int) -> list[int]:
    return [row for row, owner in enumerate(cut.text) if owner == text]


def _text_quality(name: str, sha256: str, table: WindowTable, resampling: Resampling) -> TextQuality:
    return TextQuality(
        name=name,
        sha256=sha256,
        windows=len(table.tokens),
        tokens=int(table.tokens.sum()),
        **table.figures(name, resampling),
    )


def _buckets(cut: DomainWindows, scores: tuple[TokenScores, ...], resampling: Resampling) -> tuple[PositionBucket, ...]:
    windows = cut.windows
    return position_buckets(scores, windows.first_scored, windows.ids.shape[1], ALL_TEXTS, resampling)


def _window_sums(cut: DomainWindows, table: WindowTable) -> tuple[WindowSums, ...]:
    return tuple(
        WindowSums(
            text=cut.texts[owner].name,
            start=cut.windows.starts[row],
            ids_digest=sha256_json(cut.windows.ids[row].tolist()),
            tokens=int(table.tokens[row]),
            source_nll=float(table.source_nll[row]),
            target_nll=float(table.target_nll[row]),
            kl=float(table.kl[row]),
            top1=int(table.top1[row]),
            top5=int(table.top5[row]),
        )
        for row, owner in enumerate(cut.text)
    )
