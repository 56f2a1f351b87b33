"""The pools of all layers: tensors of pages, and what is read from and written to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.decode.rows import RowFormat
from mla_convert.errors import InputRefused

NO_PAGE = -1
"""Fills a block table behind a sequence's pages; nothing may read it."""


@dataclass(frozen=True)
class SequenceView:
    """What a decode call needs of a batch of sequences.

    Attributes:
        block_table: (B, max_pages) int32, `NO_PAGE` behind the pages of a sequence.
        seq_lens: (B,) int32.
    """

    block_table: Tensor
    seq_lens: Tensor


class PageStore:
    """One pool (pages, P, row) for each layer. Nothing here knows which pages are free or whose they are."""

    def __init__(self, form: RowFormat, layers: int, pages: int, page_size: int, device: torch.device) -> None:
        self.form = form
        self.page_size = page_size
        self.device = device
        self._pools = [self._new(pages) for _ in range(layers)]

    @property
    def layers(self) -> int:
        """Pools."""
        return len(self._pools)

    @property
    def row_stride(self) -> int:
        """Bytes from one row to the next."""
        return self._pools[0].stride(1) * self._pools[0].element_size()

    def pool(self, layer: int) -> Tensor:
        """(pages, P, form.pool_width).

        Raises:
            InputRefused: There is no such layer.
        """
        if not 0 <= layer < len(self._pools):
            raise InputRefused("no such layer", expected=f"0 to {len(self._pools) - 1}", found=str(layer))
        return self._pools[layer]

    def rows(self, layer: int, slots: Tensor) -> Tensor:
        """(n, form.pool_width): rows by `page · P + offset`; slots (n,) int64."""
        return self.pool(layer).flatten(0, 1).index_select(0, slots)

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Put rows (n, form.pool_width) to slots (n,) int64."""
        self.pool(layer).flatten(0, 1).index_copy_(0, slots, rows.detach())

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """The first `rows` rows of a page to another, in every layer."""
        for pool in self._pools:
            pool[target, :rows] = pool[source, :rows]

    def extend(self, pages: int) -> None:
        """Add pages behind the last; each layer's pool is copied, one at a time."""
        for layer, pool in enumerate(self._pools):
            larger = self._new(pool.shape[0] + pages)
            larger[: pool.shape[0]] = pool
            self._pools[layer] = larger

    def view(self, rows: Iterable[tuple[tuple[int, ...], int]]) -> SequenceView:
        """Of `(pages, length)` of each sequence."""
        listed = list(rows)
        widest = max([1, *(len(pages) for pages, _ in listed)])
        table = [[*pages, *[NO_PAGE] * (widest - len(pages))] for pages, _ in listed]
        return SequenceView(
            torch.tensor(table, dtype=torch.int32, device=self.device).reshape(len(listed), widest),
            torch.tensor([length for _, length in listed], dtype=torch.int32, device=self.device),
        )

    def _new(self, pages: int) -> Tensor:
        size = (pages, self.page_size, self.form.pool_width)
        # Made under inference mode, a pool could not be written to outside of it.
        with torch.inference_mode(False):
            return torch.empty(size, dtype=self.form.pool_dtype, device=self.device)
