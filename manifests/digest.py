"""SHA-256 of files, folders and canonical JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import Field, ValidationError

from mla_convert.errors import InputRefused
from mla_convert.manifests.record import Record, RelativePath, Sha256Hex
from mla_convert.progress import track

CHUNK_BYTES = 1 << 20
CHAT_TEMPLATES = "additional_chat_templates"
WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin")
TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)


class FileDigest(Record):
    """One file: its path relative to the folder, its size in bytes and the SHA-256 of its bytes."""

    path: RelativePath
    bytes: int = Field(ge=0)
    sha256: Sha256Hex


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes as 64 hexadecimal digits, read in pieces of one MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def canonical_json(obj: object) -> str:
    """The one JSON text of a value: sorted keys, no white space, ASCII only.

    Raises:
        ValueError: The value holds a NaN or an infinity, which JSON cannot say.
        TypeError: The value holds something JSON cannot say.
    """
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_json(obj: object) -> str:
    """`sha256:` and the digest of `canonical_json(obj)`."""
    return "sha256:" + hashlib.sha256(canonical_json(obj).encode()).hexdigest()


def digest_file(path: Path, name: str) -> FileDigest:
    """Size and SHA-256 of one file, recorded under the relative path `name`.

    Raises:
        InputRefused: The name cannot be a path in a manifest.
    """
    try:
        return FileDigest(path=name, bytes=path.stat().st_size, sha256=sha256_file(path))
    except ValidationError as error:
        raise InputRefused(
            "a file name that a manifest cannot hold", found=ascii(name), remedy="Rename the file."
        ) from error


def leaves(folder: Path, path: Path) -> bool:
    """Whether `path`, all links followed, lies outside `folder`."""
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links, which leads nowhere
        return True


def read_text_inside(folder: Path, name: str) -> str:
    """Text of `folder/name`.

    Raises:
        OSError: It cannot be read, is no regular file, or is a link that leaves the folder.
        UnicodeDecodeError: It is not UTF-8.
    """
    path = folder / name
    if not path.is_file() or leaves(folder, path):
        raise OSError(f"no regular file inside the folder: {name}")
    return path.read_text(encoding="utf-8")


def list_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file, and every link that is not followed, below `folder` with its POSIX relative path, sorted.

    A link to a folder is yielded as one entry and never entered.
    """
    found = ((p.relative_to(folder).as_posix(), p) for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    yield from sorted(found)


def digest_files(folder: Path, *, exclude: frozenset[str] = frozenset()) -> tuple[FileDigest, ...]:
    """Digest every file below `folder`, sorted by path.

    Args:
        folder: The folder walked, sub-folders included.
        exclude: Relative POSIX paths that are left out; a path that ends in `/` leaves out what is below it.

    Raises:
        InputRefused: The folder does not exist, or an entry is a link that leaves it or is no regular file.
    """
    if not folder.is_dir():
        raise InputRefused("no such folder", where=str(folder))
    digests = []
    for name, path in track(list(list_files(folder)), "hashing", unit="file"):
        if is_excluded(name, exclude):
            continue
        if leaves(folder, path) or not path.is_file():
            raise InputRefused(
                "a link that leaves the folder, or no regular file",
                where=str(path),
                remedy="Replace it with a copy of the file it points to.",
            )
        digests.append(digest_file(path, name))
    return tuple(digests)


def is_excluded(name: str, exclude: frozenset[str]) -> bool:
    """Whether the relative path `name` is in `exclude` or below one of its entries that end in `/`."""
    return name in exclude or any(entry.endswith("/") and name.startswith(entry) for entry in exclude)


def digest_source(source: Path) -> tuple[FileDigest, ...]:
    """Digest what a conversion can read of a source checkpoint.

    A file (GGUF) gives itself. A folder gives its own files and its further chat templates, without other
    sub-folders and hidden files; links are followed wherever they lead, because the hub's snapshots are links
    into its blob store.

    Raises:
        InputRefused: There is no such file or folder, or a link leads nowhere.
    """
    if source.is_file():
        return (digest_file(source, source.name),)
    if not source.is_dir():
        raise InputRefused("no such source", where=str(source), expected="a folder or a .gguf file")
    own = [p for p in source.iterdir() if not p.name.startswith(".") and not p.is_dir()]
    entries = sorted([*own, *source.glob(f"{CHAT_TEMPLATES}/*")])
    for path in entries:
        if not path.is_file():
            raise InputRefused("a link that leads nowhere, or no regular file", where=str(path))
    return tuple(
        digest_file(path, path.relative_to(source).as_posix()) for path in track(entries, "hashing", unit="file")
    )


def combined_digest(files: Iterable[FileDigest]) -> str:
    """One digest of many files: of the canonical JSON of their records, sorted by path."""
    ordered = sorted(files, key=lambda file: file.path)
    return sha256_json([file.model_dump(mode="json") for file in ordered])


def weight_files(files: Iterable[FileDigest]) -> tuple[FileDigest, ...]:
    """The files that hold tensors."""
    return tuple(file for file in files if file.path.endswith(WEIGHT_SUFFIXES))


def tokenizer_files(files: Iterable[FileDigest]) -> tuple[FileDigest, ...]:
    """The files that define the tokenizer, special tokens and chat template included."""
    return tuple(file for file in files if file.path in TOKENIZER_FILES)


def tokenizer_digest(files: Iterable[FileDigest]) -> str | None:
    """Combined digest of the tokenizer's files, None where there are none."""
    found = tokenizer_files(files)
    return combined_digest(found) if found else None
