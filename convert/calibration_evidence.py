"""What calibration read and measured, and how the manifest records it."""

from __future__ import annotations

from dataclasses import dataclass

from mla_convert.convert.calibrate import StatisticsStore
from mla_convert.convert.calibration_mix import TokenWindows
from mla_convert.convert.calibration_text import Corpus, Document
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.plan import ConversionPlan
from mla_convert.manifests.models import CalibrationRecord, CalibrationText, DocumentDigest, SelfTextRecord


@dataclass(frozen=True)
class TextSummary:
    """What one text counts for in the statistics.

    Attributes:
        tokens: Tokens measured on.
        mean_square_input: Mean `|x|²` of the attention input, mean over the layers.
        key_share: Share of the weight of score errors that its tokens hold, mean over the layers.
        value_share: The same of value errors.
    """

    tokens: int
    mean_square_input: float
    key_share: float
    value_share: float


@dataclass(frozen=True)
class CalibrationEvidence:
    """What calibration read and measured, and the damping that so many tokens need."""

    corpora: tuple[Corpus, ...]
    windows: TokenWindows
    long_windows: TokenWindows | None
    store: StatisticsStore
    damping: float
    summaries: tuple[TextSummary, ...]
    chat_template_sha256: str | None
    self_text: SelfTextRecord | None
    warnings: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens measured on."""
        return sum(summary.tokens for summary in self.summaries)

    @property
    def documents(self) -> tuple[Document, ...]:
        """Those that any window touches, each once."""
        long = () if self.long_windows is None else self.long_windows.documents
        return tuple(dict.fromkeys((*self.windows.documents, *long)))


def calibration_record(
    plan: ConversionPlan, source: SourceCheckpoint, evidence: CalibrationEvidence
) -> CalibrationRecord:
    """The manifest's section on calibration."""
    windows, long = evidence.windows, evidence.long_windows
    return CalibrationRecord(
        texts=tuple(_calibration_text(index, plan, evidence) for index in range(len(evidence.corpora))),
        documents=tuple(DocumentDigest(id=item.name, sha256=item.sha256) for item in evidence.documents),
        windows=windows.ids.shape[0],
        window_length=windows.ids.shape[1],
        long_windows=0 if long is None else long.ids.shape[0],
        long_window_length=0 if long is None else long.ids.shape[1],
        tokens=evidence.tokens,
        seed=plan.seed,
        chat_template_sha256=evidence.chat_template_sha256,
        self_text=evidence.self_text,
        statistics_digest=evidence.store.digest,
        damping=evidence.damping if plan.damping == "auto" else 0.0,
        under_determined=evidence.tokens < source.shape.hidden_size,
    )


def _calibration_text(index: int, plan: ConversionPlan, evidence: CalibrationEvidence) -> CalibrationText:
    corpus, summary = evidence.corpora[index], evidence.summaries[index]
    assert plan.calibration is not None  # there is evidence
    return CalibrationText(
        name=corpus.name,
        kind=corpus.kind,
        sha256=corpus.sha256,
        documents=len(corpus.documents),
        characters=corpus.characters,
        weight=plan.calibration.weights[index],
        windows=evidence.windows.corpus.count(index),
        long_windows=0 if evidence.long_windows is None else evidence.long_windows.corpus.count(index),
        tokens=summary.tokens,
        mean_square_input=summary.mean_square_input,
        key_share=summary.key_share,
        value_share=summary.value_share,
    )
