"""The call that every decode backend answers, checked before any of them sees it.

Absorbed (MQA-form) attention: one latent row per token is key and value for all query heads (seed 1, 0x04 and 0x08).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mla_convert.decode.rows import RowFormat
from mla_convert.errors import InputRefused

QUERY_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SparseSelection:
    """Rows chosen one by one instead of a whole prefix (seed 1, 0x0B): physical places, no block table.

    Attributes:
        indices: (B, s_q, k) int64, `page · P + offset` in the pool; `causal` must be False.
        lengths: (B, s_q) int32; only so many entries of a row, from its left, are valid. What lies past them may be
            anything.
        extra_pool: Second pool (pages', P', row) of the same format, or None.
        extra_indices: (B, s_q, k') int64 in it.
        extra_lengths: (B, s_q) int32.
    """

    indices: Tensor
    lengths: Tensor
    extra_pool: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_lengths: Tensor | None = None


@dataclass(frozen=True)
class DecodeCall:
    """One layer's attention of a batch of new tokens over what they may see, their own rows included.

    Query `i` of `s_q` stands at key `seq_lens[b] − s_q + i`; where `causal`, it sees the keys up to that place, else
    all `seq_lens[b]`. Entries of `block_table` past a sequence's pages, and rows of its last page past its length, may
    hold anything.

    Attributes:
        q: (B, s_q, H, d_c + d_R): `q_nope` times `W_UK`, then the rotated `q_rope`.
        pool: (pages, P, format.pool_width).
        format: Of the pool's rows.
        block_table: (B, max_pages) int32 or int64, page of the pool for each P tokens of a sequence.
        seq_lens: (B,) int32 or int64, rows that each sequence holds; 0 is allowed.
        scale: Factor on `q·k` before the softmax.
        causal: See above.
        sparse: Rows to see instead of the prefix; `block_table` and `seq_lens` are then not read.
        sinks: (H,) float32 or None: a logit for each head that takes a share of the softmax and gives no value. The
            LSE leaves it out.
    """

    q: Tensor
    pool: Tensor
    format: RowFormat
    block_table: Tensor
    seq_lens: Tensor
    scale: float
    causal: bool = True
    sparse: SparseSelection | None = None
    sinks: Tensor | None = None

    @property
    def page_size(self) -> int:
        """P, rows of one page."""
        return self.pool.shape[1]


@dataclass(frozen=True)
class DecodeOutput:
    """What a backend returns.

    Attributes:
        out: (B, s_q, H, d_c) in the dtype of `q`: the softmax-weighted latent; 0 for a query that sees nothing.
        lse: (B, s_q, H) float32 (float64 for a float64 `q`), natural logarithm of the sum of the exponentials of the
            scaled scores; −inf for a query that sees nothing.
    """

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class LaunchFigures:
    """How a kernel was launched and what it takes; None where a backend has no such thing.

    Attributes:
        tile: Rows of queries and cached rows in one tile.
        splits: Parts that a sequence is cut into.
        registers: For each thread.
        spilled_bytes: Stores of registers to memory, for each thread.
        shared_bytes: Shared memory of one block.
        padded_bytes: Bytes that were added to the call to fit the kernel.
    """

    tile: str | None = None
    splits: int | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    padded_bytes: int = 0


class Backend(Protocol):
    """One way to compute a call."""

    @property
    def name(self) -> str:
        """As the user asks for it."""
        ...

    @property
    def automatic(self) -> bool:
        """Whether `auto` may take it."""
        ...

    def absent(self, device: torch.device) -> str | None:
        """What this machine lacks for it on `device`, whatever the call; None if nothing."""
        ...

    def unfit(self, call: DecodeCall) -> str | None:
        """Why `call` lies outside its limits; None if it does not. Cheap, and without side effects."""
        ...

    def run(self, call: DecodeCall) -> DecodeOutput:
        """Compute `call`, which `unfit` has passed and `check_call` accepts."""
        ...

    def launch(self, call: DecodeCall) -> LaunchFigures:
        """How `run` launches `call`."""
        ...


def check_call(call: DecodeCall) -> None:
    """Shapes, dtypes and devices of a call; no values are read, so a captured graph is not held up.

    Raises:
        InputRefused: Naming the field.
    """
    form = call.format
    width = form.latent_width + form.rope_width
    _expect(call.q.dim() == 4 and call.q.shape[-1] == width, "q", f"(B, s_q, H, {width})", _shape(call.q))
    _expect(call.q.dtype in QUERY_DTYPES, "q", "a floating dtype", str(call.q.dtype))
    batch, queries, heads, _ = call.q.shape
    _expect(min(queries, heads) >= 1, "q", "at least one query and one head", _shape(call.q))
    _check_pool("pool", call.pool, form)
    _expect(call.scale > 0 and call.scale < float("inf"), "scale", "a positive number", str(call.scale))
    if call.sinks is not None:
        _expect(call.sinks.shape == (heads,), "sinks", f"({heads},)", _shape(call.sinks))
        _expect(call.sinks.dtype == torch.float32, "sinks", "float32", str(call.sinks.dtype))
    if call.sparse is None:
        table, lengths = call.block_table, call.seq_lens
        _expect(table.dim() == 2 and table.shape[0] == batch, "block_table", f"({batch}, max_pages)", _shape(table))
        _expect(lengths.shape == (batch,), "seq_lens", f"({batch},)", _shape(lengths))
        for name, tensor in (("block_table", table), ("seq_lens", lengths)):
            _expect(tensor.dtype in (torch.int32, torch.int64), name, "int32 or int64", str(tensor.dtype))
    else:
        _expect(not call.causal, "causal", "False beside a sparse selection", "True")
        _check_sparse(call.sparse, batch, queries, form)
    _check_devices(call)


def _check_pool(name: str, pool: Tensor, form: RowFormat) -> None:
    _expect(
        pool.dim() == 3 and pool.shape[-1] == form.pool_width and pool.shape[1] >= 1,
        name,
        f"(pages, P, {form.pool_width}) of {form.name}",
        _shape(pool),
    )
    _expect(pool.dtype == form.pool_dtype, name, str(form.pool_dtype), str(pool.dtype))
    _expect(pool.stride(-1) == 1, name, "rows whose numbers lie side by side", f"a stride of {pool.stride(-1)}")


def _check_sparse(sparse: SparseSelection, batch: int, queries: int, form: RowFormat) -> None:
    extra = (sparse.extra_pool, sparse.extra_indices, sparse.extra_lengths)
    _expect(
        all(part is None for part in extra) or all(part is not None for part in extra),
        "extra_pool, extra_indices, extra_lengths",
        "all or none",
        "some",
    )
    segments = [("indices", sparse.indices, "lengths", sparse.lengths)]
    if sparse.extra_pool is not None and sparse.extra_indices is not None and sparse.extra_lengths is not None:
        _check_pool("extra_pool", sparse.extra_pool, form)
        segments.append(("extra_indices", sparse.extra_indices, "extra_lengths", sparse.extra_lengths))
    for name, indices, lengths_name, lengths in segments:
        _expect(
            indices.dim() == 3 and indices.shape[:2] == (batch, queries),
            name,
            f"({batch}, {queries}, k)",
            _shape(indices),
        )
        _expect(indices.dtype == torch.int64, name, "int64", str(indices.dtype))
        _expect(lengths.shape == (batch, queries), lengths_name, f"({batch}, {queries})", _shape(lengths))
        _expect(lengths.dtype == torch.int32, lengths_name, "int32", str(lengths.dtype))


def _check_devices(call: DecodeCall) -> None:
    tensors = [call.pool, call.block_table, call.seq_lens]
    if call.sparse is not None:
        tensors = [call.pool, call.sparse.indices, call.sparse.lengths]
        if call.sparse.extra_pool is not None:
            tensors.append(call.sparse.extra_pool)
    if call.sinks is not None:
        tensors.append(call.sinks)
    for tensor in tensors:
        _expect(tensor.device == call.q.device, "the tensors of a call", f"all on {call.q.device}", str(tensor.device))


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _expect(holds: bool, where: str, expected: str, found: str) -> None:
    if not holds:
        raise InputRefused("a decode call that no backend can answer", expected=expected, found=found, where=where)
