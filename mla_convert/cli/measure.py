"""Held-out text for `convert --measure`: checked before the conversion, run on its files before they get their name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mla_convert.convert.calibration_text import read_corpus
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.options import ConvertOptions
from mla_convert.errors import CheckFailed
from mla_convert.eval import defaults
from mla_convert.eval.evaluate import EvalOptions, Prepared, evaluate_target, prepare
from mla_convert.eval.evaluation import Evaluation
from mla_convert.eval.text import refuse_overlap, shared_documents
from mla_convert.manifests.quality import MeasuredRecord


@dataclass(frozen=True)
class HeldOut:
    """A source and a text, ready; called with a converted folder it measures that."""

    prepared: Prepared

    @classmethod
    def of(cls, source: SourceCheckpoint, texts: Sequence[str], options: ConvertOptions, tokens: int) -> HeldOut:
        """Read the text and cut it into windows.

        Args:
            source: The opened source.
            texts: Held-out text.
            options: Of the conversion: its calibration text must be other text.
            tokens: Most tokens to run.

        Raises:
            UsageFault: If there are fewer tokens than a window has.
            InputRefused: For text that cannot be used or that calibration is given as well.
        """
        length = min(defaults.SEQ_LEN, int(source.config.max_position_embeddings), tokens)
        wanted = EvalOptions(max_tokens=tokens, seq_len=length, seed=options.seed, text_field=options.text_field)
        prepared = prepare(source, texts, wanted)
        calibration = [read_corpus(text, options.text_field) for text in options.calibration]
        documents = [document for corpus in calibration for document in corpus.documents]
        names = {document.name for document in documents}
        refuse_overlap(shared_documents(names, {item.sha256 for item in documents}, prepared.corpora), allowed=False)
        return cls(prepared)

    def __call__(self, folder: Path) -> MeasuredRecord:
        """Evaluate a converted folder."""
        return measured_record(evaluate_target(self.prepared, folder))


def measured_record(done: Evaluation) -> MeasuredRecord:
    """The manifest's `measured` of an evaluation.

    Raises:
        CheckFailed: If the target is so bad that its perplexity is no finite number.
    """
    figures = done.figures
    if not all(math.isfinite(value) for value in vars(figures).values()):
        raise CheckFailed("the written checkpoint's perplexity on the held-out text is not finite", where="--measure")
    return MeasuredRecord(
        kl=figures.kl,
        perplexity=figures.target_perplexity,
        source_perplexity=figures.source_perplexity,
        ratio=figures.ratio,
        top1_agreement=figures.top1_agreement,
        text=done.text.names,
        text_sha256=done.text.sha256,
        tokens=done.text.tokens,
        scored_tokens=done.text.scored_tokens,
        window=done.seq_len,
        stride=done.stride,
        seed=done.seed,
    )
