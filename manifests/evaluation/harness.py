"""The receipt of a run of EleutherAI's lm-evaluation-harness over a source and its conversion."""

from __future__ import annotations

import json
from typing import Final, Literal

from pydantic import Field

from mla_convert.manifests.digest import FileDigest
from mla_convert.manifests.environment import Environment
from mla_convert.manifests.evaluation.receipt import ComparedFiles
from mla_convert.manifests.record import Digest, Record

HARNESS_SCHEMA: Final = "mla-convert/harness-receipt/v1"


class HarnessMetric(Record):
    """One metric of one task under one filter, as the harness gives it; None where that is no finite number.

    `difference` is target − source. The standard errors are each model's own: the difference of two models on the same
    prompts is known better than they say.
    """

    task: str
    metric: str
    filter: str
    higher_is_better: bool | None
    source: float | None
    source_stderr: float | None
    target: float | None
    target_stderr: float | None
    difference: float | None


class HarnessTask(Record):
    """A task that ran. `prompts_digest` is over prompts and answers, which were the same for both models."""

    task: str
    version: str
    shots: int | None
    examples: int = Field(gt=0)
    prompts_digest: Digest


class HarnessReceipt(Record):
    """One run. `task_files` are those of `--task-path`; tasks from elsewhere came with the harness's version."""

    schema_version: Literal["mla-convert/harness-receipt/v1"] = HARNESS_SCHEMA
    compared: ComparedFiles
    harness: str
    asked: tuple[str, ...]
    limit: int | None
    batch_size: int = Field(gt=0)
    seed: int = Field(ge=0)
    dtype: str
    offline: bool
    tasks: tuple[HarnessTask, ...]
    metrics: tuple[HarnessMetric, ...]
    task_files: tuple[FileDigest, ...]
    environment: Environment

    def to_json_text(self) -> str:
        """The receipt as sorted, indented JSON with a final newline."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=2, allow_nan=False) + "\n"
