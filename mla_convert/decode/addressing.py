"""From a token of a sequence to the place of its row (seed 1, "Paged and ragged address translation")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.errors import InputRefused


@dataclass(frozen=True)
class PageRange:
    """Neighbouring rows of one page.

    Attributes:
        page: Of the pool.
        offset: First row in the page.
        rows: Number of rows.
    """

    page: int
    offset: int
    rows: int


def resolve_row(pages: Sequence[int], token: int, page_size: int, row_stride: int) -> int:
    """Offset of a token's row in a layer's pool, in units of `row_stride` (elements or bytes).

    `(block_table[token // P] · P + token mod P) · row_stride`, in Python's unbounded integers.

    Args:
        pages: Block table of the sequence.
        token: Place in the sequence.
        page_size: P, rows of a page.
        row_stride: Distance of two rows.

    Raises:
        InputRefused: The sequence has no page for the token, or an entry is no page.
    """
    logical, offset = divmod(token, page_size)
    if not 0 <= logical < len(pages):
        raise InputRefused(
            "a token without a page", expected=f"below {len(pages) * page_size}", found=str(token), where="block table"
        )
    if pages[logical] < 0:
        raise InputRefused(
            "an entry that is no page", expected=">= 0", found=str(pages[logical]), where=f"block table[{logical}]"
        )
    return (pages[logical] * page_size + offset) * row_stride


def resolve_slots(pages: Tensor, tokens: Tensor, page_size: int) -> Tensor:
    """`page · P + offset` of many tokens; what a sparse selection holds (seed 1, 0x0B).

    Args:
        pages: (max_pages,) int32 or int64; only the entries of `tokens` are read.
        tokens: (n,) int64.
        page_size: P.

    Returns:
        (n,) int64: page numbers are widened before they are multiplied.
    """
    logical = torch.div(tokens, page_size, rounding_mode="floor")  # (n,)
    return pages[logical].to(torch.int64) * page_size + tokens % page_size


def page_ranges(pages: Sequence[int], tokens: range, page_size: int) -> Iterator[PageRange]:
    """The physical pieces, in order, of a range of a sequence's tokens (step 1)."""
    start = tokens.start
    while start < tokens.stop:
        logical, offset = divmod(start, page_size)
        rows = min(page_size - offset, tokens.stop - start)
        yield PageRange(pages[logical], offset, rows)
        start += rows


def slots_of(pages: Sequence[int], tokens: range, page_size: int) -> list[int]:
    """`page · P + offset` of each token of a range (step 1)."""
    slots: list[int] = []
    for piece in page_ranges(pages, tokens, page_size):
        first = piece.page * page_size + piece.offset
        slots.extend(range(first, first + piece.rows))
    return slots
