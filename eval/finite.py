"""Weights that are not finite are refused before anything is computed with them."""

from __future__ import annotations

from pathlib import Path

from mla_convert.convert.tensor_files import all_finite, open_tensor_files
from mla_convert.errors import InputRefused
from mla_convert.progress import track


def refuse_not_finite(folder: Path) -> None:
    """Read every tensor of a checkpoint once.

    Raises:
        InputRefused: Naming the first tensor with a NaN or an infinity.
    """
    files = open_tensor_files(folder)
    for name in track(sorted(files.names), "reading the weights", unit="tensor"):
        if not all_finite(files.read(name)):
            raise InputRefused(
                "a weight that is not finite", expected="finite values", found="NaN or infinity", where=name
            )
