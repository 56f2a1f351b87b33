"""Freed memory given back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# A small block behind each large one keeps the heap from shrinking by itself.
HOLES = """
import ctypes
from pathlib import Path
from mla_convert.convert.heap import give_back

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
blocks = []
for _ in range(1000):
    blocks.append(library.malloc(ctypes.c_size_t(100_000)))
    ctypes.memset(blocks[-1], 1, 100_000)
    library.malloc(ctypes.c_size_t(64))
for block in blocks:
    library.free(ctypes.c_void_p(block))
before = resident()
give_back()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")
def test_holes_in_the_heap_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)

    assert int(done.stdout) > 80_000_000
