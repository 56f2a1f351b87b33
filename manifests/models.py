"""The conversion manifest: everything that was read, decided, written and measured in one conversion."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import FileDigest
from mla_convert.manifests.environment import Environment
from mla_convert.manifests.identity import Profile, SemanticIdentity
from mla_convert.manifests.layers import LayerReceipt
from mla_convert.manifests.quality import CalibrationLoss, MeasuredRecord, PredictionRecord
from mla_convert.manifests.record import Digest, Record, RelativePath, Sha256Hex
from mla_convert.manifests.refinement import RefinementRecord

MANIFEST_NAME = "mla_manifest.json"
SCHEMA_VERSION: Final = "mla-convert/conversion-manifest/v1"


class SourceRecord(Record):
    """The checkpoint that was converted."""

    location: str
    kind: Literal["hf-folder", "hub", "gguf"]
    family: str
    revision: str | None
    files: tuple[FileDigest, ...] = Field(min_length=1)
    checkpoint_digest: Digest
    tokenizer_digest: Digest | None
    config_digest: Digest
    dtype_counts: dict[str, int]
    unknown_config_keys: tuple[str, ...]


class MethodRecord(Record):
    """What was asked for and how it was done."""

    tool: str
    tool_version: str
    plan_id: str
    profile: Profile
    rope_policy: str
    factorization: str
    weighting: str
    gamma: Literal["measured", "one"]
    seed: int
    output_dtype: str
    latent_norm_route: Literal["epsilon", "constant"]
    residual_scale: float = Field(gt=0)
    rerounded_tensors: tuple[str, ...]
    padding: str | None
    paper_contracts: tuple[str, ...]
    recipe: str | None
    freqfold: int | None = Field(gt=0)
    rope_stride: float = Field(gt=0)
    balance: str
    rank_rule: str | None
    centring: str


class CalibrationText(Record):
    """One calibration text: what it holds, what was drawn from it, and what that counts for in the statistics.

    `sha256` is over the names and texts of its documents, in order.
    """

    name: str
    kind: str
    sha256: Sha256Hex
    documents: int = Field(ge=0)
    characters: int = Field(ge=0)
    weight: float = Field(gt=0, le=1)
    windows: int = Field(ge=0)
    long_windows: int = Field(ge=0)
    tokens: int = Field(ge=0)
    mean_square_input: float = Field(ge=0)
    key_share: float = Field(ge=0, le=1)
    value_share: float = Field(ge=0, le=1)


class SelfTextRecord(Record):
    """How the source wrote text of its own; `digest` is the key under which it was kept."""

    digest: Digest
    temperature: float = Field(gt=0)
    top_p: float = Field(gt=0, le=1)
    seed: int
    prompts: int = Field(ge=0)
    unprompted: int = Field(ge=0)


class DocumentDigest(Record):
    """One document and the SHA-256 of its UTF-8 text."""

    id: str
    sha256: Sha256Hex


class CalibrationRecord(Record):
    """The text whose activations weighted the factorization."""

    texts: tuple[CalibrationText, ...]
    documents: tuple[DocumentDigest, ...]
    windows: int = Field(ge=0)
    window_length: int = Field(gt=0)
    long_windows: int = Field(ge=0)
    long_window_length: int = Field(ge=0)
    tokens: int = Field(ge=0)
    seed: int
    chat_template_sha256: Sha256Hex | None
    self_text: SelfTextRecord | None
    statistics_digest: Digest
    damping: float = Field(ge=0)
    under_determined: bool


class SplitRecord(Record):
    """The adaptation's split by document id; all None before adaptation."""

    train: tuple[str, ...] | None
    validation: tuple[str, ...] | None
    test: tuple[str, ...] | None
    deduplication_policy: str | None
    contamination_policy: str | None


NO_SPLIT = SplitRecord(train=None, validation=None, test=None, deduplication_policy=None, contamination_policy=None)


