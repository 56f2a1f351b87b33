"""Cases that a kernel has to answer like a float64 oracle, with memory that must not be read filled with poison.

The same ladder runs in Triton's interpreter in the tests and on a GPU in device_check.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_convert.decode.abi import DecodeCall, DecodeOutput, SparseSelection
from mla_convert.decode.reference import ReferenceBackend
from mla_convert.decode.rows import RowFormat, encode
from mla_convert.decode.tiles import Dtype

OUT_LIMIT: dict[Dtype, float] = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest |Δout| of numbers of order one: the rounding of weights and output to the query's dtype."""

LSE_LIMIT = 4e-6
"""Largest |Δlse|: float32, whatever the query's dtype."""

POISON = -(2**31)
"""A page that no table names for a reason: read, it ends far outside of every pool."""

RAGGED = (0, 1, 33, 64, 65)


@dataclass(frozen=True)
class LadderCase:
    """One shape of the ladder.

    Attributes:
        dtype: Of query and plain rows.
        lengths: Rows that each sequence holds; where `top_k` is set, of the pool.
        heads: H.
        tokens: s_q.
        d_c: Latent width.
        d_r: Rotary width.
        page_size: P.
        causal: As in the call.
        fp8: Whether rows are FP8 with scales, 656 bytes at 512+64.
        top_k: Width of a sparse selection, 0 for none.
        extra_top_k: Width of a second selection in a second pool, 0 for none.
        sinks: Whether heads have sinks.
        splits: Instead of the number that the shape asks for.
    """

    dtype: Dtype = "bfloat16"
    lengths: tuple[int, ...] = RAGGED
    heads: int = 16
    tokens: int = 1
    d_c: int = 64
    d_r: int = 16
    page_size: int = 16
    causal: bool = True
    fp8: bool = False
    top_k: int = 0
    extra_top_k: int = 0
    sinks: bool = False
    splits: int | None = None

    @property
    def name(self) -> str:
        """Readable, and different for different cases."""
        kind = "fp8" if self.fp8 else "rows"
        parts = [self.dtype, kind, f"{self.d_c}+{self.d_r}", f"H{self.heads}", f"s{self.tokens}", f"P{self.page_size}"]
        parts += ["causal" if self.causal else "full", f"n{max(self.lengths)}"]
        parts += [f"top{self.top_k}+{self.extra_top_k}"] if self.top_k else []
        parts += ["sinks"] if self.sinks else []
        parts += [f"splits{self.splits}"] if self.splits else []
        return "-".join(parts)

    @property
    def form(self) -> RowFormat:
        """Of the rows."""
        if self.fp8:
            return RowFormat("ladder-fp8", 1, self.d_c, self.d_r, "float8_e4m3fn", "bfloat16", 128)
        return RowFormat.plain(self.d_c, self.d_r, self.dtype)


def ladder() -> tuple[LadderCase, ...]:
    """Every shape in each dtype, then FP8, sparse selections and sinks."""
    base = LadderCase()
    shapes = (
        replace(base, heads=1, page_size=1, splits=3),
        replace(base, heads=9, splits=2),
        replace(base, heads=12, tokens=2, d_c=96, d_r=32, splits=2),
        replace(base, d_c=128, d_r=64, page_size=64, splits=4),
        replace(base, heads=9, tokens=4, d_r=24, page_size=1, splits=3),
        replace(base, tokens=3, d_r=0, causal=False),
        replace(base, heads=5, d_c=512, d_r=64, page_size=64, splits=2),
        replace(base, heads=40, d_c=16, d_r=8),
        replace(base, heads=9, d_c=144, d_r=48),
    )
    dense = [replace(shape, dtype=dtype) for dtype in ("float32", "float16", "bfloat16") for shape in shapes]
    return (*dense, *_single_shapes(base))


def _single_shapes(base: LadderCase) -> Iterator[LadderCase]:
    yield replace(base, dtype="float32", heads=2, tokens=8, d_c=72, d_r=40, splits=2)
    yield replace(base, heads=14, d_c=152, d_r=64, page_size=3)
    yield replace(base, heads=28, d_c=384, d_r=32, lengths=(127, 5))
    yield replace(base, heads=3, d_c=1024, d_r=128, lengths=(40, 0))
    yield replace(base, dtype="float32", heads=2, lengths=(0, 1, 127, 129, 1000), page_size=64, splits=5)
    yield replace(base, fp8=True, heads=5, d_c=512, d_r=64, page_size=64, splits=2)
    yield replace(base, fp8=True, heads=5, d_c=144, d_r=48, page_size=5)
    yield replace(base, dtype="float32", fp8=True, heads=5, tokens=2, d_c=256, d_r=32)
    yield replace(base, fp8=True, heads=2, d_c=768, lengths=(33,))
    yield replace(base, causal=False, tokens=2, top_k=40, splits=2)
    yield replace(base, dtype="float32", causal=False, heads=9, top_k=33, extra_top_k=20, sinks=True, splits=3)
    yield replace(base, causal=False, fp8=True, heads=4, d_c=512, d_r=64, page_size=64, top_k=48, extra_top_k=17)
    yield replace(base, dtype="float32", heads=7, tokens=2, sinks=True)


