"""What `check_call` leaves out: the numbers in a call's tables and lengths. Reads them on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.decode.abi import DecodeCall
from mla_convert.errors import InputRefused


def check_values(call: DecodeCall) -> None:
    """Every row that a query may see lies in a page of its pool, and every length within its table.

    For backends that read on the host anyway; a CUDA kernel trusts its caller, as a captured graph has to.

    Raises:
        InputRefused: Naming the tensor.
    """
    if call.sparse is None:
        size, width = call.page_size, call.block_table.shape[1]
        _within("seq_lens", call.seq_lens, width * size)
        places = torch.arange(width, device=call.block_table.device)
        held = -(-call.seq_lens.long() // size)  # (B,) pages
        _inside(call.block_table[places < held[:, None]], call.pool.shape[0], "block_table")
        return
    sparse = call.sparse
    segments = [("", call.pool, sparse.indices, sparse.lengths)]
    if sparse.extra_pool is not None and sparse.extra_indices is not None and sparse.extra_lengths is not None:
        segments.append(("extra_", sparse.extra_pool, sparse.extra_indices, sparse.extra_lengths))
    for prefix, pool, indices, lengths in segments:
        _within(f"{prefix}lengths", lengths, indices.shape[-1])
        valid = torch.arange(indices.shape[-1], device=indices.device) < lengths[..., None]  # (B, s_q, k)
        _inside(indices[valid] // pool.shape[1], pool.shape[0], f"{prefix}indices")


def _within(where: str, lengths: Tensor, most: int) -> None:
    if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
        raise InputRefused(
            "a length that its table cannot hold",
            expected=f"0 to {most} rows",
            found=f"{int(lengths.min())} to {int(lengths.max())}",
            where=where,
        )


def _inside(pages: Tensor, count: int, where: str) -> None:
    if pages.numel() and not 0 <= int(pages.min()) <= int(pages.max()) < count:
        raise InputRefused(
            "a visible row lies in no page of the pool",
            expected=f"pages 0 to {count - 1}",
            found=f"{int(pages.min())} to {int(pages.max())}",
            where=where,
        )
