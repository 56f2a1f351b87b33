"""What really ran, counted where it runs instead of read from the receipts.

A name proves nothing (seed 1, 0x08). So the calls that reach each backend are counted in all runs; and in one that is
not timed the interpreter's profiler looks on: whose code a call enters inside a backend, and how often `kv_b_proj` is
passed, which whoever rebuilds keys and values from the latents has to do, and an absorbed step does not.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from mla_convert.decode.abi import Backend, DecodeCall, DecodeOutput, LaunchFigures
from mla_convert.decode.backends import known_backends

EXPANDING_MODULE = "kv_b_proj"


class Witness:
    """Counts of one run.

    Attributes:
        backends: Those given, each behind a counter; what is served must run on these.
        reached: Calls that each backend has answered, by name.
        entered: Calls of each backend's own code in the audited run, by name.
        expansions: Passes of the modules that rebuild keys and values in the audited run.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.reached: Counter[str] = Counter()
        self.entered: Counter[str] = Counter()
        self.expansions = 0
        self._codes = {_code_of(backend) for backend in (*known_backends(), *backends)}
        self.backends: tuple[Backend, ...] = tuple(_Counted(backend, self.reached) for backend in backends)

    @contextmanager
    def auditing(self, model: Any) -> Iterator[None]:
        """Look on while `model` runs; slow, so for a run that is not timed."""
        expanding = {id(part) for name, part in model.named_modules() if name.rpartition(".")[2] == EXPANDING_MODULE}
        linear = nn.Linear.forward.__code__

        def look(frame: FrameType, event: str, _argument: object) -> None:
            if event != "call":
                return
            if frame.f_code in self._codes:
                self.entered[frame.f_locals["self"].name] += 1
            elif frame.f_code is linear and id(frame.f_locals["self"]) in expanding:
                self.expansions += 1

        before = sys.getprofile()
        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(before)


class _Counted:
    """A backend that counts the calls it answers."""

    def __init__(self, backend: Backend, reached: Counter[str]) -> None:
        self._backend, self._reached = backend, reached

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def automatic(self) -> bool:
        return self._backend.automatic

    def absent(self, device: torch.device) -> str | None:
        return self._backend.absent(device)

    def unfit(self, call: DecodeCall) -> str | None:
        return self._backend.unfit(call)

    def run(self, call: DecodeCall) -> DecodeOutput:
        output = self._backend.run(call)
        self._reached[self.name] += 1
        return output

    def launch(self, call: DecodeCall) -> LaunchFigures:
        return self._backend.launch(call)


def _code_of(backend: Backend) -> CodeType:
    code: CodeType = type(backend).run.__code__
    return code
