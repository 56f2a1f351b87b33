"""What a report is made of: a verified folder's manifest, a receipt of its evaluation, a frontier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mla_convert.errors import InputRefused
from mla_convert.eval.report.frontier_file import FrontierFile, read_frontier
from mla_convert.manifests.digest import sha256_file
from mla_convert.manifests.evaluation.reading import ReceiptFile, newest_receipt, read_receipt_of
from mla_convert.manifests.evaluation.receipt import EvaluationReceipt
from mla_convert.manifests.models import MANIFEST_NAME, ConversionManifest, load
from mla_convert.manifests.verify import verify_folder


@dataclass(frozen=True)
class ReportInput:
    """Everything that is shown.

    Attributes:
        name: Of the converted folder.
        manifest: Its manifest.
        manifest_sha256: Of the manifest's bytes.
        receipt_file: The evaluation, None where there is none.
        frontier: None where it was not given.
    """

    name: str
    manifest: ConversionManifest
    manifest_sha256: str
    receipt_file: ReceiptFile | None
    frontier: FrontierFile | None

    @property
    def receipt(self) -> EvaluationReceipt | None:
        """What was evaluated."""
        return None if self.receipt_file is None else self.receipt_file.receipt


def read_inputs(folder: Path, receipt: Path | None = None, frontier: Path | None = None) -> ReportInput:
    """Verify a converted folder and read what there is to report on it.

    Args:
        folder: The converted folder.
        receipt: The evaluation's receipt; None takes the newest in the folder, if there is one.
        frontier: What `mla-convert frontier --json` printed.

    Raises:
        InputRefused: The folder does not verify, or a file is none of what it should be or of another manifest.
    """
    if not folder.is_dir():
        raise InputRefused("no such converted folder", where=str(folder))
    verified = verify_folder(folder)
    if not verified.ok:
        first, *more = verified.problems
        raise InputRefused(
            "the folder does not verify",
            where=str(folder),
            found=f"{first.render()}{f', and {len(more)} more' if more else ''}",
            remedy="mla-convert verify names everything.",
        )
    digest = sha256_file(folder / MANIFEST_NAME)
    found = newest_receipt(folder, digest) if receipt is None else read_receipt_of(receipt, digest)
    return ReportInput(
        name=folder.resolve().name,
        manifest=load(folder),
        manifest_sha256=digest,
        receipt_file=found,
        frontier=None if frontier is None else read_frontier(frontier),
    )
