"""The sequences of one batch in a paged latent cache, moved on by one transaction for each pass through the model.

A column is a token of the padded batch, a row is what the cache stores. Padded tokens have a column and no row, so
sequences are as long as their text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.decode.addressing import resolve_slots
from mla_convert.decode.pages import PagedLatentCache
from mla_convert.decode.pool import OutOfPages
from mla_convert.decode.rows import RowFormat, decode
from mla_convert.decode.store import SequenceView
from mla_convert.decode.transaction import Transaction
from mla_convert.errors import InputRefused


@dataclass(frozen=True)
class CachePlan:
    """How a cache is made once the first rows are there.

    Attributes:
        form: Of the rows.
        layers: Of the model.
        page_size: P.
        rope: Digest of the keys' rotation.
        tokens: Rows to reserve pages for at once, of all sequences together; more are added as they are needed.
    """

    form: RowFormat
    layers: int
    page_size: int
    rope: str
    tokens: int = 0


@dataclass(frozen=True)
class OpenPass:
    """One pass through the model, not yet committed.

    Attributes:
        transaction: Its rows.
        columns: Tokens of the padded chunk.
        fresh: (B, columns) bool, False for padding; None where there is none.
        counts: New rows of each sequence.
        left_padded: Whether all padding stands before a chunk's tokens, so that its last query is the last row.
    """

    transaction: Transaction
    columns: int
    fresh: Tensor | None
    counts: tuple[int, ...]
    left_padded: bool


class LatentBatch:
    """A batch of sequences, and the pass that is under way."""

    def __init__(self, plan: CachePlan) -> None:
        self.plan = plan
        self.columns = 0
        self._kept: Tensor | None = None  # (B, columns) bool, or None while nothing has been padded
        self._cache: PagedLatentCache | None = None
        self._device = torch.device("meta")
        self._sequences: list[int] = []
        self._pass: OpenPass | None = None

    @property
    def cache(self) -> PagedLatentCache:
        """The pages.

        Raises:
            InputRefused: Nothing has been written yet.
        """
        if self._cache is None:
            raise InputRefused("a latent cache before its first rows")
        return self._cache

    @property
    def sequences(self) -> tuple[int, ...]:
        """Numbers of the sequences in `cache`, in the order of the batch."""
        return tuple(self._sequences)

    @property
    def current(self) -> OpenPass:
        """The pass under way.

        Raises:
            InputRefused: There is none: a layer runs before the first.
        """
        if self._pass is None:
            raise InputRefused("a layer writes rows outside of a pass", expected="the first layer to run first")
        return self._pass

    def begin(self, batch: int, columns: int, mask: Tensor | None, device: torch.device) -> OpenPass:
        """Open the pass of a chunk. A pass left open by a failure is dropped, with what it had written.

        Args:
            batch: B.
            columns: Tokens of the chunk, padding included.
            mask: The attention mask of stock: (B, 1, columns, all columns) bool or additive, (B, all columns), None.
            device: Of the rows.

        Raises:
            InputRefused: Another batch or device than before, or a mask that is not causal with padding.
        """
        self.drop()
        if self._cache is None:
            plan, self._device = self.plan, device
            self._cache = PagedLatentCache(
                plan.form,
                layers=plan.layers,
                pages=-(-plan.tokens // plan.page_size),
                page_size=plan.page_size,
                rope=plan.rope,
                device=device,
            )
        if (self._sequences and batch != len(self._sequences)) or device != self._device:
            raise InputRefused(
                "a chunk that does not continue the cached batch",
                expected=f"{len(self._sequences)} sequences on {self._device}",
                found=f"{batch} on {device}",
            )
        fresh = fresh_tokens(mask, self._kept, batch, columns, self.columns)
        counts = [columns] * batch if fresh is None else [int(count) for count in fresh.sum(1)]
        left_padded = fresh is None or bool((fresh.int().diff(dim=1) >= 0).all())
        if not self._sequences:  # nothing was refused
            self._sequences = [self._cache.new_sequence(f"sequence {number}") for number in range(batch)]
        self._pass = OpenPass(self._open(counts), columns, fresh, tuple(counts), left_padded)
        return self._pass

    def write(self, layer: int, latent: Tensor, rope: Tensor) -> None:
        """Write a layer's rows of the chunk: (B, columns, d_c) and (B, columns, d_R); padding is left out."""
        now = self.current
        if now.fresh is None:
            now.transaction.write(layer, latent.flatten(0, 1), rope.flatten(0, 1))
        else:
            now.transaction.write(layer, latent[now.fresh], rope[now.fresh])

    def finish(self, layer: int) -> None:
        """Note that a layer has attended; after the last one the pass is committed."""
        if layer + 1 < self.plan.layers:
            return
        now = self.current
        now.transaction.commit()
        if now.fresh is not None or self._kept is not None:
            batch = len(self._sequences)
            device = self._device
            before = torch.ones(batch, self.columns, dtype=torch.bool, device=device)
            after = torch.ones(batch, now.columns, dtype=torch.bool, device=device)
            self._kept = torch.cat(
                [before if self._kept is None else self._kept, after if now.fresh is None else now.fresh], dim=1
            )
        self.columns += now.columns
        self._pass = None

    def drop(self) -> None:
        """Discard the pass under way, if there is one."""
        if self._pass is not None:
            self._pass.transaction.discard()
            self._pass = None

    def history(self, layer: int, dtype: torch.dtype) -> Tensor:
        """(B, columns, d_c + d_R): a layer's committed rows in their columns, 0 where a token was padding."""
        view: SequenceView = self.current.transaction.view(layer)
        form, size = self.cache.form, self.cache.page_size
        pool = self.cache.pool(layer, form).flatten(0, 1)  # (pages·P, row)
        places = torch.arange(self.columns, device=self._device).expand(len(self._sequences), -1)
        if self._kept is not None:
            places = (self._kept.long().cumsum(1) - 1).clamp_min(0)  # (B, columns)
        slots = [resolve_slots(table, place, size) for table, place in zip(view.block_table, places, strict=True)]
        kept_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        rows = decode(form, pool[torch.stack(slots)], kept_dtype).to(dtype)  # (B, columns, d_c + d_R)
        return rows if self._kept is None else rows.masked_fill(~self._kept[..., None], 0)

    def select(self, order: list[int]) -> None:
        """Go on with the sequences at these places; one that is asked for twice is forked, its pages shared."""
        self.drop()
        if not self._sequences:
            return
        self._sequences = self.cache.reorder(self._sequences, order)
        if self._kept is not None:
            self._kept = _unless_whole(self._kept[torch.tensor(order, dtype=torch.int64, device=self._kept.device)])

    def crop(self, columns: int) -> None:
        """Drop the last `columns` columns and their rows."""
        self.drop()
        left = max(0, self.columns - columns)
        for place, sequence in enumerate(self._sequences):
            rows = left if self._kept is None else int(self._kept[place, :left].sum())
            self.cache.truncate(sequence, rows)
        self._kept = None if self._kept is None else _unless_whole(self._kept[:, :left])
        self.columns = left

    def clear(self) -> None:
        """Free all sequences; the pages stay reserved."""
        self.drop()
        for sequence in self._sequences:
            self.cache.free(sequence)
        self._sequences, self._kept, self.columns = [], None, 0

    def _open(self, counts: list[int]) -> Transaction:
        cache = self.cache
        spans = {}
        for sequence, count in zip(self._sequences, counts, strict=True):
            length = cache.length(sequence)
            spans[sequence] = range(length, length + count)
        try:
            return cache.begin(spans)
        except OutOfPages:
            # One more than the new rows fill, for a shared last page that is copied; an eighth as many again, so that a
            # growing text copies the pools a logarithmic number of times and holds little that it does not use.
            needed = sum(count // cache.page_size + 2 for count in counts)
            cache.extend(max(needed, cache.allocator.pages // 8))
            return cache.begin(spans)


def _unless_whole(kept: Tensor) -> Tensor | None:
    """None where no padding is left: transformers then gives no mask either."""
    return None if bool(kept.all()) else kept


def fresh_tokens(mask: Tensor | None, kept: Tensor | None, batch: int, columns: int, before: int) -> Tensor | None:
    """Which tokens of a chunk are no padding: those that the mask lets see themselves.

    Args:
        mask: See `LatentBatch.begin`.
        kept: (B, before) bool: which earlier columns hold rows; None for all.
        batch: B.
        columns: Of the chunk.
        before: Earlier columns.

    Returns:
        (B, columns) bool, or None where there is no padding.

    Raises:
        InputRefused: If a query that is no padding sees anything else than the rows up to itself.
    """
    if mask is not None and not isinstance(mask, Tensor):
        raise InputRefused(
            "an attention mask of another kind",
            expected="a tensor, as sdpa and eager attention take it",
            found=type(mask).__name__,
            remedy='Load the model with attn_implementation="sdpa".',
        )
    if mask is None:
        if kept is not None:
            raise InputRefused("no mask for a batch that was padded before", expected="the mask of all columns")
        return None
    width = before + columns
    visible = mask if mask.dtype == torch.bool else mask == (0 if mask.dim() == 4 else 1)
    if mask.dim() == 2 and mask.shape == (batch, width):
        everything = visible
        pattern = None
    elif mask.dim() == 4 and mask.shape[1:] == (1, columns, width) and mask.shape[0] in (1, batch):
        pattern = visible[:, 0].expand(batch, -1, -1)  # (B, columns, width)
        own = pattern[..., before:].diagonal(dim1=1, dim2=2)  # (B, columns)
        old = torch.ones(batch, before, dtype=torch.bool, device=mask.device) if kept is None else kept
        everything = torch.cat([old, own], dim=1)
    else:
        raise InputRefused(
            "an attention mask of another shape",
            expected=f"({batch}, 1, {columns}, {width}) or ({batch}, {width})",
            found=str(tuple(mask.shape)),
        )
    fresh = everything[:, before:]
    if pattern is not None:
        causal = torch.ones(columns, width, dtype=torch.bool, device=mask.device).tril(before)
        fits = (pattern == (causal & everything[:, None])) | ~fresh[..., None]
    else:
        fits = everything[:, :before] == (True if kept is None else kept)
    if not bool(fits.all()):
        raise InputRefused(
            "an attention mask that is not causal with padding",
            found="a query that sees other rows than those up to itself",
            remedy="Absorbed decoding reads a prefix of the cache; use stock attention for other masks.",
        )
    return None if bool(fresh.all()) else fresh