class ReloadCheck(Record):
    """Logits of the written checkpoint, loaded again, against those of the source or of the reference."""

    kind: Literal["lossless-vs-source", "lossy-vs-reference"]
    probe_tokens: int = Field(gt=0)
    dtype: str
    max_abs_logit_error: float = Field(ge=0)
    max_abs_logit: float = Field(ge=0)
    relative_error: float = Field(ge=0)
    tolerance: float = Field(ge=0)
    passed: bool
    worst_layer: int | None
    layer_errors: tuple[float, ...]
    whole_model: bool
    calibration_loss: CalibrationLoss | None


class Sidecar(Record):
    """A file copied byte for byte from the source."""

    path: RelativePath
    sha256: Sha256Hex


class OutputsRecord(Record):
    """Every file of the folder except the manifest itself."""

    files: tuple[FileDigest, ...]
    sidecars: tuple[Sidecar, ...]
    total_bytes: int = Field(ge=0)


class ConversionManifest(Record):
    """One conversion, schema v1. The fields are described in docs/manifest.md."""

    schema_version: Literal["mla-convert/conversion-manifest/v1"]
    canonical_mla_id: Digest
    identity: SemanticIdentity
    source: SourceRecord
    method: MethodRecord
    layers: tuple[LayerReceipt, ...]
    calibration: CalibrationRecord | None
    split: SplitRecord
    reload_check: ReloadCheck
    prediction: PredictionRecord | None
    measured: MeasuredRecord | None
    refinement: RefinementRecord | None
    outputs: OutputsRecord
    environment: Environment
    adaptation: None
    warnings: tuple[str, ...]

    def to_json_text(self) -> str:
        """The manifest as sorted, indented JSON with a final newline."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=2, allow_nan=False) + "\n"

    def write(self, folder: Path) -> Path:
        """Write the manifest into `folder` in one step and return its path."""
        target = folder / MANIFEST_NAME
        partial = target.with_name(f".{MANIFEST_NAME}.partial")
        partial.write_bytes(self.to_json_text().encode())
        os.replace(partial, target)
        return target

    @classmethod
    def json_schema(cls) -> dict[str, object]:
        """The JSON Schema (draft 2020-12) of this version."""
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": SCHEMA_VERSION,
            **cls.model_json_schema(),
        }


def schema_text() -> str:
    """The text of `manifests/schemas/conversion-manifest-v1.json`."""
    return json.dumps(ConversionManifest.json_schema(), sort_keys=True, indent=2) + "\n"


def parse(text: str) -> ConversionManifest:
    """Parse the text of a manifest.

    Raises:
        ValueError: Not JSON, a key written twice, an unknown schema version, or (as pydantic's
            `ValidationError`, with one entry per fault) a field that is missing, unknown or wrong.
    """
    raw = json.loads(text, object_pairs_hook=refuse_repeats)
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version: expected {SCHEMA_VERSION!r}, found {version!r}")
    return ConversionManifest.model_validate_json(text)


def load(path: Path) -> ConversionManifest:
    """Read a manifest from its file, or from the folder that holds it.

    Raises:
        InputRefused: There is no such file, or it is no manifest of a known version.
    """
    file = path / MANIFEST_NAME if path.is_dir() else path
    try:
        return parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputRefused("no readable manifest", where=str(file), found=str(error)) from error
    except (ValueError, RecursionError) as error:
        raise InputRefused(
            "not a valid conversion manifest", where=str(file), found="; ".join(faults(error))
        ) from error


def faults(error: Exception) -> tuple[str, ...]:
    """What is wrong with a manifest, one line per fault, from the error that `parse` raised."""
    if isinstance(error, ValidationError):
        return tuple(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
    return (str(error) or type(error).__name__,)


def refuse_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object of its pairs, as a hook of `json.loads`.

    Raises:
        ValueError: A key is written twice; readers differ in which they take, so such a text has no single meaning.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"a key is written twice among {sorted(key for key, _ in pairs)}")
    return result
