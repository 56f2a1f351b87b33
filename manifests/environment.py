"""What a run was executed with: versions, machine, command line and times. Imports none of what it names."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata

import psutil

from mla_convert.manifests.record import Record

PACKAGES = (
    "accelerate",
    "datasets",
    "gguf",
    "huggingface_hub",
    "mla-convert",
    "numpy",
    "peft",
    "pydantic",
    "safetensors",
    "sentencepiece",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
)


class Environment(Record):
    """The run's surroundings; a receipt, so no part of it enters the identity."""

    python: str
    implementation: str
    platform: str
    machine: str
    cpu_count: int
    memory_bytes: int
    packages: dict[str, str]
    command: tuple[str, ...]
    started: str
    finished: str | None

    def finish(self) -> Environment:
        """The same record with `finished` set to the present time."""
        return self.model_copy(update={"finished": utc_now()})


def utc_now() -> str:
    """The present time in UTC, ISO 8601 to the second: `2025-01-31T12:00:00+00:00`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def installed_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of those distributions among `names` that are installed, read from their metadata only."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def capture(argv: Sequence[str]) -> Environment:
    """Record the environment at the start of a run; call `finish()` on the result when it ends.

    Args:
        argv: The command line, program name first.
    """
    return Environment(
        python=platform.python_version(),
        implementation=platform.python_implementation(),
        platform=platform.platform(),
        machine=platform.machine(),
        cpu_count=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        packages=installed_versions(),
        command=tuple(argv),
        started=utc_now(),
        finished=None,
    )
