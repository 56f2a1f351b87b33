"""What is published: the record of cached rows (seed 1, 0x05), and what they take in memory (seed 1, 0x06)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from mla_convert.decode.addressing import PageRange
from mla_convert.decode.rows import RowFormat
from mla_convert.errors import InputRefused


@dataclass(frozen=True)
class PublicationRecord:
    """Rows of one layer of one sequence: where they lie, and how they are to be read.

    Attributes:
        cache: Identity of the cache.
        request: Identity of the request.
        sequence: Number of the sequence in the cache.
        layer: Of the model.
        first_token: Of the logical range, counted in the sequence.
        tokens: Length of the logical range.
        pages: Physical pieces of the range, in order.
        form: Schema: name, version, widths, dtypes and scales of a row.
        row_stride: Bytes from one row to the next.
        rope: `rope_digest` of the rotation that the keys have had.
        committed_length: Rows of the sequence that are durable; None for provisional rows.
        transaction: Number of the transaction that provisional rows belong to; None for committed ones.
    """

    cache: str
    request: str
    sequence: int
    layer: int
    first_token: int
    tokens: int
    pages: tuple[PageRange, ...]
    form: RowFormat
    row_stride: int
    rope: str
    committed_length: int | None
    transaction: int | None

    def __post_init__(self) -> None:
        if (self.committed_length is None) == (self.transaction is None):
            raise InputRefused(
                "rows are either committed or of a transaction",
                found=f"committed_length={self.committed_length}, transaction={self.transaction}",
                where="publication record",
            )

    @property
    def scale_dtype(self) -> str | None:
        """Of the scales in a row; None for a row without."""
        return None if self.form.is_plain else "float32"

    def require(self, form: RowFormat, rope: str) -> None:
        """Refuse to read these rows as others than they are.

        Raises:
            InputRefused: Another row format, or keys that were rotated in another way.
        """
        form.require(self.form, f"layer {self.layer} of {self.request}")
        if rope != self.rope:
            raise InputRefused(
                "keys of another rotation",
                expected=rope,
                found=self.rope,
                where=f"layer {self.layer} of {self.request}",
            )


def rope_digest(width: int, layout: str, parameters: Mapping[str, object]) -> str:
    """Identity of a rotation: SHA-256 over canonical JSON (seed 1, 0x03: what cache and runtime must agree on).

    Args:
        width: `d_R`.
        layout: "interleaved" or "half-split"; the pairing leaves every shape as it is.
        parameters: Base, scaling and its numbers, as in the model's configuration.

    Raises:
        InputRefused: A layout without meaning.
    """
    if layout not in ("interleaved", "half-split"):
        raise InputRefused("a rotary layout without meaning", expected="interleaved or half-split", found=layout)
    fields = {"layout": layout, "parameters": dict(parameters), "width": width}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Residency:
    """Bytes of a cache, all layers together; the first five add up to the pools (seed 1, 0x06).

    Attributes:
        payload: Latents and rotary keys of committed rows, shared ones once.
        scales: Their scales.
        padding: The rest of the pages that hold them, and the bytes that fill up a row.
        provisional: Pages that only open transactions hold.
        free: Pages that nobody holds.
        metadata: Block tables, lengths and reference counts.
        logical_payload: Payload as if no sequence shared a row.
    """

    payload: int
    scales: int
    padding: int
    provisional: int
    free: int
    metadata: int
    logical_payload: int

    @property
    def pools(self) -> int:
        """Bytes of the pools of all layers."""
        return self.payload + self.scales + self.padding + self.provisional + self.free
