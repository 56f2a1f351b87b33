"""The receipt of an evaluation: which files were compared on which text, and everything that was found."""

from __future__ import annotations

import json
from typing import Final, Literal

from pydantic import Field

from mla_convert.manifests.environment import Environment
from mla_convert.manifests.evaluation.ladder import DecompositionSection, LadderSection
from mla_convert.manifests.evaluation.quality import QualitySection
from mla_convert.manifests.evaluation.systems import SystemsSection
from mla_convert.manifests.evaluation.tasks import GenerationSection, TasksSection
from mla_convert.manifests.record import Digest, Record, Sha256Hex

EVALUATION_SCHEMA: Final = "mla-convert/evaluation-receipt/v1"
RECEIPT_PREFIX = "eval-"


class ComparedFiles(Record):
    """The two checkpoints by digest; `manifest_sha256` links the receipt into the manifest's chain."""

    source: str
    source_digest: Digest
    target: str
    manifest_sha256: Sha256Hex
    canonical_mla_id: Digest


class OverlapRecord(Record):
    """Text that calibration or training has seen as well: a whole document, its name, or n-grams of its words.

    `share` is 1 for the same text, 0 for the same name alone, else the share of the document's n-grams.
    """

    document: str
    by: Literal["text", "name", "n-gram"]
    share: float = Field(ge=0, le=1)


class EvaluationText(Record):
    """One text."""

    name: str
    sha256: Sha256Hex
    documents: int = Field(gt=0)
    characters: int = Field(gt=0)
    tokens: int = Field(gt=0)


class Conditions(Record):
    """What was asked for; with the texts and the files this repeats the run."""

    suite: Literal["quick", "full"]
    parts: tuple[str, ...]
    backend: str
    seed: int = Field(ge=0)
    seq_len: int = Field(gt=1)
    stride: int = Field(gt=0)
    max_tokens: int = Field(gt=1)
    dtype: str
    texts: tuple[EvaluationText, ...]
    ids_digest: Digest
    bos_policy: str
    added_ids: tuple[int, ...]


class GateResult(Record):
    """One bar of a gates file; `measured` is None where the receipt has no such figure, which fails."""

    figure: str
    at_most: float | None
    at_least: float | None
    measured: float | None
    passed: bool


class PartTime(Record):
    """What a part took; `reused` says that it was found from an interrupted run."""

    part: str
    seconds: float = Field(ge=0)
    reused: bool


class EvaluationReceipt(Record):
    """One run of the suite; a part that was not asked for is None.

    `overlap_unchecked` names calibration texts whose words could not be had for comparison, each with the reason.
    """

    schema_version: Literal["mla-convert/evaluation-receipt/v1"] = EVALUATION_SCHEMA
    compared: ComparedFiles
    conditions: Conditions
    overlap: tuple[OverlapRecord, ...]
    overlap_unchecked: tuple[str, ...] = ()
    ladder: LadderSection | None
    decomposition: DecompositionSection | None
    quality: QualitySection | None
    tasks: TasksSection | None
    generation: GenerationSection | None
    systems: SystemsSection | None
    gates: tuple[GateResult, ...]
    times: tuple[PartTime, ...]
    environment: Environment

    def to_json_text(self) -> str:
        """The receipt as sorted, indented JSON with a final newline."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=2, allow_nan=False) + "\n"

    @classmethod
    def json_schema(cls) -> dict[str, object]:
        """The JSON Schema (draft 2020-12) of this version."""
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": EVALUATION_SCHEMA,
            **cls.model_json_schema(),
        }


def evaluation_schema_text() -> str:
    """The text of `manifests/schemas/evaluation-receipt-v1.json`."""
    return json.dumps(EvaluationReceipt.json_schema(), sort_keys=True, indent=2) + "\n"
