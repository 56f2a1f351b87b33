"""Paged latent rows of all layers of a model, published by transaction (seed 1, 0x05).

One page number stands for P rows in the pool of every layer, so a sequence has one block table. What is committed is
an immutable state per sequence; a transaction writes behind it, into pages of its own or into the unused tail of the
last page, and one assignment makes a prefix of it durable.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_convert.decode.addressing import page_ranges, slots_of
from mla_convert.decode.pool import PagePool
from mla_convert.decode.publication import PublicationRecord, Residency
from mla_convert.decode.rows import RowFormat, decode
from mla_convert.decode.store import PageStore, SequenceView
from mla_convert.decode.transaction import Span, Transaction
from mla_convert.errors import InputRefused


@dataclass(frozen=True)
class _Committed:
    """Durable state of one sequence."""

    request: str
    pages: tuple[int, ...]
    length: int


class PagedLatentCache:
    """Rows `[normalised c_kv | rotated k_rope]` of all layers in pages, with block tables of sequences."""

    def __init__(
        self,
        form: RowFormat,
        *,
        layers: int,
        pages: int,
        page_size: int,
        rope: str,
        identity: str = "cache",
        device: torch.device | str = "cpu",
    ) -> None:
        """Reserve the pools; an unused page is not touched.

        Args:
            form: Of every row.
            layers: Of the model.
            pages: To begin with; see `extend`.
            page_size: P >= 1.
            rope: `publication.rope_digest` of the keys' rotation.
            identity: Name of this cache in its records.
            device: Of the pools and views.

        Raises:
            InputRefused: No layer, or an empty page.
        """
        if layers < 1 or page_size < 1:
            raise InputRefused(
                "a cache without room", expected="layers, page_size >= 1", found=f"{layers}, {page_size}"
            )
        self.rope = rope
        self.identity = identity
        self.allocator = PagePool(pages)
        self._store = PageStore(form, layers, pages, page_size, torch.device(device))
        self._sequences: dict[int, _Committed] = {}
        self._open: dict[int, Transaction] = {}
        self._numbers = itertools.count()
        self._transactions = itertools.count()

    @property
    def form(self) -> RowFormat:
        """Of every row."""
        return self._store.form

    @property
    def page_size(self) -> int:
        """P, rows of a page."""
        return self._store.page_size

    @property
    def layers(self) -> int:
        """Pools, one a layer."""
        return self._store.layers

    def new_sequence(self, request: str) -> int:
        """Number of a new, empty sequence of `request`."""
        return self._adopt(_Committed(request, (), 0))

    def length(self, sequence: int) -> int:
        """Committed rows."""
        return self._committed(sequence).length

    def pages_of(self, sequence: int) -> tuple[int, ...]:
        """Committed block table."""
        return self._committed(sequence).pages

    def pool(self, layer: int, read_as: RowFormat) -> Tensor:
        """(pages, P, form.pool_width) of a layer, for a reader of that format.

        Raises:
            InputRefused: The rows have another format.
        """
        read_as.require(self.form, f"pool of layer {layer} of {self.identity}")
        return self._store.pool(layer)

    def read(self, sequence: int, layer: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """(T, d_c + d_R): the committed rows of one layer, decoded."""
        state = self._committed(sequence)
        slots = slots_of(state.pages, range(state.length), self.page_size)
        rows = self._store.rows(layer, torch.tensor(slots, dtype=torch.int64, device=self._store.device))
        return decode(self.form, rows, dtype)

    def view(self, sequences: Sequence[int]) -> SequenceView:
        """Block table and lengths of committed rows."""
        states = [self._committed(sequence) for sequence in sequences]
        return self._store.view((state.pages, state.length) for state in states)

    def begin(self, spans: Mapping[int, range]) -> Transaction:
        """Open a transaction that adds rows to some sequences, in the mapping's order.

        A partly filled last page that others share is copied first; committed rows are never written.

        Args:
            spans: For each sequence the places of its new rows, from its committed length on; may be empty ranges.

        Raises:
            InputRefused: A range that does not begin at the committed length, or a transaction already open.
            OutOfPages: Nothing has changed.
        """
        states = {sequence: self._idle(sequence) for sequence in spans}
        for sequence, tokens in spans.items():
            if tokens.start != states[sequence].length or tokens.step != 1 or tokens.stop < tokens.start:
                raise InputRefused(
                    "new rows must follow the committed ones",
                    expected=f"a range from {states[sequence].length}",
                    found=repr(tokens),
                    where=f"sequence {sequence}",
                )
        copies = {sequence: self._page_to_copy(states[sequence], tokens) for sequence, tokens in spans.items()}
        needs = {
            sequence: -(-tokens.stop // self.page_size) - len(states[sequence].pages) + (copies[sequence] is not None)
            for sequence, tokens in spans.items()
        }
        taken = self.allocator.allocate(sum(needs.values()))
        with ExitStack() as undo:
            undo.callback(self.allocator.release, taken)
            rest = iter(taken)
            made = [
                self._span(
                    sequence, states[sequence], tokens, copies[sequence], tuple(itertools.islice(rest, needs[sequence]))
                )
                for sequence, tokens in spans.items()
            ]
            transaction = Transaction(self._store, next(self._transactions), tuple(made), self._publish)
            undo.pop_all()
        self._open.update(dict.fromkeys(spans, transaction))
        return transaction

    def fork(self, sequence: int, request: str | None = None) -> int:
        """A second sequence with the committed rows of the first, all pages shared."""
        state = self._committed(sequence)
        self.allocator.share(state.pages)
        return self._adopt(replace(state, request=state.request if request is None else request))

    def free(self, sequence: int) -> None:
        """Give a sequence's pages back.

        Raises:
            InputRefused: Unknown (a double free), or a transaction is open on it.
        """
        self.allocator.release(self._idle(sequence).pages)
        self._sequences = {number: state for number, state in self._sequences.items() if number != sequence}

    def reorder(self, sequences: Sequence[int], order: Sequence[int]) -> list[int]:
        """Beam search: sequences whose rows are those of `sequences[order[0]]`, `sequences[order[1]]` …

        A sequence goes on in the first place that asks for it and is forked for the others; the rest are freed.

        Raises:
            InputRefused: One of them is unknown or has an open transaction, or a place is none of theirs; nothing has
                changed.
        """
        for sequence in sequences:
            self._idle(sequence)
        if any(not 0 <= place < len(sequences) for place in order):
            raise InputRefused(
                "a place without a sequence", expected=f"0 to {len(sequences) - 1}", found=str(list(order))
            )
        chosen: list[int] = []
        for place in order:
            source = sequences[place]
            chosen.append(self.fork(source) if source in chosen else source)
        for sequence in sequences:
            if sequence not in chosen:
                self.free(sequence)
        return chosen

    def truncate(self, sequence: int, length: int) -> None:
        """Drop the committed rows from `length` on.

        Raises:
            InputRefused: More rows than there are, or a transaction is open.
        """
        state = self._idle(sequence)
        if not 0 <= length <= state.length:
            raise InputRefused("no prefix of a sequence", expected=f"0 to {state.length}", found=str(length))
        kept = -(-length // self.page_size)
        self.allocator.release(state.pages[kept:])
        self._sequences = {**self._sequences, sequence: replace(state, pages=state.pages[:kept], length=length)}

    def extend(self, pages: int) -> None:
        """Add free pages; each layer's pool is copied, one at a time.

        Raises:
            InputRefused: For a negative number.
        """
        if pages < 0:
            raise InputRefused("pages to add", expected="0 or more", found=str(pages))
        self._store.extend(pages)
        self.allocator.extend(pages)

    def publication(self, sequence: int, layer: int) -> PublicationRecord:
        """The record of a sequence's committed rows in a layer."""
        state = self._committed(sequence)
        return self._record(sequence, layer, range(state.length), state.pages, None)

    def provisional(self, transaction: Transaction, layer: int) -> tuple[PublicationRecord, ...]:
        """The records of an open transaction's rows in a layer, one a sequence.

        Raises:
            InputRefused: It is not open on this cache.
        """
        if any(self._open.get(span.sequence) is not transaction for span in transaction.spans):
            raise InputRefused("no open transaction of this cache", found=f"transaction {transaction.number}")
        return tuple(
            self._record(span.sequence, layer, span.tokens, span.pages, transaction.number)
            for span in transaction.spans
        )

    def residency(self) -> Residency:
        """Where the bytes of the pools are."""
        form, size = self.form, self.page_size
        filled: dict[int, int] = {}
        for state in self._sequences.values():
            for piece in page_ranges(state.pages, range(state.length), size):
                filled[piece.page] = max(filled.get(piece.page, 0), piece.rows)
        rows = sum(filled.values())
        page_bytes = size * form.row_bytes * self.layers
        payload = rows * form.payload_bytes * self.layers
        scales = rows * 4 * form.scales * self.layers
        held = self.allocator.pages - self.allocator.free
        entries = sum(len(state.pages) + 1 for state in self._sequences.values())
        return Residency(
            payload=payload,
            scales=scales,
            padding=len(filled) * page_bytes - payload - scales,
            provisional=(held - len(filled)) * page_bytes,
            free=self.allocator.free * page_bytes,
            metadata=4 * (entries + self.allocator.pages),
            logical_payload=sum(state.length for state in self._sequences.values()) * form.payload_bytes * self.layers,
        )

    def _span(
        self, sequence: int, state: _Committed, tokens: range, copied: int | None, fresh: tuple[int, ...]
    ) -> Span:
        kept = state.pages
        if copied is not None:
            self._store.copy_rows(copied, fresh[0], state.length % self.page_size)
            kept = kept[:-1]
        return Span(sequence, tokens, kept + fresh, fresh, copied)

    def _page_to_copy(self, state: _Committed, tokens: range) -> int | None:
        partly_filled = state.length % self.page_size != 0
        if not tokens or not partly_filled or self.allocator.references(state.pages[-1]) == 1:
            return None
        return state.pages[-1]

    def _publish(self, spans: tuple[Span, ...], accepted: Sequence[int]) -> None:
        """Make `accepted[i]` rows of each span durable; the pages of the others are free again."""
        unused: list[int] = []
        states: dict[int, _Committed] = {}
        for span, count in zip(spans, accepted, strict=True):
            before = self._committed(span.sequence)
            length = before.length + count
            pages = span.pages[: -(-length // self.page_size)] if count else before.pages
            unused.extend(page for page in span.fresh if page not in pages)
            unused.extend([span.copied] if count and span.copied is not None else [])
            states[span.sequence] = replace(before, pages=pages, length=length)
        self.allocator.release(unused)
        self._sequences = {**self._sequences, **states}
        self._open = {number: one for number, one in self._open.items() if number not in states}

    def _record(
        self, sequence: int, layer: int, tokens: range, pages: tuple[int, ...], transaction: int | None
    ) -> PublicationRecord:
        return PublicationRecord(
            cache=self.identity,
            request=self._committed(sequence).request,
            sequence=sequence,
            layer=layer,
            first_token=tokens.start,
            tokens=len(tokens),
            pages=tuple(page_ranges(pages, tokens, self.page_size)),
            form=self.form,
            row_stride=self._store.row_stride,
            rope=self.rope,
            committed_length=self.length(sequence) if transaction is None else None,
            transaction=transaction,
        )

    def _adopt(self, state: _Committed) -> int:
        number = next(self._numbers)
        self._sequences = {**self._sequences, number: state}
        return number

    def _committed(self, sequence: int) -> _Committed:
        if sequence not in self._sequences:
            raise InputRefused("no sequence of this cache, or one freed before", found=str(sequence))
        return self._sequences[sequence]

    def _idle(self, sequence: int) -> _Committed:
        state = self._committed(sequence)
        if sequence in self._open:
            raise InputRefused(
                "a transaction is open on this sequence", found=f"sequence {sequence}", remedy="Commit or discard it."
            )
        return state
