"""Documents as two JSONL files that share none: one to calibrate on, one held out."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mla_convert.cache_dir import fill_once
from mla_convert.convert.calibration_text import Document
from mla_convert.manifests.digest import sha256_file, sha256_json

Split = Literal["calibration", "heldout"]
SPLITS: tuple[Split, Split] = ("calibration", "heldout")


@dataclass(frozen=True)
class SplitFacts:
    """What one file holds. `characters` counts the code points of the texts, without their ids."""

    documents: int
    characters: int
    sha256: str


@dataclass(frozen=True)
class TextSplits:
    """Two JSONL files, a line each `{"id": …, "text": …}`, sorted by id.

    Attributes:
        name: Kind of text, the interpreter's version and the digest of all documents.
        calibration: File to calibrate on.
        heldout: File that calibration does not see.
        calibration_facts: What the first holds.
        heldout_facts: What the second holds.
    """

    name: str
    calibration: Path
    heldout: Path
    calibration_facts: SplitFacts
    heldout_facts: SplitFacts


def split_of(name: str) -> Split:
    """The split of a document: by the first bit of the SHA-256 of its name, so about half each."""
    return "calibration" if hashlib.sha256(name.encode()).digest()[0] < 128 else "heldout"


def write_document_splits(folder: Path, kind: str, documents: Sequence[Document]) -> TextSplits:
    """Write documents of the running interpreter as two files below `folder`, or find them there.

    Args:
        folder: Where the subfolder goes; its name holds the digest of names and texts, so other texts never
            meet old files.
        kind: What the texts are, for the name.
        documents: All of them, with different names.
    """
    chosen = sorted(documents, key=lambda document: document.name)
    digest = sha256_json([[document.name, document.sha256] for document in chosen]).removeprefix("sha256:")
    name = f"{kind}-python{platform.python_version()}-{digest[:16]}"
    target = folder / name
    if not (target / "splits.json").is_file():
        with fill_once(target) as working:
            facts = {}
            for split in SPLITS:
                part = [document for document in chosen if split_of(document.name) == split]
                facts[split] = asdict(_write_jsonl(working / f"{split}.jsonl", part))
            (working / "splits.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    found = json.loads((target / "splits.json").read_text(encoding="utf-8"))
    calibration, heldout = (SplitFacts(**found[split]) for split in SPLITS)
    return TextSplits(name, target / "calibration.jsonl", target / "heldout.jsonl", calibration, heldout)


def _write_jsonl(path: Path, documents: Sequence[Document]) -> SplitFacts:
    lines = [json.dumps({"id": item.name, "text": item.text}, ensure_ascii=False) + "\n" for item in documents]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    return SplitFacts(len(documents), sum(len(item.text) for item in documents), sha256_file(path))
