"""Writing a checkpoint folder so that it either is finished or is not there.

Everything goes to a hidden sibling of the target; a rename is the last step. A crash leaves the sibling, never a
folder that looks finished. Tensors go to disk as they come.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from torch import Tensor

from mla_convert.convert.tensor_files import SAFETENSORS_DTYPES
from mla_convert.errors import EnvironmentFault, UsageFault

SHARD_BYTES = 4 * 1024**3
# Room in front of a shard's tensors for the header, which is known last; the rest of it is spaces. Tensors then start
# on a page of memory. It holds some 500 entries.
HEADER_ROOM = 64 * 1024
_LENGTH_BYTES = 8
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
INCOMPLETE, REPLACED = ".incomplete-", ".replaced-"
INDEX_NAME = "model.safetensors.index.json"


class FolderTransaction:
    """A folder written beside its target and renamed into place by `commit`.

    Args:
        target: Final path.
        overwrite: Replace an existing folder.

    Raises:
        UsageFault: If the target exists and `overwrite` is not set.
    """

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        refuse_existing(target, overwrite=overwrite)
        self.target = target
        self.working = target.parent / f".{target.name}{INCOMPLETE}{os.getpid()}"

    def __enter__(self) -> FolderTransaction:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        _clear_dead_runs(self.target)
        shutil.rmtree(self.working, ignore_errors=True)
        self.working.mkdir()
        return self

    def commit(self) -> None:
        """Flush every file and move the folder to its final name."""
        for path in sorted(self.working.rglob("*")):
            if path.is_file():
                _flush(path)
        _flush(self.working)
        replaced = self.target.parent / f".{self.target.name}{REPLACED}{os.getpid()}"
        if self.target.exists():
            os.replace(self.target, replaced)
        try:
            os.replace(self.working, self.target)
        except OSError:
            if replaced.exists():
                os.replace(replaced, self.target)
            raise
        _flush(self.target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.working, ignore_errors=True)


def absolute(out: Path) -> Path:
    """`out` as an absolute path, `~` expanded.

    Raises:
        UsageFault: If it is the working directory, which cannot be replaced by a rename.
    """
    path = Path(os.path.abspath(out.expanduser()))
    if path == Path.cwd():
        raise UsageFault("the output is the working directory", where=str(out), remedy="Name a folder to be made.")
    return path


def check_writable(target: Path) -> None:
    """See that a folder can be made where `target` will be, and leave nothing behind.

    Raises:
        EnvironmentFault: With the system's reason.
    """
    parent = target.parent
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    probe = target.parent / f".{target.name}{REPLACED}{os.getpid()}"
    made: list[Path] = []
    try:
        for path in [*reversed(missing), probe]:
            path.mkdir()
            made.append(path)
    except OSError as error:
        raise EnvironmentFault(f"no folder can be made there: {error.strerror}", where=str(target)) from error
    finally:
        for path in reversed(made):
            path.rmdir()


def _clear_dead_runs(target: Path) -> None:
    """Remove what killed runs left beside `target`; give back the old folder if one died between two renames."""
    for mark in (REPLACED, INCOMPLETE):
        for path in target.parent.glob(f".{glob.escape(target.name)}{mark}*"):
            process = path.name.rpartition("-")[2]
            if not process.isdigit() or psutil.pid_exists(int(process)):
                continue
            if mark == REPLACED and not target.exists():
                os.replace(path, target)
            else:
                shutil.rmtree(path, ignore_errors=True)


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that exists, or that `overwrite` must not replace.

    Raises:
        UsageFault: Unless the target is free, empty, or a folder that `overwrite` may replace.
    """
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise UsageFault("the output exists and is not a folder", where=str(target))
    if not overwrite and any(target.iterdir()):
        raise UsageFault("the output folder exists", where=str(target), remedy="Choose another, or give --overwrite.")
    if overwrite and any(target.iterdir()) and not (target / "config.json").is_file():
        raise UsageFault(
            "--overwrite replaces checkpoints only", expected="a config.json in it", found="none", where=str(target)
        )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ShardWriter:
    """Writes tensors into safetensors shards as they come, holding none of them.

    Args:
        folder: Where shards go.
        shard_bytes: Size at which a shard is closed.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = shard_bytes
        self._header: dict[str, Any] = {}
        self._header_bytes = 0
        self._offset = 0
        self._shards: list[dict[str, int]] = []
        self._dtypes: set[str] = set()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes written so far, sorted."""
        return tuple(sorted(self._dtypes))

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor under a name not used before."""
        if name in self._header or any(name in shard for shard in self._shards):
            raise ValueError(f"{name} is written twice")
        self._dtypes.add(str(tensor.dtype).removeprefix("torch."))
        size = tensor.numel() * tensor.element_size()
        room = len(json.dumps({name: _entry(tensor, SHARD_BYTES)}))
        full = self._offset + size > self._limit or self._header_bytes + room > HEADER_ROOM - _LENGTH_BYTES
        # Readers map tensors where they lie, so each starts at a multiple of its item's size; gaps are not allowed.
        if self._header and (full or self._offset % tensor.element_size()):
            self._close_shard()
        path = self._folder / _part(len(self._shards))
        if not self._header:
            path.write_bytes(b" " * HEADER_ROOM)
            self._header_bytes = len(json.dumps(_METADATA))
        with path.open("ab") as file:
            file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        self._header[name] = _entry(tensor, self._offset)
        self._header_bytes += room
        self._offset += size

    def finish(self) -> None:
        """Close the last shard, give the shards their names and write the index."""
        self._close_shard()
        total = len(self._shards)
        if total == 1:
            os.replace(self._folder / _part(0), self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(self._shards):
            name = f"model-{number + 1:05d}-of-{total:05d}.safetensors"
            os.replace(self._folder / _part(number), self._folder / name)
            weight_map.update(dict.fromkeys(shard, name))
        size = sum(sum(shard.values()) for shard in self._shards)
        write_json(self._folder / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": weight_map})

    def _close_shard(self) -> None:
        if not self._header:
            return
        text = json.dumps({**_METADATA, **self._header}, separators=(",", ":")).encode()
        with (self._folder / _part(len(self._shards))).open("r+b") as file:
            file.write((HEADER_ROOM - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little") + text)
        spans = {name: entry["data_offsets"] for name, entry in self._header.items()}
        self._shards.append({name: end - start for name, (start, end) in spans.items()})
        self._header, self._offset = {}, 0


_METADATA = {"__metadata__": {"format": "pt"}}


def _entry(tensor: Tensor, start: int) -> dict[str, Any]:
    """Header entry of a tensor whose data begins at `start`."""
    end = start + tensor.numel() * tensor.element_size()
    return {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}


def _part(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON with sorted keys and a final newline."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
