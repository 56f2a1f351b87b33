from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_convert.decode.addressing import PageRange, page_ranges, resolve_row, resolve_slots, slots_of
from mla_convert.decode.pool import OutOfPages, PagePool
from mla_convert.errors import InputRefused


def test_an_address_beyond_32_bits() -> None:
    """Page 33,554,432 of 64 rows of 576 numbers: 1.2e12 elements in, from an int32 table. Nothing is allocated."""
    table = torch.tensor([7, 2**25], dtype=torch.int32)
    tokens = torch.tensor([0, 63, 64, 127])

    slots = resolve_slots(table, tokens, 64)

    assert slots.dtype == torch.int64
    assert slots.tolist() == [7 * 64, 7 * 64 + 63, 2**31, 2**31 + 63]
    assert resolve_row([7, 2**25], 127, 64, 576) == (2**31 + 63) * 576
    assert [resolve_row(table.tolist(), int(token), 64, 1) for token in tokens] == slots.tolist()


@pytest.mark.parametrize(("pages", "token"), [([3, -1], 5), ([3], 4), ([3], -1), ([], 0)])
def test_a_token_without_a_page_is_refused(pages: list[int], token: int) -> None:
    with pytest.raises(InputRefused):
        resolve_row(pages, token, 4, 1)


def test_an_entry_behind_the_tokens_is_not_read() -> None:
    assert resolve_slots(torch.tensor([5, 2**31 - 1]), torch.arange(4), 4).tolist() == [20, 21, 22, 23]


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 40))
def test_pieces_cover_the_range_in_order(page_size: int, start: int, count: int) -> None:
    pages = [17 * place % 101 for place in range(-(-(start + count) // page_size))]
    tokens = range(start, start + count)

    pieces = list(page_ranges(pages, tokens, page_size))

    covered = [piece.page * page_size + piece.offset + row for piece in pieces for row in range(piece.rows)]
    assert (
        covered == [resolve_row(pages, token, page_size, 1) for token in tokens] == slots_of(pages, tokens, page_size)
    )
    assert all(0 < piece.rows <= page_size - piece.offset for piece in pieces)


def test_pieces_of_a_range_that_starts_within_a_page() -> None:
    assert list(page_ranges([9, 4], range(3, 6), 4)) == [PageRange(9, 3, 1), PageRange(4, 0, 2)]


def test_the_allocator_counts_owners() -> None:
    pool = PagePool(3)
    first, second = pool.allocate(2)
    pool.share([first])

    pool.release([first, second])
    assert (pool.free, pool.references(first), pool.references(second)) == (2, 1, 0)
    pool.release([first])
    assert pool.free == 3


def test_out_of_pages_takes_none() -> None:
    pool = PagePool(3)
    pool.allocate(1)

    with pytest.raises(OutOfPages, match="3 free pages"):
        pool.allocate(3)
    assert pool.free == 2
    pool.extend(1)
    assert sorted(pool.allocate(3)) == [1, 2, 3]


@pytest.mark.parametrize("twice", [[0, 1, 0], [1, 2], [5], [-1]])
def test_a_double_free_changes_nothing(twice: list[int]) -> None:
    pool = PagePool(3)
    pool.allocate(2)

    with pytest.raises(InputRefused):
        pool.release(twice)

    assert [pool.references(page) for page in range(3)] == [1, 1, 0]
    with pytest.raises(InputRefused):
        pool.share([2])
