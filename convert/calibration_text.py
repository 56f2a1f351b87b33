"""Calibration text: from a file, a folder, JSONL or a `datasets` id to seeded windows of tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mla_convert.errors import EnvironmentFault, InputRefused

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text")
TextKind = Literal["text-file", "folder", "jsonl", "datasets"]


@dataclass(frozen=True)
class Document:
    """One document and the name it is known by."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Digest of its UTF-8 text."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """A named, digested list of documents.

    Attributes:
        name: What the user gave.
        kind: How it was read.
        documents: In a stable order.
        sha256: Digest over the documents' names and texts, in order.
    """

    name: str
    kind: TextKind
    documents: tuple[Document, ...]
    sha256: str

    @property
    def characters(self) -> int:
        """Characters in all documents."""
        return sum(len(document.text) for document in self.documents)


def read_corpus(given: str, text_field: str = "text") -> Corpus:
    """Read a text source.

    Args:
        given: A text file, a folder of text and JSONL files, a `.jsonl` file, or `datasets:<id>[::<split>]`.
        text_field: Field of JSONL objects and dataset rows that holds the text.

    Raises:
        InputRefused: If nothing is there, a line is not an object with the field, or all documents are empty.
    """
    if given.startswith("datasets:"):
        kind: TextKind = "datasets"
        documents = tuple(_read_dataset(given, text_field))
    else:
        path = Path(given).expanduser()
        if path.is_dir():
            kind = "folder"
            files = sorted(item for item in path.rglob("*") if item.suffix in (*TEXT_SUFFIXES, ".jsonl"))
            documents = tuple(document for file in files for document in _read_file(file, path, text_field))
        elif path.is_file():
            kind = "jsonl" if path.suffix == ".jsonl" else "text-file"
            documents = tuple(_read_file(path, path.parent, text_field))
        else:
            raise InputRefused(
                "no such text",
                expected="a text file, a .jsonl file, a folder of them, or datasets:<id>[::<split>]",
                where=given,
            )
    documents = tuple(document for document in documents if document.text.strip())
    if not documents:
        raise InputRefused("no text in it", expected="at least one document that is not empty", where=given)
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps([document.name, document.sha256]).encode())
    return Corpus(given, kind, documents, digest.hexdigest())


def _read_file(path: Path, root: Path, text_field: str) -> Iterator[Document]:
    name = path.relative_to(root).as_posix()
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputRefused(f"text that cannot be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise InputRefused(f"not UTF-8 text: {error}", where=str(path)) from error
    if path.suffix != ".jsonl":
        yield Document(name, content)
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield _json_document(line, f"{name}:{number}", f"{path}, line {number}", text_field)


def _json_document(line: str, name: str, where: str, text_field: str) -> Document:
    try:
        row: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputRefused(f"not JSON: {error}", where=where) from error
    if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
        found = ", ".join(sorted(row)) if isinstance(row, dict) else type(row).__name__
        raise InputRefused("a row without text", expected=f"a string field {text_field!r}", found=found, where=where)
    if not row[text_field].isascii():
        try:
            row[text_field].encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputRefused(f"text that is not Unicode: {error.reason}", where=where) from error
    return Document(str(row.get("id", name)), row[text_field])


def _read_dataset(given: str, text_field: str) -> Iterator[Document]:
    from datasets import load_dataset

    _, _, rest = given.partition(":")
    identifier, _, split = rest.partition("::")
    try:
        rows = load_dataset(identifier, split=split or "train")
    except (OSError, ValueError, ConnectionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentFault(f"datasets cannot load it: {reason}", where=given) from error
    if text_field not in (rows.column_names or []):
        raise InputRefused(
            "a dataset without that text field",
            expected=f"a column {text_field!r}",
            found=", ".join(rows.column_names or []),
            where=given,
        )
    for number, text in enumerate(rows[text_field]):
        yield Document(f"{identifier}:{number}", str(text))


@dataclass(frozen=True)
class TokenWindows:
    """Windows of calibration tokens.

    Attributes:
        ids: (N, T) int64.
        documents: Those the windows touch, in the order of the corpora.
    """

    ids: Tensor
    documents: tuple[Document, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.ids.numel())


def sample_windows(corpora: tuple[Corpus, ...], tokenizer: Any, *, tokens: int, length: int, seed: int) -> TokenWindows:
    """Draw seeded windows from as many documents as there are windows, or from all documents in turn.

    Documents are shuffled; each gives one random, not yet used slice of at most `length` tokens a round, and the
    slices are joined and cut into windows. Breadth of documents matters more to the statistics than length.

    Args:
        corpora: Where the text comes from.
        tokenizer: The source's.
        tokens: Number of calibration tokens; rounded down to whole windows, at least one.
        length: Tokens per window.
        seed: Of the shuffle and the slices.

    Raises:
        InputRefused: If the text is shorter than one window.
    """
    documents = [document for corpus in corpora for document in corpus.documents]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(documents), generator=generator).tolist()
    wanted = max(1, tokens // length)
    stream: list[int] = []
    used: set[int] = set()
    for index, piece in _slices(documents, order, tokenizer, length, generator):
        stream.extend(piece)
        used.add(index)
        if len(stream) >= wanted * length:
            break
    count = min(wanted, len(stream) // length)
    if count == 0:
        raise InputRefused(
            "the calibration text is shorter than one window",
            expected=f"at least {length} tokens",
            found=f"{len(stream)} tokens",
            where=", ".join(corpus.name for corpus in corpora),
            remedy="Give more text or a smaller --calibration-window.",
        )
    ids = torch.tensor(stream[: count * length], dtype=torch.int64).view(count, length)
    return TokenWindows(ids, tuple(documents[index] for index in sorted(used)))


def _slices(
    documents: list[Document], order: list[int], tokenizer: Any, length: int, generator: torch.Generator
) -> Iterator[tuple[int, list[int]]]:
    """One slice of each document a round, in the order given, until all are used up."""
    left: dict[int, list[list[int]]] = {}
    for index in order:
        ids: list[int] = tokenizer(documents[index].text, verbose=False)["input_ids"]
        pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
        shuffled = torch.randperm(len(pieces), generator=generator).tolist()
        left[index] = [pieces[number] for number in shuffled]
        yield index, left[index].pop()
    while any(left.values()):
        for index in order:
            if left[index]:
                yield index, left[index].pop()
