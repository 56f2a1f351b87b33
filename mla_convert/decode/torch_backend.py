"""The `torch` backend: chunked over cached rows, softmax states merged exactly. The default where there is no GPU.

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
from mla_convert.decode.merge import EMPTY, PartialState, apply_sinks, merge_states
from mla_convert.decode.rows import RowFormat, decode
from mla_convert.errors import InputRefused

CHUNK_BYTES = 1 << 20
"""Rows and scores of one step. Measured at 192 and 576 numbers a row: between 512 KiB and 2 MiB nothing changes; less
pays for Python, more leaves the second-level cache before the values are read."""
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
        for start, group in self._steps(lengths, packed):
            stop = min(start + self._rows_at_once(packed, len(group)), max(lengths[item] for item in group))
            if len(group) == 1:
                rows = source.run_of(call.block_table[group[0]], start, stop)[None]  # (1, n, d_c + d_R)
            else:
                rows = source.gather_prefixes(call.block_table, group, [lengths[item] for item in group], stop)
            limits = _limits(call, group, lengths, packed) if _some_hidden(lengths, group, stop, hidden) else None
            _add(state, packed, group, _Chunk(rows, start, limits, is_first=start == 0))
        return state

    def _sparse(self, call: DecodeCall, sparse: SparseSelection, packed: Tensor) -> PartialState:
        segments = [(call.pool, sparse.indices, sparse.lengths)]
        if sparse.extra_pool is not None and sparse.extra_indices is not None and sparse.extra_lengths is not None:
            segments.append((sparse.extra_pool, sparse.extra_indices, sparse.extra_lengths))
        state = PartialState.empty(packed.shape[:2], call.format.latent_width, packed.dtype, packed.device)
        for number, (pool, indices, valid) in enumerate(segments):
            source = _Pool.of(pool, call.format, packed.dtype)
            chosen = indices.flatten(0, 1)  # (B·s_q, k)
            for item, length in enumerate(valid.flatten().tolist()):
                step = self._rows_at_once(packed, 1)
                for start in range(0, length, step):
                    slots = chosen[item, start : min(start + step, length)]  # (n,)
                    is_first = number == 0 and start == 0
                    _add(state, packed, [item], _Chunk(source.gather(slots)[None], start, None, is_first))
        return state

    def _rows_at_once(self, packed: Tensor, sequences: int) -> int:
        """Rows of each of some sequences whose numbers and scores fill a chunk."""
        row_bytes = (packed.shape[-1] + packed.shape[-2]) * packed.element_size()
        return max(1, self._chunk_bytes // (row_bytes * sequences))

    def _steps(self, lengths: list[int], packed: Tensor) -> Iterator[tuple[int, list[int]]]:
        """`(first row, sequences)` of each step: a long sequence in chunks, short ones of like lengths together."""
        alone = self._rows_at_once(packed, 1)
        group: list[int] = []
        for item in sorted((item for item, length in enumerate(lengths) if length), key=lambda item: lengths[item]):
            if lengths[item] * 2 > alone:
                yield from ((start, [item]) for start in range(0, lengths[item], alone))
                continue
            # Ascending: this sequence is the longest of the group. The rows that fill up the others are wasted work.
            wasted = bool(group) and lengths[item] > 2 * lengths[group[0]] + 16
            if wasted or lengths[item] > self._rows_at_once(packed, len(group) + 1):
                yield 0, group
                group = []
            group.append(item)
        if group:
            yield 0, group


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
        self._refuse_no_page(min(listed), max(listed))
        if listed == list(range(listed[0], listed[0] + len(listed))):
            begin = listed[0] * size + start - first * size
            return decode(self.form, self.flat[begin : begin + stop - start], self.compute)
        kept = self.pages.index_select(0, numbers).flatten(0, 1)  # (k·P, row)
        return decode(self.form, kept[start - first * size : stop - first * size], self.compute)

    def gather(self, slots: Tensor) -> Tensor:
        """(n, d_c + d_R): rows by `page · P + offset`; slots (n,) int64."""
        self._refuse_no_page(
            int(slots.min()) // self.pages.shape[1],
            int(slots.max()) // self.pages.shape[1],
        )
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

    def _refuse_no_page(self, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= self.pages.shape[0]:
            raise InputRefused(
                "a visible row lies in no page of the pool",
                expected=f"pages 0 to {self.pages.shape[0] - 1}",
                found=f"{lowest} to {highest}",
                where="block_table or sparse indices",
            )


def _some_hidden(lengths: list[int], group: list[int], stop: int, hidden: int) -> bool:
    """Whether a query of a group does not see every row below `stop`."""
    return any(stop > lengths[item] - hidden for item in group)


def _limits(call: DecodeCall, group: list[int], lengths: list[int], packed: Tensor) -> Tensor:
    """(G, s_q·H, 1): how many keys of its sequence each packed query row sees."""
    queries, heads = call.q.shape[1:3]
    places = torch.arange(queries, device=packed.device).repeat_interleave(heads)  # (s_q·H,)
    ends = torch.tensor([lengths[item] for item in group], device=packed.device)[:, None]  # (G, 1)
    visible = ends - queries + places + 1 if call.causal else ends.expand(-1, queries * heads)  # (G, s_q·H)
    return visible[..., None]


@dataclass(frozen=True)
class _Chunk:
    """What one step reads.

    Attributes:
        rows: (G, n, d_c + d_R).
        start: Key of the first.
        limits: (G, s_q·H, 1) keys that each packed query row sees, or None where all see every row of the chunk.
        is_first: Whether nothing was added to these sequences before.
    """

    rows: Tensor
    start: int
    limits: Tensor | None
    is_first: bool


def _add(state: PartialState, packed: Tensor, group: list[int], chunk: _Chunk) -> None:
    """Merge one chunk into the state of its sequences, in place."""
    place: slice | list[int] = slice(group[0], group[0] + 1) if len(group) == 1 else group
    rows = chunk.rows
    scores = packed[place] @ rows.transpose(-1, -2)  # (G, M, n)
    if chunk.limits is not None:
        keys = torch.arange(chunk.start, chunk.start + rows.shape[1], device=rows.device)  # (n,)
        scores.masked_fill_(keys >= chunk.limits, EMPTY)
    part = _state_of(scores, rows[..., : state.o.shape[-1]])
    if not chunk.is_first:
        part = merge_states([PartialState(state.m[place], state.l[place], state.o[place]), part])
    state.m[place], state.l[place], state.o[place] = part.m, part.l, part.o


def _state_of(scores: Tensor, values: Tensor) -> PartialState:
    """`PartialState.of_scores` without weights too small to matter; overwrites the scores."""
    m = scores.amax(-1)  # (G, M)
    subtracted = m.masked_fill(m == EMPTY, 0)
    weights = scores.sub_(subtracted[..., None]).clamp_(min=WEIGHT_FLOOR).exp_()  # (G, M, n)
    weights = torch.threshold_(weights, DROPPED, 0.0)
    return PartialState(m, weights.sum(-1), weights @ values)
