"""Freed memory given back to the system."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Return what the C library keeps of freed blocks, where it is glibc, which can be asked.

    Blocks of some megabytes that come and go with every layer leave holes that would otherwise stay resident.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)
