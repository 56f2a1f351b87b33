"""Reading evaluation receipts: one file, or the newest of a converted folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import leaves
from mla_convert.manifests.evaluation.receipt import RECEIPT_PREFIX, EvaluationReceipt
from mla_convert.manifests.models import faults, refuse_repeats

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
        json.loads(content, object_pairs_hook=refuse_repeats)
        receipt = EvaluationReceipt.model_validate_json(content)
    except (ValueError, RecursionError) as error:
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
    return _newest(own) if own else None


def load_receipt(path: Path) -> EvaluationReceipt:
    """Read an evaluation receipt from its file, or the newest of a folder.

    Args:
        path: A receipt, a folder of them, or a converted folder with `receipts/`.

    Raises:
        InputRefused: If there is none, or one is not a valid receipt.
    """
    if not path.is_dir():
        return read_receipt(path).receipt
    inner = path / RECEIPTS_FOLDER
    files = sorted((inner if inner.is_dir() else path).glob(f"{RECEIPT_PREFIX}*.json"))
    if not files:
        raise InputRefused(
            "no evaluation receipt",
            expected=f"{RECEIPTS_FOLDER}/{RECEIPT_PREFIX}*.json",
            where=str(path),
            remedy="mla-convert eval with --suite writes one.",
        )
    return _newest(map(read_receipt, files)).receipt


def _newest(files: Iterable[ReceiptFile]) -> ReceiptFile:
    """The one whose run began last by its own record; copies do not keep the times of files, names tell apart ties."""
    return max(files, key=lambda file: (file.receipt.environment.started, file.path.name))
