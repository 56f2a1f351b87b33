"""Files on disk against the digests in the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import (
    FileDigest,
    digest_file,
    digest_source,
    is_excluded,
    leaves,
    list_files,
)
from mla_convert.manifests.models import MANIFEST_NAME, ConversionManifest
from mla_convert.manifests.problems import VerifyProblem, expect, problem

UNLISTED = frozenset({MANIFEST_NAME, "receipts/", "report.html"})
"""What may stand in a folder without being listed: the manifest itself and what later commands add."""


def check_outputs(manifest: ConversionManifest, folder: Path) -> Iterator[VerifyProblem]:
    """Every listed file again from its bytes, and every file that is not listed."""
    listed = {file.path: file for file in manifest.outputs.files}
    if len(listed) != len(manifest.outputs.files):
        yield problem("invalid", "outputs.files (paths)", "each path once", "a path is listed twice")
    if MANIFEST_NAME in listed:
        yield problem("invalid", f"file:{MANIFEST_NAME}", "a manifest that does not list itself")
    present = dict(list_files(folder))
    for name in sorted(present.keys() - listed.keys()):
        if not is_excluded(name, UNLISTED):
            yield problem("extra", f"file:{name}")
    for name, record in listed.items():
        if name not in present:
            yield problem("missing", f"file:{name}", f"sha256:{record.sha256}")
        elif leaves(folder, present[name]) or not present[name].is_file():
            yield problem("invalid", f"file:{name}", "a regular file inside the folder", "a link or a device")
        else:
            yield from _compare(record, present[name], "file")
    yield from expect("outputs.total_bytes", sum(file.bytes for file in listed.values()), manifest.outputs.total_bytes)


def check_sidecars(manifest: ConversionManifest) -> Iterator[VerifyProblem]:
    """A sidecar is an output with the same bytes as the source's file of that name."""
    outputs = {file.path: file.sha256 for file in manifest.outputs.files}
    sources = {file.path: file.sha256 for file in manifest.source.files}
    for sidecar in manifest.outputs.sidecars:
        for owner, hashes in (("outputs", outputs), ("source", sources)):
            subject = f"sidecar:{sidecar.path} in {owner}"
            if sidecar.path not in hashes:
                yield problem("missing", subject, f"sha256:{sidecar.sha256}")
            else:
                yield from expect(subject, sidecar.sha256, hashes[sidecar.path])


def check_source(manifest: ConversionManifest, source: Path) -> Iterator[VerifyProblem]:
    """The source's files again from their bytes, against the manifest's source section."""
    try:
        found = {file.path: file for file in digest_source(source)}
    except (InputRefused, OSError) as error:
        yield problem("invalid", "source", "the source checkpoint", str(error))
        return
    listed = {file.path: file for file in manifest.source.files}
    for name in sorted(found.keys() - listed.keys()):
        yield problem("extra", f"source:{name}")
    for name, record in listed.items():
        if name not in found:
            yield problem("missing", f"source:{name}", f"sha256:{record.sha256}")
        else:
            yield from _differences(record, found[name], "source")


def _compare(record: FileDigest, path: Path, prefix: str) -> Iterable[VerifyProblem]:
    try:
        return _differences(record, digest_file(path, record.path), prefix)
    except OSError as error:
        return (problem("invalid", f"{prefix}:{record.path}", "a readable file", str(error)),)


def _differences(record: FileDigest, found: FileDigest, prefix: str) -> Iterator[VerifyProblem]:
    if record != found:
        yield problem(
            "changed",
            f"{prefix}:{record.path}",
            f"{record.bytes} bytes, sha256:{record.sha256}",
            f"{found.bytes} bytes, sha256:{found.sha256}",
        )
