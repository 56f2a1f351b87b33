"""Which backend answers a call: declared predicates, a fixed order, and a record of what was passed over."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mla_convert.decode.abi import Backend, DecodeCall, DecodeOutput, check_call
from mla_convert.decode.receipt import CallKind, ReceiptBook, Rejection
from mla_convert.errors import EnvironmentFault, InputRefused, UsageFault

AUTO = "auto"


class Dispatcher:
    """Runs calls on the first backend that fits.

    Args:
        backends: Best first; those that are not `automatic` run only where they are asked for by name.
        requested: `auto`, or the name of one of them, which then runs or the call is refused.
        book: Where what ran is noted.

    Raises:
        UsageFault: For a name that no backend has.
    """

    def __init__(self, backends: Sequence[Backend], requested: str, book: ReceiptBook) -> None:
        names = [backend.name for backend in backends]
        if requested != AUTO and requested not in names:
            raise UsageFault("unknown decode backend", expected=", ".join([AUTO, *names]), found=requested)
        self.requested = requested
        self.book = book
        self._known: dict[tuple[str, torch.device], str | None] = {}
        self._candidates = tuple(
            backend for backend in backends if (backend.automatic if requested == AUTO else backend.name == requested)
        )

    def run(self, call: DecodeCall) -> DecodeOutput:
        """Check the call, choose, compute, and note what ran.

        Raises:
            InputRefused: For a malformed call, or one outside the limits of the backend asked for, or of all.
            EnvironmentFault: If the backend asked for is not on this machine.
        """
        check_call(call)
        if torch.is_grad_enabled() and (call.q.requires_grad or call.pool.requires_grad):
            raise InputRefused(
                "gradients do not flow through a decode backend",
                found="a query or rows that require a gradient",
                remedy="Decode under torch.no_grad(), or train with mla_convert.mla.attention.absorbed.",
            )
        backend, rejected = self._choose(call)
        output = backend.run(call)
        kind = CallKind.of(call)
        known = self.book.has(self.requested, backend.name, rejected, kind)
        self.book.note(self.requested, backend.name, rejected, kind, None if known else backend.launch(call))
        return output

    def require_present(self, device: torch.device) -> None:
        """Refuse a backend asked for by name that is not on this machine, before the first call.

        Raises:
            EnvironmentFault: Saying what is missing.
        """
        if self.requested != AUTO:
            for backend in self._candidates:
                reason = self._absent(backend, device)
                if reason is not None:
                    raise EnvironmentFault(
                        "the decode backend asked for is not here",
                        found=reason,
                        where=f"--backend {self.requested}",
                        remedy="Take --backend auto.",
                    )

    def _absent(self, backend: Backend, device: torch.device) -> str | None:
        """Asked once for each device: looking for a package takes longer than a small call."""
        if (backend.name, device) not in self._known:
            self._known[backend.name, device] = backend.absent(device)
        return self._known[backend.name, device]

    def _choose(self, call: DecodeCall) -> tuple[Backend, tuple[Rejection, ...]]:
        rejected: list[Rejection] = []
        for backend in self._candidates:
            absent = self._absent(backend, call.q.device)
            reason = absent if absent is not None else backend.unfit(call)
            if reason is None:
                return backend, tuple(rejected)
            rejected.append(Rejection(backend.name, reason, absent is not None))
        reasons = "; ".join(f"{entry.backend}: {entry.reason}" for entry in rejected)
        error = EnvironmentFault if all(entry.absent for entry in rejected) else InputRefused
        raise error(
            "no decode backend can run this call"
            if self.requested == AUTO
            else "the decode backend asked for cannot run",
            found=reasons,
            where=f"--backend {self.requested}",
            remedy="Take --backend auto." if self.requested != AUTO else None,
        )
