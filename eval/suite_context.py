"""What every part of the evaluation suite is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mla_convert.eval.evaluate import Prepared
from mla_convert.manifests.models import ConversionManifest

SuiteName = Literal["quick", "full"]


@dataclass(frozen=True)
class SuiteContext:
    """A checked pair of checkpoints and a text. A part loads what it runs itself, one model at a time.

    Attributes:
        prepared: The source, its digests, the texts, the windows and the options (`seq_len`, `seed`, `backend`, …).
        target: The converted folder; verified, and made from that source.
        manifest: Its manifest.
        suite: How much to measure: `quick` in minutes on two cores, `full` in some twenty.
    """

    prepared: Prepared
    target: Path
    manifest: ConversionManifest
    suite: SuiteName

    @property
    def seed(self) -> int:
        """Of every random choice."""
        return self.prepared.options.seed

    @property
    def source_folder(self) -> Path:
        """The source as a folder that transformers loads."""
        return self.prepared.source.location.folder
