"""`mla_decode`: absorbed attention over a paged latent cache as one function."""

from __future__ import annotations

from torch import Tensor

from mla_convert.decode.abi import DecodeCall
from mla_convert.decode.backends import dispatcher
from mla_convert.decode.dispatch import AUTO
from mla_convert.decode.receipt import ReceiptBook
from mla_convert.decode.rows import FLOAT_NAMES, RowFormat, float_name
from mla_convert.errors import InputRefused


def mla_decode(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    d_c: int,
    scale: float,
    causal: bool = True,
    *,
    backend: str = AUTO,
    row_format: RowFormat | None = None,
    receipts: ReceiptBook | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over the latent rows of their sequences (seed 1, 0x04 and 0x08). See `DecodeCall`.

    Args:
        q: (B, s_q, H, d_c + d_R): `q_nope` times `W_UK`, then the rotated `q_rope`.
        cache: (pages, P, d_c + d_R) rows `[normalised c_kv | rotated k_rope]`, or of `row_format`.
        block_table: (B, max_pages) int32 or int64.
        seq_lens: (B,) int32 or int64, rows of each sequence, those of the new tokens included.
        d_c: `kv_lora_rank`.
        scale: Factor on `q·k` before the softmax.
        causal: Whether query `i` sees keys up to `seq_lens − s_q + i` only.
        backend: `auto` or the name of a backend.
        row_format: Of the cache; rows of plain numbers in its dtype where None.
        receipts: Where what ran is noted.

    Returns:
        `out` (B, s_q, H, d_c) in the dtype of `q`, and `lse` (B, s_q, H) float32, natural logarithm; 0 and −inf for a
        query that sees nothing.

    Raises:
        UsageFault: For a backend that there is not.
        InputRefused: For malformed tensors, or a call that the backend asked for, or every one, cannot run.
        EnvironmentFault: If the backend asked for is not on this machine.
    """
    form = row_format or _plain(cache, d_c)
    if form.latent_width != d_c:
        raise InputRefused("a row format of another width", expected=f"d_c = {d_c}", found=str(form.latent_width))
    call = DecodeCall(q, cache, form, block_table, seq_lens, scale, causal)
    done = dispatcher(backend, ReceiptBook() if receipts is None else receipts).run(call)
    return done.out, done.lse


def _plain(cache: Tensor, d_c: int) -> RowFormat:
    dtype = float_name(cache.dtype)
    if dtype is None:
        raise InputRefused(
            "a cache whose rows are no plain numbers",
            expected=", ".join(FLOAT_NAMES),
            found=str(cache.dtype).removeprefix("torch."),
            where="cache",
            remedy="Give row_format.",
        )
    if not 1 <= d_c <= cache.shape[-1]:
        raise InputRefused("no such latent width", expected=f"1 to {cache.shape[-1]}", found=str(d_c), where="d_c")
    return RowFormat.plain(d_c, cache.shape[-1] - d_c, dtype)
