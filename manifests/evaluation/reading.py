"""Reading evaluation receipts: one file, or the newest of a converted folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import leaves
from mla_convert.manifests.evaluation.receipt import RECEIPT_PREFIX, EvaluationReceipt
from mla_convert.manifests.models import faults

RECEIPTS_FOLDER = "receipts"


@dataclass(frozen=True)
class ReceiptFile:
    """One receipt.

    Attributes:
        path: Its file.
        sha256: Of the file's bytes.
        receipt: What it holds.
    """

    path: Path
    sha256: str
    receipt: EvaluationReceipt


def read_receipt(path: Path) -> ReceiptFile:
    """Read one receipt.

    Raises:
        InputRefused: There is no such file, or it is no evaluation receipt of this version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputRefused("no readable evaluation receipt", where=str(path), found=str(error)) from error
    try:
        receipt = EvaluationReceipt.model_validate_json(content)
    except ValidationError as error:
        first, *more = faults(error)
        found = f"{first}, and {len(more)} more" if more else first
        raise InputRefused("not a valid evaluation receipt", where=str(path), found=found) from error
    return ReceiptFile(path, hashlib.sha256(content).hexdigest(), receipt)


def read_receipt_of(path: Path, manifest_sha256: str) -> ReceiptFile:
    """Read one receipt that must be of the manifest with these 64 hexadecimal digits.

    Raises:
        InputRefused: As `read_receipt`, or the receipt is of another manifest.
    """
    found = read_receipt(path)
    if found.receipt.compared.manifest_sha256 != manifest_sha256:
        raise InputRefused(
            "a receipt of another manifest",
            where=str(path),
            expected=f"manifest sha256 {manifest_sha256}",
            found=found.receipt.compared.manifest_sha256,
            remedy="Evaluate the folder as it is now.",
        )
    return found


def newest_receipt(folder: Path, manifest_sha256: str) -> ReceiptFile | None:
    """The receipt in `folder/receipts` that was started last among those that name this manifest.

    Returns:
        None where the folder has no evaluation receipt at all.

    Raises:
        InputRefused: A receipt cannot be read or leaves the folder, or all of them are of other manifests.
    """
    paths = sorted((folder / RECEIPTS_FOLDER).glob(f"{RECEIPT_PREFIX}*.json"))
    for path in paths:
        if leaves(folder, path):
            raise InputRefused("a receipt outside of the folder", where=str(path), remedy="Name it with --receipt.")
    read = [read_receipt(path) for path in paths]
    own = [file for file in read if file.receipt.compared.manifest_sha256 == manifest_sha256]
    if read and not own:
        return read_receipt_of(read[-1].path, manifest_sha256)
    # Names tell apart those of one second.
    return max(own, key=lambda file: (file.receipt.environment.started, file.path.name), default=None)
