"""A transaction on paged rows: write uncommitted, commit a prefix, discard the rest (seed 1, 0x05)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from mla_convert.decode.addressing import slots_of
from mla_convert.decode.rows import encode
from mla_convert.decode.store import PageStore, SequenceView
from mla_convert.errors import CheckFailed, InputRefused


@dataclass(frozen=True)
class Span:
    """Rows that a transaction adds to one sequence.

    Attributes:
        sequence: Its number.
        tokens: The new rows' places in it.
        pages: Block table that covers them.
        fresh: Pages of it that the transaction allocated.
        copied: Shared page whose rows the first fresh page holds a copy of, or None.
    """

    sequence: int
    tokens: range
    pages: tuple[int, ...]
    fresh: tuple[int, ...]
    copied: int | None


Publish = Callable[[tuple[Span, ...], Sequence[int]], None]
"""Makes so many rows of each span durable and takes the pages of the others back."""


class Transaction:
    """Rows written behind the committed ones of some sequences; durable from `commit` on, gone after `discard`.

    As a context manager it discards what was not committed, whatever happened.
    """

    def __init__(self, store: PageStore, number: int, spans: tuple[Span, ...], publish: Publish) -> None:
        """Opened by `PagedLatentCache.begin` only, whose `publish` it calls once."""
        self.number = number
        self._store = store
        self._spans = spans
        self._publish = publish
        slots = [slot for span in spans for slot in slots_of(span.pages, span.tokens, store.page_size)]
        self._slots = torch.tensor(slots, dtype=torch.int64, device=store.device)  # (N,)
        self._written = [0] * store.layers
        self._view = store.view((span.pages, span.tokens.stop) for span in spans)
        self._is_open = True

    @property
    def rows(self) -> int:
        """N, rows that every layer is to write: those of the first sequence, then those of the second …"""
        return int(self._slots.shape[0])

    def write(self, layer: int, c_kv: Tensor, k_rope: Tensor) -> None:
        """Write the next rows of a layer, uncommitted; all at once or in chunks.

        Args:
            layer: Of the model.
            c_kv: (n, d_c) normalised latents.
            k_rope: (n, d_R) rotated keys.

        Raises:
            InputRefused: More rows than were announced, rows that the format cannot hold, or a closed transaction.
        """
        self._require_open()
        self._store.pool(layer)  # refuses a layer that there is not
        done = self._written[layer]
        if c_kv.dim() != 2 or done + c_kv.shape[0] > self.rows:
            raise InputRefused(
                "rows that the transaction has no place for",
                expected=f"(n <= {self.rows - done}, d_c)",
                found=str(tuple(c_kv.shape)),
                where=f"layer {layer}",
            )
        rows = encode(self._store.form, c_kv, k_rope)  # (n, row)
        self._store.write(layer, self._slots[done : done + rows.shape[0]], rows)
        self._written[layer] = done + rows.shape[0]

    def view(self, layer: int) -> SequenceView:
        """Block table and lengths with the provisional rows, for the attention of the layer that wrote them.

        Raises:
            InputRefused: The layer has not written all of them.
        """
        self._require_open()
        self._store.pool(layer)  # refuses a layer that there is not
        if self._written[layer] != self.rows:
            raise InputRefused(
                "rows are read before they are written",
                expected=f"{self.rows} rows",
                found=str(self._written[layer]),
                where=f"layer {layer}",
            )
        return self._view

    @property
    def spans(self) -> tuple[Span, ...]:
        """The rows of each sequence."""
        return self._spans

    def commit(self, accepted: Sequence[int] | None = None) -> None:
        """Make a prefix of each sequence's rows durable and drop the rest.

        Args:
            accepted: Rows of each sequence, in the order of `begin`; all of them by default.

        Raises:
            CheckFailed: The layers have not written the same rows, or not those to be committed. Nothing is durable,
                and the transaction is still open.
            InputRefused: Not a prefix of what was announced.
        """
        self._require_open()
        counts = [len(span.tokens) for span in self._spans] if accepted is None else list(accepted)
        fits = len(counts) == len(self._spans) and all(
            0 <= count <= len(span.tokens) for count, span in zip(counts, self._spans, strict=True)
        )
        if not fits:
            raise InputRefused(
                "no prefix of the transaction's rows",
                expected=f"at most {[len(span.tokens) for span in self._spans]}",
                found=str(counts),
            )
        self._require_written(counts)
        self._is_open = False
        self._publish(self._spans, counts)

    def discard(self) -> None:
        """Drop everything; the committed state is what it was at `begin`."""
        self._require_open()
        self._is_open = False
        self._publish(self._spans, [0] * len(self._spans))

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_open:
            self.discard()

    def _require_written(self, counts: Sequence[int]) -> None:
        last = 0
        end = 0
        for count, span in zip(counts, self._spans, strict=True):
            last = end + count if count else last
            end += len(span.tokens)
        if len(set(self._written)) != 1 or self._written[0] < last:
            raise CheckFailed(
                "the layers have not all written the rows to be committed",
                expected=f"the same {last} to {self.rows} rows in each of {len(self._written)} layers",
                found=str(self._written),
                where=f"transaction {self.number}",
                remedy="Discard the transaction and process the tokens again.",
            )

    def _require_open(self) -> None:
        if not self._is_open:
            raise InputRefused("this transaction is committed or discarded", found=f"transaction {self.number}")
