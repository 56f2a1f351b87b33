"""Finished parts of a run that is not finished, kept on disk so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from mla_convert.cache_dir import cache_root
from mla_convert.manifests.digest import sha256_json
from mla_convert.manifests.evaluation.receipt import ComparedFiles, Conditions
from mla_convert.manifests.record import Record

# Part of the key: raised whenever a part measures something else.
SUITE_VERSION = 1
PACKAGES = ("mla-convert", "torch", "transformers")


@dataclass(frozen=True)
class KeptPart:
    """A part and the seconds that it took."""

    section: Record
    seconds: float


@dataclass(frozen=True)
class PartStore:
    """A folder of finished parts; what is asked of the suite decides its name, but for which parts are wanted."""

    folder: Path

    @classmethod
    def of(cls, compared: ComparedFiles, conditions: Conditions) -> PartStore:
        """The store of one request."""
        asked = conditions.model_dump(mode="json", exclude={"parts"})
        versions = {name: metadata.version(name) for name in PACKAGES}
        key = [SUITE_VERSION, compared.model_dump(mode="json"), asked, versions]
        return cls(cache_root() / "evaluations" / sha256_json(key).removeprefix("sha256:"))

    def load(self, name: str, section: type[Record]) -> KeptPart | None:
        """A part, or None where it has not been finished, or was by a version with other fields."""
        try:
            held = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
            kept = section.model_validate_json(json.dumps(held["section"]))
            return KeptPart(kept, float(held["seconds"]))
        except (OSError, ValidationError, json.JSONDecodeError, KeyError, TypeError):
            return None

    def keep(self, name: str, part: KeptPart) -> None:
        """Write a part in one step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{name}.partial-{os.getpid()}"
        held = {"seconds": part.seconds, "section": part.section.model_dump(mode="json")}
        partial.write_text(json.dumps(held), encoding="utf-8")
        os.replace(partial, self.folder / f"{name}.json")

    def clear(self) -> None:
        """Forget all parts: the receipt has them."""
        shutil.rmtree(self.folder, ignore_errors=True)