def build(case: LadderCase, seed: int = 0) -> DecodeCall:
    """The call of a case on the CPU: unused rows are NaN, unused table entries and indices poison.

    Args:
        case: What to build.
        seed: Of the numbers and of the order of the pages.
    """
    draw = torch.Generator().manual_seed(seed)
    form = case.form
    q = torch.randn(len(case.lengths), case.tokens, case.heads, case.d_c + case.d_r, generator=draw)
    q = q.to(getattr(torch, case.dtype))
    scale = (case.d_c + case.d_r) ** -0.5
    pool, table = paged_rows(case, draw)
    sinks = torch.randn(case.heads, generator=draw) if case.sinks else None
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    if not case.top_k:
        return DecodeCall(q, pool, form, table, lengths, scale, case.causal, None, sinks)
    indices, chosen = _selection(case, table, case.top_k, draw)
    selection = SparseSelection(indices, chosen)
    if case.extra_top_k:
        extra_pool, extra_table = paged_rows(replace(case, page_size=case.page_size + 3), draw)
        extra = _selection(replace(case, page_size=case.page_size + 3), extra_table, case.extra_top_k, draw)
        selection = SparseSelection(indices, chosen, extra_pool, *extra)
    return DecodeCall(q, pool, form, table, lengths, scale, False, selection, sinks)


def paged_rows(case: LadderCase, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """A pool (pages, P, row) with the rows of every sequence in shuffled pages, and its block table."""
    counts = [-(-length // case.page_size) for length in case.lengths]
    order = torch.randperm(sum(counts) + 1, generator=draw)
    pool = unwritten(case.form, len(order), case.page_size)
    table = torch.full((len(counts), max(*counts, 1) + 1), POISON, dtype=torch.int32)
    taken = 0
    for sequence, (count, length) in enumerate(zip(counts, case.lengths, strict=True)):
        pages = order[taken : taken + count]
        taken += count
        rows, tokens = torch.randn(length, case.d_c + case.d_r, generator=draw), torch.arange(length)
        pool[pages[tokens // case.page_size], tokens % case.page_size] = pack_rows(case.form, rows)
        table[sequence, :count] = pages.to(torch.int32)
    return pool, table


def _selection(case: LadderCase, table: Tensor, width: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Physical indices (B, s_q, width) of rows drawn from each sequence, and how many of them are valid."""
    shape = (len(case.lengths), case.tokens)
    indices = torch.full((*shape, width), POISON * case.page_size, dtype=torch.int64)
    valid = torch.zeros(shape, dtype=torch.int32)
    for sequence, length in enumerate(case.lengths):
        for token in range(case.tokens):
            number = min(length, max(width - 5 * token, 1))
            rows = torch.randperm(length, generator=draw)[:number]
            pages = table[sequence].long()[rows // case.page_size]
            indices[sequence, token, :number] = pages * case.page_size + rows % case.page_size
            valid[sequence, token] = number
    return indices, valid


def pack_rows(form: RowFormat, rows: Tensor) -> Tensor:
    """Float32 rows (…, d_c + d_R) as `form` stores them (…, pool_width)."""
    return encode(form, *rows.split([form.latent_width, form.rope_width], dim=-1))


def unwritten(form: RowFormat, pages: int, page_size: int) -> Tensor:
    """A pool that is NaN everywhere: in E4M3, bf16 and float32 a number of bytes 0xFF is."""
    if form.is_plain:
        return torch.full((pages, page_size, form.pool_width), float("nan"), dtype=form.pool_dtype)
    return torch.full((pages, page_size, form.pool_width), 0xFF, dtype=torch.uint8)


def exact(call: DecodeCall) -> DecodeOutput:
    """Float64 answer of the reference to a call on the CPU, not rounded."""
    return ReferenceBackend().run(replace(call, q=call.q.double()))


@dataclass(frozen=True)
class Deviation:
    """Largest differences of an answer from the exact one.

    Attributes:
        out: max |Δout|.
        lse: max |Δlse| where finite; infinite where one is −inf and the other is not.
    """

    out: float
    lse: float

    def within(self, dtype: Dtype) -> bool:
        """Whether both are within their limits; a NaN is not."""
        return self.out <= OUT_LIMIT[dtype] and self.lse <= LSE_LIMIT


def deviation(found: DecodeOutput, expected: DecodeOutput) -> Deviation:
    """How far an answer is from the exact one."""
    out = (found.out.cpu().double() - expected.out).abs().max()
    lse = found.lse.cpu().double()
    empty = expected.lse == float("-inf")
    if not torch.equal(lse == float("-inf"), empty):
        return Deviation(float(out), float("inf"))
    difference = (lse - expected.lse).masked_fill(empty, 0.0).abs().max()
    return Deviation(float(out), float(difference))
