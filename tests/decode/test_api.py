"""The one function: the issue's signature, over every backend that this machine has."""

from __future__ import annotations

import pytest
import torch

from mla_convert import mla_decode
from mla_convert.decode.abi import DecodeOutput
from mla_convert.decode.receipt import ReceiptBook
from mla_convert.decode.rows import RowFormat
from mla_convert.errors import InputRefused
from tests.decode.calls import Shape, errors, make_call
from tests.tolerances import DECODE_FLOAT32, DECODE_LSE, FLOAT64_ALGEBRA, KERNEL_BFLOAT16, KERNEL_LSE


@pytest.mark.parametrize("backend", ["auto", "torch", "triton-interpret"])
@pytest.mark.parametrize("causal", [True, False])
def test_paged_rows_in_latents_and_lse_out(backend: str, causal: bool) -> None:
    shape = Shape(RowFormat.plain(24, 8, "float32"), (0, 3, 17), heads=9, queries=2, page_size=4, causal=causal)
    call, book = make_call(shape), ReceiptBook()

    out, lse = mla_decode(
        call.q, call.pool, call.block_table, call.seq_lens, 24, call.scale, causal, backend=backend, receipts=book
    )

    assert out.shape == (3, 2, 9, 24)
    assert (lse.shape, lse.dtype) == ((3, 2, 9), torch.float32)
    found = errors(call, DecodeOutput(out, lse))
    assert found[0] <= DECODE_FLOAT32
    assert found[1] <= DECODE_LSE
    assert [receipt.ran for receipt in book.receipts] == ["torch" if backend == "auto" else backend]


def test_a_hundred_thousand_rows() -> None:
    call = make_call(Shape(RowFormat.plain(16, 8, "float32"), (100_000, 5), heads=3, page_size=64))

    found = mla_decode(call.q, call.pool, call.block_table, call.seq_lens, 16, call.scale)
    exact = mla_decode(call.q.double(), call.pool, call.block_table, call.seq_lens, 16, call.scale, backend="reference")

    assert float((found[0].double() - exact[0]).abs().max()) <= DECODE_FLOAT32
    assert float((found[1].double() - exact[1]).abs().max()) <= 2 * DECODE_LSE


def test_one_row_is_its_own_answer() -> None:
    row = torch.arange(6.0)
    q = torch.ones(1, 1, 2, 6, dtype=torch.float64)
    out, lse = mla_decode(
        q, row.reshape(1, 1, 6), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), 4, 0.5,
        backend="reference",
    )  # fmt: skip

    assert torch.equal(out[0, 0, 1], row[:4].double())
    assert float(lse[0, 0, 0]) == pytest.approx(7.5, abs=FLOAT64_ALGEBRA)


@pytest.mark.parametrize(
    ("cache", "d_c", "said"),
    [
        (torch.zeros(1, 2, 6, dtype=torch.uint8), 4, "Give row_format"),
        (torch.zeros(1, 2, 6), 7, "1 to 6"),
        (torch.zeros(1, 2, 6), 0, "1 to 6"),
    ],
)
def test_a_cache_that_cannot_be_read_is_refused(cache: torch.Tensor, d_c: int, said: str) -> None:
    index = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(InputRefused, match=said):
        mla_decode(torch.zeros(1, 1, 2, 6), cache, index, index[0], d_c, 1.0)


def test_a_format_of_another_width_is_refused() -> None:
    index = torch.zeros(1, 1, dtype=torch.int32)
    form = RowFormat.flashmla_fp8()
    pool = torch.zeros(1, 2, form.pool_width, dtype=torch.uint8)
    with pytest.raises(InputRefused, match="d_c = 256"):
        mla_decode(torch.zeros(1, 1, 2, 576), pool, index, index[0], 256, 1.0, row_format=form)


@pytest.mark.parametrize(
    "form",
    [RowFormat.flashmla_fp8(), RowFormat.grouped_fp8(72, 24), RowFormat.grouped_fp8(152, 40)],
    ids=lambda form: f"{form.name} {form.latent_width}+{form.rope_width}",
)
def test_scaled_rows_as_they_are_encoded_are_what_the_kernels_read(form: RowFormat) -> None:
    """The kernels are given offsets as constants; they must be where the encoder puts things."""
    call = make_call(Shape(form, (5, 40), heads=3, page_size=16, query_dtype=torch.bfloat16))

    arguments = (call.q, call.pool, call.block_table, call.seq_lens, form.latent_width, call.scale)
    out, lse = mla_decode(*arguments, backend="triton-interpret", row_format=form)

    found = errors(call, DecodeOutput(out, lse))
    assert found[0] <= KERNEL_BFLOAT16
    assert found[1] <= KERNEL_LSE
