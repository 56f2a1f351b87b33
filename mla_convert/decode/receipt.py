"""What ran: one receipt for each kind of call of a run, with the candidates that did not run and why.

A name in a configuration proves nothing (seed 1, 0x08): a receipt is written where the backend returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata, util

import torch

from mla_convert.decode.abi import DecodeCall, LaunchFigures

PACKAGES = ("torch", "triton", "flash_mla", "flashinfer")


@dataclass(frozen=True)
class Rejection:
    """A candidate that did not run.

    Attributes:
        backend: Its name.
        reason: Why.
        absent: Whether this machine lacks what it needs, rather than the call lying outside its limits.
    """

    backend: str
    reason: str
    absent: bool


@dataclass(frozen=True)
class CallKind:
    """What of a call decides where it can run. Lengths of sequences are not part of it."""

    batch: int
    queries: int
    heads: int
    latent_width: int
    rope_width: int
    query_dtype: str
    row_format: str
    row_version: int
    row_bytes: int
    page_size: int
    causal: bool
    top_k: int | None
    extra_top_k: int | None
    sinks: bool
    device: str

    @classmethod
    def of(cls, call: DecodeCall) -> CallKind:
        """The kind of `call`."""
        batch, queries, heads, _ = call.q.shape
        sparse = call.sparse
        extra = None if sparse is None or sparse.extra_indices is None else sparse.extra_indices.shape[-1]
        return cls(
            batch=batch,
            queries=queries,
            heads=heads,
            latent_width=call.format.latent_width,
            rope_width=call.format.rope_width,
            query_dtype=str(call.q.dtype).removeprefix("torch."),
            row_format=call.format.name,
            row_version=call.format.version,
            row_bytes=call.format.row_bytes,
            page_size=call.page_size,
            causal=call.causal,
            top_k=None if sparse is None else sparse.indices.shape[-1],
            extra_top_k=extra,
            sinks=call.sinks is not None,
            device=_device_name(call.q.device),
        )


@dataclass(frozen=True)
class DecodeReceipt:
    """Calls of one kind that ran alike.

    Attributes:
        requested: What was asked for, `auto` or a name.
        ran: The backend that returned.
        rejected: Candidates that came before it, best first.
        fallback: Whether `ran` is not the first candidate that this machine has.
        kind: Of the calls.
        launch: Of the first of them.
        calls: How many.
    """

    requested: str
    ran: str
    rejected: tuple[Rejection, ...]
    fallback: bool
    kind: CallKind
    launch: LaunchFigures
    calls: int


class ReceiptBook:
    """Receipts of a run. One is kept by whoever runs the calls and handed to each of them."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str, tuple[Rejection, ...], CallKind], LaunchFigures] = {}
        self._calls: Counter[tuple[str, str, tuple[Rejection, ...], CallKind]] = Counter()

    def has(self, requested: str, ran: str, rejected: tuple[Rejection, ...], kind: CallKind) -> bool:
        """Whether such a call is on record, so that its launch need not be described again."""
        return (requested, ran, rejected, kind) in self._first

    def note(
        self, requested: str, ran: str, rejected: tuple[Rejection, ...], kind: CallKind, launch: LaunchFigures | None
    ) -> None:
        """Count a call that has returned; `launch` is needed for the first of its kind."""
        key = (requested, ran, rejected, kind)
        if key not in self._first:
            self._first[key] = launch if launch is not None else LaunchFigures()
        self._calls[key] += 1

    @property
    def receipts(self) -> tuple[DecodeReceipt, ...]:
        """In the order in which their first calls returned."""
        return tuple(
            DecodeReceipt(
                requested=requested,
                ran=ran,
                rejected=rejected,
                fallback=any(not rejection.absent for rejection in rejected),
                kind=kind,
                launch=launch,
                calls=self._calls[(requested, ran, rejected, kind)],
            )
            for (requested, ran, rejected, kind), launch in self._first.items()
        )

    @property
    def calls(self) -> int:
        """All calls on record."""
        return sum(self._calls.values())

    @property
    def fallbacks(self) -> int:
        """Calls that did not run on the first candidate that this machine has."""
        return sum(receipt.calls for receipt in self.receipts if receipt.fallback)

    def to_json(self) -> dict[str, object]:
        """Receipts, counters, and the versions of what may have run."""
        return {
            "receipts": [asdict(receipt) for receipt in self.receipts],
            "calls": self.calls,
            "fallbacks": self.fallbacks,
            "versions": dict(versions()),
        }


def versions() -> Mapping[str, str]:
    """Installed versions of the packages that backends come from."""
    found = {}
    for name in PACKAGES:
        if util.find_spec(name) is not None:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = "installed, version unknown"
    return found


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
