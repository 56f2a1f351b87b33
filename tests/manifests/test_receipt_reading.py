"""Which receipt of a folder is taken, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mla_convert.errors import InputRefused
from mla_convert.manifests.evaluation.reading import newest_receipt, read_receipt, read_receipt_of
from mla_convert.manifests.evaluation.receipt import EvaluationReceipt
from tests.eval.report.receipts import full, minimal

OWN, OTHER = "a" * 64, "b" * 64


def started(receipt: EvaluationReceipt, time: str) -> EvaluationReceipt:
    return receipt.model_copy(update={"environment": receipt.environment.model_copy(update={"started": time})})


def write(folder: Path, name: str, receipt: EvaluationReceipt) -> Path:
    (folder / "receipts").mkdir(exist_ok=True)
    path = folder / "receipts" / name
    path.write_text(receipt.to_json_text(), encoding="utf-8")
    return path


def test_a_receipt_comes_back_as_it_was_written(tmp_path: Path) -> None:
    receipt = full(OWN, layers=3)
    path = write(tmp_path, "eval-1.json", receipt)
    found = read_receipt(path)

    assert found.receipt == receipt
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_newest_of_this_manifest_is_taken_whatever_its_name(tmp_path: Path) -> None:
    write(tmp_path, "eval-3.json", started(minimal(OWN), "2026-01-01T00:00:00+00:00"))
    newest = write(tmp_path, "eval-1.json", started(minimal(OWN), "2026-03-01T00:00:00+00:00"))
    write(tmp_path, "eval-2.json", started(minimal(OTHER), "2026-05-01T00:00:00+00:00"))
    (tmp_path / "receipts" / "harness-9.json").write_text("{}", encoding="utf-8")

    found = newest_receipt(tmp_path, OWN)
    assert found is not None
    assert found.path == newest


def test_no_receipt_is_none_and_only_foreign_ones_are_refused(tmp_path: Path) -> None:
    assert newest_receipt(tmp_path, OWN) is None
    path = write(tmp_path, "eval-1.json", minimal(OTHER))

    with pytest.raises(InputRefused, match="a receipt of another manifest") as caught:
        newest_receipt(tmp_path, OWN)
    assert caught.value.found == OTHER
    with pytest.raises(InputRefused, match="a receipt of another manifest"):
        read_receipt_of(path, OWN)
    assert read_receipt_of(path, OTHER).path == path


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\xff", b'{"schema_version": "mla-convert/evaluation-receipt/v2"}', b'{"a": "\\ud800"}'],
    ids=["empty", "a list", "no text", "another version", "half a character"],
)
def test_what_is_no_receipt_is_refused_with_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "eval-1.json"
    path.write_bytes(content)

    with pytest.raises(InputRefused, match="not a valid evaluation receipt") as caught:
        read_receipt(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_link_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="no readable evaluation receipt"):
        read_receipt(tmp_path / "none.json")
    outside = write(tmp_path, "eval-1.json", minimal(OWN))
    folder = tmp_path / "out"
    (folder / "receipts").mkdir(parents=True)
    (folder / "receipts" / "eval-2.json").symlink_to(outside)

    with pytest.raises(InputRefused, match="a receipt outside of the folder"):
        newest_receipt(folder, OWN)
