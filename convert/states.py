"""Hidden states of many windows, in memory while they fit a budget, in a file past it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
from torch import Tensor

from mla_convert.errors import EnvironmentFault

# Default of what a conversion may hold beside one layer: hidden states, and afterwards the written model whole.
MEMORY_BUDGET_BYTES = 2 * 1024**3
FLOAT32_BYTES = 4


class StateStore:
    """(N, T, D) float32 states, read and written some windows at a time.

    Past the budget they lie in a file without a name, so that nothing is left of it however the process ends; it is
    read and written, not mapped, so that what is resident is what was asked for.

    Args:
        count: Windows, N.
        length: Tokens per window, T.
        width: Numbers per token, D.
        budget_bytes: Most bytes to hold in memory.
        scratch: Folder on a disk, for the file; made where it is needed.

    Raises:
        EnvironmentFault: If the disk has no room for them.
    """

    def __init__(self, count: int, length: int, width: int, budget_bytes: int, scratch: Path) -> None:
        self._shape = (count, length, width)
        self._memory: Tensor | None = None
        self._file: IO[bytes] | None = None
        if self.nbytes <= budget_bytes:
            self._memory = torch.empty(self._shape, dtype=torch.float32)
            return
        scratch.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(scratch).free
        if free < self.nbytes:
            raise EnvironmentFault(
                "no room on the disk for hidden states past the memory budget",
                expected=f"{self.nbytes:,} bytes",
                found=f"{free:,} free",
                where=str(scratch),
            )
        self._file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - closed by `close`

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, T, D)."""
        return self._shape

    @property
    def nbytes(self) -> int:
        """Size of all states."""
        return torch.Size(self._shape).numel() * FLOAT32_BYTES

    @property
    def spilled(self) -> bool:
        """Whether they lie in a file."""
        return self._file is not None

    def read(self, windows: slice) -> Tensor:
        """(n, T, D) float32 copy of the states of some windows; undefined where none were written."""
        start, count = self._span(windows)
        if self._memory is not None:
            return self._memory[start : start + count].clone()
        out = torch.empty((count, *self._shape[1:]), dtype=torch.float32)
        file = self._seek(start)
        if file.readinto(_bytes_of(out)) != out.numel() * FLOAT32_BYTES:  # type: ignore[attr-defined]
            raise ValueError(f"windows {windows} were never written")
        return out

    def write(self, windows: slice, states: Tensor) -> None:
        """Keep (n, T, D) states of some windows, as float32.

        Raises:
            ValueError: If the shape is another.
        """
        start, count = self._span(windows)
        if states.shape != (count, *self._shape[1:]):
            raise ValueError(f"states of shape {tuple(states.shape)} for {count} windows of {self._shape[1:]}")
        if self._memory is not None:
            self._memory[start : start + count] = states
        else:
            self._seek(start).write(_bytes_of(states.detach().float().contiguous()))

    def close(self) -> None:
        """Give memory and disk back; nothing can be read afterwards."""
        self._memory = None
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> StateStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _span(self, windows: slice) -> tuple[int, int]:
        start, stop, step = windows.indices(self._shape[0])
        if step != 1:
            raise ValueError("windows are read and written in a row")
        return start, max(0, stop - start)

    def _seek(self, start: int) -> IO[bytes]:
        if self._file is None:
            raise ValueError("the states were closed")
        self._file.seek(start * self._shape[1] * self._shape[2] * FLOAT32_BYTES)
        return self._file


def _bytes_of(states: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return states.view(-1).numpy().data.cast("B")
