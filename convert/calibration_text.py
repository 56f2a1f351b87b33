"""Text from files, folders, patterns, JSONL and `datasets` ids, chats included."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mla_convert.convert.chat_text import ChatTemplate, chat_messages
from mla_convert.errors import EnvironmentFault, InputRefused

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text")
TextKind = Literal["text-file", "folder", "files", "jsonl", "datasets", "self"]
TEXT_FORMS = "a text file, a .jsonl file, a folder of them, a pattern with *, or datasets:<id>[::<split>]"


@dataclass(frozen=True)
class Document:
    """One document and the name it is known by.

    Attributes:
        name: Name or id.
        text: Its text.
        spelled_out: Whether the text spells the special tokens, so that the tokenizer adds none of its own: a chat
            that went through a template.
    """

    name: str
    text: str
    spelled_out: bool = False

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


def read_corpus(given: str, text_field: str = "text", chat: ChatTemplate | None = None) -> Corpus:
    """Read a text source.

    Args:
        given: A text file, a folder of text and JSONL files, a `.jsonl` file, a pattern with `*` (whose files are
            taken as text whatever their suffix), or `datasets:<id>[::<split>]`.
        text_field: Field of JSONL objects and dataset rows that holds the text.
        chat: What turns rows that hold a conversation instead into text.

    Raises:
        InputRefused: If nothing is there, a line is neither an object with the field nor a conversation, all documents
            are empty, or there are conversations and no template.
    """
    reader = _Reader(text_field, chat)
    kind, found = _documents(given, reader)
    documents = tuple(document for document in found if document.text.strip())
    for document in documents:
        _check_name(document.name, given)
    if not documents:
        raise InputRefused("no text in it", expected="at least one document that is not empty", where=given)
    return make_corpus(given, kind, documents)


def _check_name(name: str, where: str) -> None:
    """Names go into the manifest, which is UTF-8.

    Raises:
        InputRefused: For one that is not Unicode.
    """
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputRefused("a document's name that is not Unicode", found=ascii(name), where=where) from error


def make_corpus(name: str, kind: TextKind, documents: tuple[Document, ...]) -> Corpus:
    """Documents as a corpus, with their digest."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps([document.name, document.sha256]).encode())
    return Corpus(name, kind, documents, digest.hexdigest())


def _documents(given: str, reader: _Reader) -> tuple[TextKind, Iterator[Document]]:
    if given.startswith("datasets:"):
        return "datasets", reader.dataset(given)
    path = Path(given).expanduser()
    if path.is_dir():
        suffixes = (*TEXT_SUFFIXES, ".jsonl")
        files = sorted(item for item in path.rglob("*") if item.suffix in suffixes and item.is_file())
        return "folder", (document for file in files for document in reader.file(file, path))
    if path.is_file():
        return "jsonl" if path.suffix == ".jsonl" else "text-file", reader.file(path, path.parent)
    if "*" in given:
        files = sorted(item for name in glob.glob(str(path), recursive=True) if (item := Path(name)).is_file())
        root = Path(os.path.dirname(re.split(r"[*?\[]", str(path), maxsplit=1)[0]))
        return "files", (document for file in files for document in reader.file(file, root))
    raise InputRefused("no such text", expected=TEXT_FORMS, where=given)


@dataclass(frozen=True)
class _Reader:
    """How files and rows become documents."""

    text_field: str
    chat: ChatTemplate | None

    def file(self, path: Path, root: Path) -> Iterator[Document]:
        """The documents of one file, named by its path below `root`."""
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
                yield self.line(line, f"{name}:{number}", f"{path}, line {number}")

    def line(self, line: str, name: str, where: str) -> Document:
        """The document of one line of JSON."""
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputRefused(f"not JSON: {error}", where=where) from error
        if not isinstance(row, dict):
            raise self._no_text(type(row).__name__, where)
        document = self.row(row, str(row.get("id", name)), where)
        if not document.text.isascii():
            try:
                document.text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InputRefused(f"text that is not Unicode: {error.reason}", where=where) from error
        return document

    def row(self, row: Mapping[str, Any], name: str, where: str) -> Document:
        """The document of one row: its text field, or else the conversation it holds."""
        text = row.get(self.text_field)
        if isinstance(text, str):
            return Document(name, text)
        messages = chat_messages(row, where)
        if messages is None:
            raise self._no_text(", ".join(sorted(row)), where)
        if self.chat is None:
            raise InputRefused(
                "a conversation where plain text is wanted",
                expected=f"a string field {self.text_field!r}",
                found=", ".join(sorted(row)),
                where=where,
            )
        return Document(name, self.chat.render(messages, where), spelled_out=True)

    def dataset(self, given: str) -> Iterator[Document]:
        """The documents of a dataset."""
        from datasets import load_dataset

        _, _, rest = given.partition(":")
        identifier, _, split = rest.partition("::")
        try:
            rows = load_dataset(identifier, split=split or "train")
        except (OSError, ValueError, ConnectionError) as error:
            reason = str(error).strip().splitlines()[0]
            raise EnvironmentFault(f"datasets cannot load it: {reason}", where=given) from error
        columns = rows.column_names or []
        if self.text_field in columns:
            for number, text in enumerate(rows[self.text_field]):
                yield Document(f"{identifier}:{number}", str(text))
            return
        for number, row in enumerate(rows):
            if chat_messages(row, f"{given}, row {number}") is None:
                raise InputRefused(
                    "a dataset without that text field",
                    expected=f"a column {self.text_field!r}, or conversations",
                    found=", ".join(columns),
                    where=given,
                )
            yield self.row(row, f"{identifier}:{number}", f"{given}, row {number}")

    def _no_text(self, found: str, where: str) -> InputRefused:
        expected = f"a string field {self.text_field!r}, or a conversation in messages, conversations or prompt"
        return InputRefused("a row without text", expected=expected, found=found, where=where)
