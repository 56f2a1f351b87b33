"""The header of a .safetensors file, read and checked without torch and without touching the tensor data."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from mla_convert.errors import InputRefused

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
METADATA_KEY = "__metadata__"
DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
}
"""safetensors' dtype names -> torch's name and the size of one element in bytes."""


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a file: torch's dtype name, shape, and its bytes `[start, end)` in the data region."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def bytes(self) -> int:
        """Size of the tensor's data."""
        return self.end - self.start


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Read the names, dtypes, shapes and offsets of a file's tensors.

    Args:
        path: A .safetensors file.

    Returns:
        Name -> header, in the order of the data.

    Raises:
        InputRefused: The file is cut short, its header is no valid JSON object, an entry is malformed, or the
            tensors do not cover the data region exactly once.
    """
    entries, data_bytes = _read_json(path)
    tensors = [_tensor(path, name, entry) for name, entry in entries.items() if name != METADATA_KEY]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    position = 0
    for tensor in tensors:
        if tensor.start != position:
            raise _refuse(path, f"tensor {tensor.name!r} leaves a gap or overlaps", position, tensor.start)
        position = tensor.end
    if position != data_bytes:
        raise _refuse(path, "the tensors do not fill the data region", data_bytes, position)
    return {tensor.name: tensor for tensor in tensors}


def _read_json(path: Path) -> tuple[dict[str, object], int]:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            room = size - LENGTH_BYTES
            if room < 0 or length > min(room, MAX_HEADER_BYTES):
                raise _refuse(path, "the header is longer than the file", f"at most {max(room, 0)}", length)
            text = stream.read(length)
    except OSError as error:
        raise InputRefused("cannot be read", where=str(path), found=str(error)) from error
    try:
        entries = json.loads(text, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise _refuse(path, "the header is not valid JSON", "a JSON object", error) from error
    if not isinstance(entries, dict):
        raise _refuse(path, "the header is not valid JSON", "a JSON object", type(entries).__name__)
    return entries, room - length


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name is written twice")
    return result


def _tensor(path: Path, name: str, entry: object) -> TensorHeader:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _refuse(path, f"dtype of tensor {name!r}", f"one of {', '.join(DTYPES)}", dtype)
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise _refuse(path, f"entry of tensor {name!r}", "shape and two data_offsets", entry)
    torch_name, item_bytes = DTYPES[dtype]
    start, end = offsets
    if end - start != math.prod(shape) * item_bytes:
        raise _refuse(path, f"bytes of tensor {name!r}", math.prod(shape) * item_bytes, end - start)
    return TensorHeader(name=name, dtype=torch_name, shape=tuple(shape), start=start, end=end)


def _counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _refuse(path: Path, message: str, expected: object, found: object) -> InputRefused:
    return InputRefused(message, where=str(path), expected=str(expected), found=str(found))
