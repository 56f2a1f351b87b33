"""Lazy tensors of a checkpoint folder: safetensors (single or sharded), or `pytorch_model.bin` read safely."""

from __future__ import annotations

import json
import pickle
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mla_convert.errors import InputRefused

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


# What is made float64 of a matrix at once, in bytes.
BLOCK_BYTES = 8 * 1024**2


def row_blocks(matrix: Tensor) -> tuple[Tensor, ...]:
    """Views of the rows of a tensor, as many at a time as take `BLOCK_BYTES` in float64."""
    per_row = 8 * max(1, matrix[0].numel())
    blocks: tuple[Tensor, ...] = matrix.split(max(1, BLOCK_BYTES // per_row))
    return blocks


def all_finite(value: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity: one pass and no copy, since both reach the extremes."""
    return value.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(value))).all())


@dataclass(frozen=True)
class TensorInfo:
    """Header entry of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str


@dataclass(frozen=True)
class TensorFiles:
    """Names and headers of all tensors; values are read one at a time.

    Attributes:
        folder: Where the files are.
        weight_files: Names of the files that hold weights, sorted.
        infos: Header of each tensor.
    """

    folder: Path
    weight_files: tuple[str, ...]
    infos: dict[str, TensorInfo]
    _pickled: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> frozenset[str]:
        """All tensor names."""
        return frozenset(self.infos)

    def info(self, name: str) -> TensorInfo:
        """Header of one tensor."""
        return self.infos[name]

    def read(self, name: str) -> Tensor:
        """One tensor as stored; pages of the file, which the system can drop, until something is computed of it."""
        if name in self._pickled:
            return self._pickled[name]
        with safe_open(self.folder / self.infos[name].file, framework="pt") as handle:
            value: Tensor = handle.get_tensor(name)
        return value


def open_tensor_files(folder: Path) -> TensorFiles:
    """Read the headers of a checkpoint folder.

    Raises:
        InputRefused: If there are no weights, an index names a missing file or tensor, or a file is damaged.
    """
    for stem, read in (("model.safetensors", _read_safetensors), ("pytorch_model.bin", _read_pickled)):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            weight_map = _weight_map(index)
            files = sorted(set(weight_map.values()))
            opened = read(folder, files)
            _check_index(index, weight_map, opened)
            return opened
        if (folder / stem).is_file():
            return read(folder, [stem])
    raise InputRefused(
        "no weights", expected="model.safetensors, its index, or pytorch_model.bin", found="neither", where=str(folder)
    )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputRefused("not a weight index", expected="a JSON object with weight_map", where=str(index)) from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise InputRefused(
            "not a weight index", expected="weight_map from tensor names to file names", where=str(index)
        )
    for file in set(weight_map.values()):
        if Path(file).name != file or not (index.parent / file).is_file():
            raise InputRefused("the index names a file that is not there", found=file, where=str(index))
    return weight_map


def _check_index(index: Path, weight_map: dict[str, str], opened: TensorFiles) -> None:
    actual = {name: info.file for name, info in opened.infos.items()}
    for name in sorted(weight_map.keys() | actual.keys()):
        if weight_map.get(name) != actual.get(name):
            raise InputRefused(
                "the index and the shards disagree",
                expected=f"{name} in {weight_map.get(name) or 'no file'}",
                found=f"in {actual.get(name) or 'no file'}",
                where=str(index),
            )


def _read_safetensors(folder: Path, files: list[str]) -> TensorFiles:
    infos: dict[str, TensorInfo] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - a handle is not a mapping
                    part = handle.get_slice(name)
                    dtype = SAFETENSORS_DTYPES.get(part.get_dtype(), torch.uint8)
                    _add(infos, name, TensorInfo(tuple(part.get_shape()), dtype, file))
        except OSError as error:
            raise InputRefused(f"a weight file that cannot be read: {error}", where=str(folder / file)) from error
        except SafetensorError as error:
            raise InputRefused(f"damaged safetensors file: {error}", where=str(folder / file)) from error
    return TensorFiles(folder, tuple(files), infos)


def _read_pickled(folder: Path, files: list[str]) -> TensorFiles:
    infos: dict[str, TensorInfo] = {}
    tensors: dict[str, Tensor] = {}
    for file in files:
        # Old, non-zip files cannot be memory-mapped.
        mapped = zipfile.is_zipfile(folder / file)
        try:
            state: Any = torch.load(folder / file, map_location="cpu", weights_only=True, mmap=mapped)
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
            raise InputRefused(
                f"a pickle that is damaged or holds more than plain weights ({type(error).__name__}); it was not run",
                where=str(folder / file),
                remedy="Convert it to safetensors where you trust it.",
            ) from error
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise InputRefused("a pickle that is not a state dict", where=str(folder / file))
        for name, value in state.items():
            _add(infos, name, TensorInfo(tuple(value.shape), value.dtype, file))
            tensors[name] = value
    return TensorFiles(folder, tuple(files), infos, tensors)


def _add(infos: dict[str, TensorInfo], name: str, info: TensorInfo) -> None:
    if name in infos:
        raise InputRefused(f"a tensor stored twice ({infos[name].file} and {info.file})", where=name)
    infos[name] = info
