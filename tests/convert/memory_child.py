"""Private memory of conversions, measured inside a process of its own.

Run as `python memory_child.py WARM_UP SOURCE TEXT OUT`. Prints one JSON object: the peak above what the process has
after a first small conversion, for an honest conversion and for one that keeps the last four layers that it has read.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from types import TracebackType

from torch import Tensor

from mla_convert.convert import reload_check, reload_child
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert

SAMPLE_SECONDS = 0.002
KEPT_LAYERS = 4
# Smaller than the states: they are on disk.
BUDGET_BYTES = 1000


def private_bytes() -> int:
    """Resident memory that is not of a mapped file (the system can drop those pages at any time)."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """Largest private memory within a block, above that at its start."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._start = self._largest = 0

    @property
    def bytes(self) -> int:
        return self._largest - self._start

    def __enter__(self) -> Peak:
        gc.collect()
        self._start = self._largest = private_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._largest = max(self._largest, private_bytes())


def keep_layers() -> None:
    """The fault: what was read of a layer stays in memory until four more have been read."""
    kept: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
    original = SourceCheckpoint.tensor

    def hoarding(self: SourceCheckpoint, name: str) -> Tensor:
        layer = name.partition("layers.")[2].partition(".")[0]
        tensors = kept.setdefault(layer, {})
        if name not in tensors:
            tensors[name] = original(self, name).clone()
        while len(kept) > KEPT_LAYERS:
            kept.popitem(last=False)
        return tensors[name]

    SourceCheckpoint.tensor = hoarding  # type: ignore[method-assign]


def main() -> None:
    warm_up, source, text, out = sys.argv[1:]
    # In this process, so that one number covers loading what was written as well.
    reload_check._run_child = reload_child.compare
    options = ConvertOptions(
        kv_lora_rank=48,
        qk_rope_head_dim=24,
        calibration=(text,),
        calibration_tokens=128,
        calibration_window=64,
    )

    def measured(folder: str, name: str) -> int:
        with Peak() as peak:
            convert(folder, Path(out) / name, options, command=["test"], memory_budget_bytes=BUDGET_BYTES)
        return peak.bytes

    measured(warm_up, "warm-up")
    honest = measured(source, "honest")
    os.environ["MLA_CONVERT_CACHE"] += "-of-the-fault"
    keep_layers()
    print(json.dumps({"honest": honest, "hoarding": measured(source, "hoarding")}))


if __name__ == "__main__":
    main()
