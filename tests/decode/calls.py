"""Random decode calls whose unused memory is poisoned: a backend that reads it gives NaN or leaves the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla_convert.decode.abi import DecodeCall, DecodeOutput, check_call
from mla_convert.decode.ladder import exact, unwritten
from mla_convert.decode.rows import RowFormat, encode

POISON = (2**31 - 1, -1)


@dataclass(frozen=True)
class Shape:
    """What a call is made of; `rows` are what one sequence after the other holds."""

    form: RowFormat
    lengths: Sequence[int]
    heads: int = 2
    queries: int = 1
    page_size: int = 16
    causal: bool = True
    query_dtype: torch.dtype = torch.float32
    seed: int = 0


def make_call(shape: Shape) -> DecodeCall:
    """Pages in random order, NaN in every row that no sequence holds, poison in every unused table entry."""
    generator = torch.Generator().manual_seed(shape.seed)
    form, size = shape.form, shape.page_size
    counts = [-(-length // size) for length in shape.lengths]
    pool = unwritten(form, sum(counts) + 3, size)
    order = torch.randperm(pool.shape[0], generator=generator).tolist()
    table = torch.tensor(POISON, dtype=torch.int32).repeat(len(counts), max(counts) + 1)[:, : max(counts) + 1]
    for sequence, (length, count) in enumerate(zip(shape.lengths, counts, strict=True)):
        pages = [order.pop() for _ in range(count)]
        table[sequence, :count] = torch.tensor(pages, dtype=torch.int32)
        latent = torch.randn(length, form.latent_width, generator=generator)
        rope = torch.randn(length, form.rope_width, generator=generator)
        for token, row in enumerate(encode(form, latent, rope)):
            pool[pages[token // size], token % size] = row
    width = form.latent_width + form.rope_width
    query = torch.randn(len(counts), shape.queries, shape.heads, width, generator=generator).to(shape.query_dtype)
    lengths = torch.tensor(list(shape.lengths), dtype=torch.int32)
    call = DecodeCall(query, pool, form, table, lengths, width**-0.5, shape.causal)
    check_call(call)
    return call


def errors(call: DecodeCall, found: DecodeOutput) -> tuple[float, float]:
    """Largest absolute errors of `out` and of finite `lse` beside the float64 reference.

    A query that sees nothing must have exactly 0 and −inf.
    """
    expected = exact(call)
    empty = torch.isinf(expected.lse)
    assert torch.equal(torch.isneginf(found.lse), empty)
    assert torch.equal(found.out[empty], torch.zeros_like(found.out[empty]))
    lse_error = (found.lse.double() - expected.lse)[~empty].abs()
    out_error = (found.out.double() - expected.out).abs()
    assert not bool(out_error.isnan().any())
    return float(out_error.max()), float(lse_error.max()) if lse_error.numel() else 0.0
