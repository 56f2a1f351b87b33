"""The dispatch matrix of seed 1, 0x0C: phase × cache format × history, with what ran on record for every cell."""

from __future__ import annotations

import pytest

from mla_convert.decode.backends import dispatcher
from mla_convert.decode.receipt import ReceiptBook
from mla_convert.decode.rows import RowFormat
from tests.decode.calls import Shape, errors, make_call
from tests.tolerances import DECODE_FLOAT32, DECODE_LSE

FORMATS = {
    "bf16": RowFormat.plain(16, 8, "bfloat16"),
    "fp16": RowFormat.plain(16, 8, "float16"),
    "fp32": RowFormat.plain(16, 8, "float32"),
    "fp8": RowFormat.grouped_fp8(144, 8),
    "fp8-656": RowFormat.flashmla_fp8(),
}
HISTORIES = (1, 127, 128, 129, 4096)
VERIFIED = 4
# Longest chunk of a prefill here: its last one.
CHUNK = 256


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_every_cell_runs_where_the_receipt_says(phase: str, form: str, history: int) -> None:
    queries = {"prefill": min(CHUNK, history), "decode": 1, "verify": min(VERIFIED, history)}[phase]
    heads = 2 if queries > VERIFIED else 9
    call = make_call(Shape(FORMATS[form], (history,), heads, queries, page_size=64))
    book = ReceiptBook()

    found = dispatcher("auto", book).run(call)

    out, lse = errors(call, found)
    assert out <= DECODE_FLOAT32
    assert lse <= DECODE_LSE
    (receipt,) = book.receipts
    assert (receipt.requested, receipt.ran, receipt.calls, book.fallbacks) == ("auto", "torch", 1, 0)
    kind = receipt.kind
    assert (kind.row_format, kind.row_bytes) == (FORMATS[form].name, FORMATS[form].row_bytes)
    assert (kind.queries, kind.heads, kind.page_size, kind.device) == (queries, heads, 64, "cpu")
    assert all(entry.absent for entry in receipt.rejected)
