"""The `torch` backend: chunked over cached rows with a running softmax. The default where there is no GPU.

Every cached row is read once for all heads and queries of its sequence (MQA form: one shared key and value stream).
The arithmetic is float32, float64 for a float64 query. What is held at a time is one chunk of rows and its scores,
whatever the history: a pool is never gathered as a whole, and a chunk whose pages follow one another in a pool of the
arithmetic's dtype is not even copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.decode.abi import DecodeCall, DecodeOutput, LaunchFigures, SparseSelection
from mla_convert.decode.addressing import resolve_slots
from mla_convert.decode.merge import EMPTY, PartialState, apply_sinks
from mla_convert.decode.rows import RowFormat, decode
from mla_convert.decode.values import check_values

CHUNK_BYTES = 1 << 21
"""Rows and scores of one step. Measured at 192 and 576 numbers a row: less pays for Python (twice the time at 512 KiB),
more gains a tenth and, for rows that are converted, leaves the second-level cache before the values are read."""
WEIGHT_FLOOR = -64.0
"""Logarithm of the smallest softmax weight kept: e^-64 = 1.6e-28, which no float32 sum with a weight of 1 can see.
Smaller ones soon are subnormal numbers, with which exp and matrix products are some hundred times slower."""
DROPPED = 2e-28
"""A little above e^`WEIGHT_FLOOR`."""


class TorchBackend:
    """Chunked attention with plain torch operations, on any device."""

    name = "torch"
    automatic = True

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes

    def absent(self, device: torch.device) -> str | None:  # noqa: ARG002  the protocol's
        """Nothing."""
        return None

    def unfit(self, call: DecodeCall) -> str | None:
        """Only a CUDA graph being captured is beyond it: it reads the lengths on the host."""
        if call.q.is_cuda and torch.cuda.is_current_stream_capturing():
            return "it reads the lengths on the host, which a CUDA graph being captured cannot wait for"
        return None

    def run(self, call: DecodeCall) -> DecodeOutput:
        """Compute the call; `out` in the dtype of `q`.

        Raises:
            InputRefused: A visible row lies in no page of its pool.
        """
        check_values(call)
        compute = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        batch, queries, heads, width = call.q.shape
        scaled = call.q.to(compute) * call.scale  # (B, s_q, H, d_c + d_R)
        if call.sparse is None:
            packed = scaled.reshape(batch, queries * heads, width)  # (B, s_q·H, d_c + d_R)
            state = self._dense(call, packed)
        else:
            packed = scaled.reshape(batch * queries, heads, width)  # (B·s_q, H, d_c + d_R)
            state = self._sparse(call, call.sparse, packed)
        out, lse = state.normalised()
        out = out.reshape(batch, queries, heads, call.format.latent_width)
        lse = lse.reshape(batch, queries, heads)
        if call.sinks is not None:
            out = apply_sinks(out, lse, call.sinks)
        return DecodeOutput(out.to(call.q.dtype), lse)

    def launch(self, call: DecodeCall) -> LaunchFigures:
        """Bytes of a chunk; there is no kernel of its own."""
        return LaunchFigures(tile=f"{self._chunk_bytes} bytes of rows and scores at a time, {call.format.name}")

    def _dense(self, call: DecodeCall, packed: Tensor) -> PartialState:
        source = _Pool.of(call.pool, call.format, packed.dtype)
        lengths = [int(length) for length in call.seq_lens.tolist()]
        hidden = call.q.shape[1] - 1 if call.causal else 0
        state = PartialState.empty(packed.shape[:2], call.format.latent_width, packed.dtype, packed.device)
        for group in self._groups(lengths, packed):
            held = [lengths[item] for item in group]
            running = _Running.of(state, packed, group)
            for start, stop in self._chunks(max(held), packed, len(group)):
                if len(group) == 1:
                    rows = source.run_of(call.block_table[group[0]], start, stop)[None]  # (1, n, d_c + d_R)
                else:
                    rows = source.gather_prefixes(call.block_table, group, held, stop)  # (G, n, d_c + d_R)
                sees_all = stop <= min(held) - hidden
                running.add(rows, None if sees_all else _limits(call, held, packed) - start)
            running.keep(state)
        return state

    def _sparse(self, call: DecodeCall, sparse: SparseSelection, packed: Tensor) -> PartialState:
        segments = [(call.pool, sparse.indices, sparse.lengths)]
        if sparse.extra_pool is not None and sparse.extra_indices is not None and sparse.extra_lengths is not None:
            segments.append((sparse.extra_pool, sparse.extra_indices, sparse.extra_lengths))
        sources = [
            (_Pool.of(pool, call.format, packed.dtype), indices.flatten(0, 1), valid.flatten().tolist())
            for pool, indices, valid in segments
        ]
        state = PartialState.empty(packed.shape[:2], call.format.latent_width, packed.dtype, packed.device)
        for item in range(packed.shape[0]):
            running = _Running.of(state, packed, [item])
            for source, chosen, valid in sources:
                for start, stop in self._chunks(valid[item], packed, 1):
                    running.add(source.gather(chosen[item, start:stop])[None], None)
            running.keep(state)
        return state

    def _rows_at_once(self, packed: Tensor, sequences: int) -> int:
        """Rows of each of some sequences whose numbers and scores fill a chunk."""
        row_bytes = (packed.shape[-1] + packed.shape[-2]) * packed.element_size()
        return max(1, self._chunk_bytes // (row_bytes * sequences))

    def _chunks(self, length: int, packed: Tensor, sequences: int) -> Iterator[tuple[int, int]]:
        """`(start, stop)` of the chunks of so many rows."""
        step = self._rows_at_once(packed, sequences)
        return ((start, min(start + step, length)) for start in range(0, length, step))

    def _groups(self, lengths: list[int], packed: Tensor) -> Iterator[list[int]]:
        """Sequences to compute together: a long one by itself, short ones of like lengths if one chunk holds them."""
        alone = self._rows_at_once(packed, 1)
        group: list[int] = []
        for item in sorted((item for item, length in enumerate(lengths) if length), key=lambda item: lengths[item]):
            # Ascending: this sequence is the longest of the group. The rows that fill up the others are wasted work.
            wasted = bool(group) and lengths[item] > 2 * lengths[group[0]] + 16
            if group and (wasted or lengths[item] > self._rows_at_once(packed, len(group) + 1)):
                yield group
                group = []
            group.append(item)
            if lengths[item] * 2 > alone:
                yield group
                group = []
        if group:
            yield group


@dataclass(frozen=True)
class _Pool:
    """One pool, read in the arithmetic's dtype."""

    flat: Tensor  # (pages·P, row)
    pages: Tensor  # (pages, P, row)
    form: RowFormat
    compute: torch.dtype

    @classmethod
    def of(cls, pool: Tensor, form: RowFormat, compute: torch.dtype) -> _Pool:
        return cls(pool.flatten(0, 1), pool, form, compute)

    def run_of(self, table: Tensor, start: int, stop: int) -> Tensor:
        """(n, d_c + d_R): tokens `start` to `stop` of one sequence; table (max_pages,)."""
        size = self.pages.shape[1]
        first = start // size
        numbers = table[first : -(-stop // size)]  # (k,)
        listed = numbers.tolist()
        if listed == list(range(listed[0], listed[0] + len(listed))):
            begin = listed[0] * size + start - first * size
            return decode(self.form, self.flat[begin : begin + stop - start], self.compute)
        kept = self.pages.index_select(0, numbers).flatten(0, 1)  # (k·P, row)
        return decode(self.form, kept[start - first * size : stop - first * size], self.compute)

    def gather(self, slots: Tensor) -> Tensor:
        """(n, d_c + d_R): rows by `page · P + offset`; slots (n,) int64."""
        return decode(self.form, self.flat.index_select(0, slots), self.compute)

    def gather_prefixes(self, tables: Tensor, group: list[int], lengths: list[int], stop: int) -> Tensor:
        """(G, stop, d_c + d_R): the first rows of each sequence, its last one repeated where it is shorter."""
        tokens = torch.arange(stop, device=self.flat.device)  # (stop,)
        slots = [
            resolve_slots(tables[item], tokens.clamp(max=length - 1), self.pages.shape[1])  # (stop,)
            for item, length in zip(group, lengths, strict=True)
        ]
        rows = self.gather(torch.cat(slots))  # (G·stop, d_c + d_R)
        return rows.view(len(group), stop, -1)


def _limits(call: DecodeCall, held: list[int], packed: Tensor) -> Tensor:
    """(G, s_q·H, 1): how many keys of its sequence each packed query row sees."""
    queries, heads = call.q.shape[1:3]
    ends = torch.tensor(held, device=packed.device)[:, None]  # (G, 1)
    if not call.causal:
        return ends.expand(-1, queries * heads)[..., None]
    places = torch.arange(queries, device=packed.device).repeat_interleave(heads)  # (s_q·H,)
    return (ends - queries + places + 1)[..., None]


@dataclass
class _Running:
    """Online softmax of a group of sequences (Milakov and Gimelshein, 2018, algorithm 3), updated in place."""

    place: slice | list[int]
    query: Tensor  # (G, M, d_c + d_R)
    m: Tensor  # (G, M)
    l: Tensor  # noqa: E741  (G, M)
    o: Tensor  # (G, M, d_c)

    @classmethod
    def of(cls, state: PartialState, packed: Tensor, group: list[int]) -> _Running:
        """Of a group that saw nothing yet."""
        place: slice | list[int] = slice(group[0], group[0] + 1) if len(group) == 1 else group
        return cls(place, packed[place], state.m[place], state.l[place], state.o[place])

    def add(self, rows: Tensor, limits: Tensor | None) -> None:
        """Rows (G, n, d_c + d_R); query row i sees the first `limits[i]` (G, M, 1), or all."""
        scores = self.query @ rows.transpose(-1, -2)  # (G, M, n)
        if limits is not None:
            scores.masked_fill_(torch.arange(rows.shape[1], device=rows.device) >= limits, EMPTY)
        before = self.m
        self.m = torch.maximum(before, scores.amax(-1))  # (G, M)
        # −inf − −inf would be NaN; without limits every query row has a finite score.
        subtracted = self.m if limits is None else self.m.masked_fill(self.m == EMPTY, 0)
        shrink = _weights(before - subtracted)  # (G, M)
        weights = _weights(scores.sub_(subtracted[..., None]))  # (G, M, n)
        self.l = self.l * shrink + weights.sum(-1)
        self.o = torch.baddbmm(self.o * shrink[..., None], weights, rows[..., : self.o.shape[-1]])

    def keep(self, state: PartialState) -> None:
        """Put the result into the state of all sequences."""
        state.m[self.place], state.l[self.place], state.o[self.place] = self.m, self.l, self.o


def _weights(logarithms: Tensor) -> Tensor:
    """Exponentials of numbers <= 0, in place, 0 where it is too small to matter."""
    return torch.threshold_(logarithms.clamp_(min=WEIGHT_FLOOR).exp_(), DROPPED, 0.0)
