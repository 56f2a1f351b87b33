"""Verification of a converted folder against its manifest. It fails closed and names everything it finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mla_convert.manifests.check_config import check_config
from mla_convert.manifests.check_files import check_outputs, check_sidecars, check_source
from mla_convert.manifests.check_identity import check_identity
from mla_convert.manifests.check_records import check_records
from mla_convert.manifests.check_tensors import check_tensors
from mla_convert.manifests.digest import read_text_inside
from mla_convert.manifests.models import MANIFEST_NAME, ConversionManifest, faults, parse
from mla_convert.manifests.problems import VerifyProblem, VerifyReport, problem

__all__ = ["VerifyProblem", "VerifyReport", "verify_folder"]


def verify_folder(folder: Path, source: Path | None = None) -> VerifyReport:
    """Check a converted folder: manifest, id, every file's hash, config, tensors, index and sidecars.

    Nothing outside `folder` and `source` is read, whatever the manifest says.

    Args:
        folder: The converted folder.
        source: The source checkpoint, to be hashed again against the manifest's source section.

    Returns:
        All problems found; a folder without a valid manifest is a problem too, not an exception.
    """
    found: list[VerifyProblem] = []
    try:
        found.extend(_problems(folder, source))
    except OSError as error:
        found.append(problem("invalid", f"file:{folder}", "a readable folder", str(error)))
    return VerifyReport.of(found)


def _problems(folder: Path, source: Path | None) -> Iterator[VerifyProblem]:
    if not (folder / MANIFEST_NAME).is_file():
        yield problem("missing", f"file:{MANIFEST_NAME}", "a conversion manifest", f"none in {folder}")
        return
    try:
        manifest = parse(read_text_inside(folder, MANIFEST_NAME))
    except (OSError, ValueError, RecursionError) as error:
        for fault in faults(error):
            yield problem("invalid", f"file:{MANIFEST_NAME}", "a manifest of a known version", fault)
        return
    yield from _manifest_problems(manifest, folder)
    if source is not None:
        yield from check_source(manifest, source)


def _manifest_problems(manifest: ConversionManifest, folder: Path) -> Iterator[VerifyProblem]:
    yield from check_records(manifest)
    yield from check_identity(manifest.identity)
    yield from check_outputs(manifest, folder)
    yield from check_sidecars(manifest)
    yield from check_config(manifest.identity, folder)
    yield from check_tensors(manifest, folder)
