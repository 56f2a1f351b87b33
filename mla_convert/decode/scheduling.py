"""Scheduler metadata of a decode call, and everything that makes it stale (seed 1, 0x08)."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mla_convert.decode.abi import DecodeCall
from mla_convert.decode.rows import RowFormat
from mla_convert.decode.tiles import TileConfig
from mla_convert.errors import InputRefused


@dataclass(frozen=True)
class ScheduleKey:
    """What a schedule was made for; a call that differs in one field must not use it.

    Attributes:
        batch: B.
        queries: s_q.
        heads: H.
        page_size: P.
        causal: As in the call.
        form: Layout of the rows.
        dtype: Of the query.
        device: Of the tensors.
        table_width: Pages that a sequence can have at most; None where sparse.
        top_k: Width of the sparse selection, or None.
        extra_page_size: P' of the second pool, or None.
        extra_top_k: Width of its selection, or None.
        lengths: Values of `seq_lens`, or of the lengths of the selection.
        extra_lengths: Values of the lengths of the second selection, or None.
    """

    batch: int
    queries: int
    heads: int
    page_size: int
    causal: bool
    form: RowFormat
    dtype: torch.dtype
    device: torch.device
    table_width: int | None
    top_k: int | None
    extra_page_size: int | None
    extra_top_k: int | None
    lengths: tuple[int, ...]
    extra_lengths: tuple[int, ...] | None

    @classmethod
    def of(cls, call: DecodeCall) -> ScheduleKey:
        """Key of a call. Reads the lengths, so it waits for the device, and must not be called inside a graph."""
        batch, queries, heads, _ = call.q.shape
        sparse = call.sparse
        return cls(
            batch=batch,
            queries=queries,
            heads=heads,
            page_size=call.page_size,
            causal=call.causal,
            form=call.format,
            dtype=call.q.dtype,
            device=call.q.device,
            table_width=call.block_table.shape[1] if sparse is None else None,
            top_k=None if sparse is None else sparse.indices.shape[2],
            extra_page_size=None if sparse is None or sparse.extra_pool is None else sparse.extra_pool.shape[1],
            extra_top_k=None if sparse is None or sparse.extra_indices is None else sparse.extra_indices.shape[2],
            lengths=_values(call.seq_lens if sparse is None else sparse.lengths),
            extra_lengths=None if sparse is None or sparse.extra_lengths is None else _values(sparse.extra_lengths),
        )


@dataclass(frozen=True)
class Schedule:
    """Split count and tile of a launch, with the key they hold for.

    Attributes:
        key: What they were chosen for.
        splits: Runs that each sequence's keys are cut into.
        tile: Of the split kernel.
    """

    key: ScheduleKey
    splits: int
    tile: TileConfig

    def require(self, call: DecodeCall) -> None:
        """Refuse a call that this schedule was not made for.

        Raises:
            InputRefused: Naming the first field that differs.
        """
        require_same_key(self.key, ScheduleKey.of(call))


def require_same_key(made_for: ScheduleKey, used_for: ScheduleKey) -> None:
    """Refuse metadata made for one key beside another.

    Raises:
        InputRefused: Naming the first field that differs.
    """
    for field in fields(ScheduleKey):
        before, now = getattr(made_for, field.name), getattr(used_for, field.name)
        if before != now:
            raise InputRefused(
                "scheduler metadata of another call",
                expected=f"{field.name} = {before}, as when it was made",
                found=f"{field.name} = {now}",
                where="schedule",
                remedy="Make a new schedule when shape, format or lengths change.",
            )


def _values(tensor: Tensor) -> tuple[int, ...]:
    return tuple(int(value) for value in tensor.flatten().tolist())
