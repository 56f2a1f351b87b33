"""The result of an evaluation, with everything that is needed to repeat it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from mla_convert.errors import CheckFailed
from mla_convert.eval.bootstrap import Figures, Intervals, WindowScores
from mla_convert.eval.cache_bytes import CacheMeasurement
from mla_convert.eval.text import SharedDocument
from mla_convert.manifests.environment import Environment
from mla_convert.manifests.quality import MeasuredRecord

EVALUATION_SCHEMA = "mla-convert/evaluation/v1"


@dataclass(frozen=True)
class TextFacts:
    """The text that was evaluated on.

    Attributes:
        names: What the user gave.
        sha256: Hexadecimal digest of documents and names.
        documents: Documents in it.
        characters: Characters in it.
        text_tokens: Tokens of the whole text.
        windows: Windows that were run.
        tokens: Tokens that were run.
        scored_tokens: Tokens whose prediction was scored.
        ids_digest: Digest of the tokens that were run.
        bos_policy: Whether documents open with the tokenizer's own tokens.
        added_ids: Those tokens.
        shared_with_calibration: Documents that calibration has read, empty unless allowed.
    """

    names: tuple[str, ...]
    sha256: str
    documents: int
    characters: int
    text_tokens: int
    windows: int
    tokens: int
    scored_tokens: int
    ids_digest: str
    bos_policy: str
    added_ids: tuple[int, ...]
    shared_with_calibration: tuple[SharedDocument, ...]


@dataclass(frozen=True)
class Subjects:
    """The two checkpoints, by place and digest.

    Attributes:
        source: What the user gave.
        source_digest: Combined digest of its weight files.
        target: The converted folder.
        manifest_sha256: Hexadecimal digest of its manifest file.
        canonical_mla_id: From that manifest.
    """

    source: str
    source_digest: str
    target: str
    manifest_sha256: str
    canonical_mla_id: str


@dataclass(frozen=True)
class Evaluation:
    """A target compared with its source, both in float32; the source runs by stock transformers.

    Attributes:
        subjects: What was compared.
        figures: Over all windows.
        intervals: Bootstrap intervals, None for a single window.
        scores: Sums by window.
        source_cache: What the source's cache holds.
        target_cache: What the target's cache holds.
        receipt: What the target ran on, see `Served.receipt`.
        text: On what text.
        seq_len: Tokens per window.
        stride: Tokens between the starts of windows.
        seed: Of the choice of windows and of the resampling.
        source_reused: Whether the source's states were found on disk.
        environment: Versions, machine and command line.
    """

    subjects: Subjects
    figures: Figures
    intervals: Intervals | None
    scores: WindowScores
    source_cache: CacheMeasurement
    target_cache: CacheMeasurement
    receipt: dict[str, object]
    text: TextFacts
    seq_len: int
    stride: int
    seed: int
    source_reused: bool
    environment: Environment

    def record(self) -> MeasuredRecord:
        """The figures and what they were measured on, as a manifest has them.

        Raises:
            CheckFailed: If the target is so bad that its perplexity is no finite number.
        """
        figures = self.figures
        if not all(math.isfinite(value) for value in vars(figures).values()):
            raise CheckFailed("the target's perplexity is not finite", where=", ".join(self.text.names))
        return MeasuredRecord(
            kl=figures.kl,
            perplexity=figures.target_perplexity,
            source_perplexity=figures.source_perplexity,
            ratio=figures.ratio,
            top1_agreement=figures.top1_agreement,
            text=self.text.names,
            text_sha256=self.text.sha256,
            tokens=self.text.tokens,
            scored_tokens=self.text.scored_tokens,
            window=self.seq_len,
            stride=self.stride,
            seed=self.seed,
        )

    def to_json(self) -> dict[str, object]:
        """The whole result; figures are unrounded, `kl` is `KL(source ‖ target)` in nats per token."""
        figures, subjects = self.figures, self.subjects
        return {
            "schema_version": EVALUATION_SCHEMA,
            "source": {
                "path": subjects.source,
                "checkpoint_digest": subjects.source_digest,
                "perplexity": figures.source_perplexity,
            },
            "target": {
                "path": subjects.target,
                "manifest_sha256": subjects.manifest_sha256,
                "canonical_mla_id": subjects.canonical_mla_id,
                "perplexity": figures.target_perplexity,
            },
            "perplexity_ratio": figures.ratio,
            "kl": figures.kl,
            "top1_agreement": figures.top1_agreement,
            "intervals": None if self.intervals is None else asdict(self.intervals),
            "cache_bytes_per_token": {
                "source": self.source_cache.bytes_per_token,
                "target": self.target_cache.bytes_per_token,
                "dtype": self.target_cache.dtype,
            },
            "cache": {"source": self.source_cache.to_json(), "target": self.target_cache.to_json()},
            "receipt": self.receipt,
            "text": asdict(self.text),
            "seq_len": self.seq_len,
            "stride": self.stride,
            "seed": self.seed,
            "dtype": "float32",
            "source_states_reused": self.source_reused,
            "windows": {name: values.tolist() for name, values in vars(self.scores).items()},
            "environment": self.environment.model_dump(mode="json"),
        }
