"""Calibration of all layers, streamed, with the statistics kept on disk by digest."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_convert.cache_dir import cache_root, fill_once
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.phases import Seconds
from mla_convert.convert.source_model import LayerPass, StreamedSource
from mla_convert.convert.source_reading import check_reading
from mla_convert.convert.states import MEMORY_BUDGET_BYTES
from mla_convert.convert.statistics import LayerStatistics, Moments, combine, measure_layer
from mla_convert.errors import EnvironmentFault
from mla_convert.manifests.digest import sha256_json

# Part of the cache key: raised whenever `measure_layer` measures something else.
STATISTICS_VERSION = 4


@dataclass(frozen=True)
class StatisticsStore:
    """Statistics of all layers, measured on one text or on several together, read one layer at a time.

    Attributes:
        folders: For each text, one safetensors file per layer.
        digest: Key of what they were measured on.
        reused: Whether all of them were found instead of measured.
        forward_seconds: Time of the source's own forward passes, 0 where nothing was measured.
    """

    folders: tuple[Path, ...]
    digest: str
    reused: bool
    forward_seconds: Seconds

    @classmethod
    def joined(cls, stores: Sequence[StatisticsStore]) -> StatisticsStore:
        """Those of several texts as one: as if all had been measured together."""
        if len(stores) == 1:
            return stores[0]
        folders = tuple(folder for store in stores for folder in store.folders)
        digest = sha256_json([store.digest for store in stores])
        forward = sum((store.forward_seconds for store in stores), Seconds())
        return cls(folders, digest, all(store.reused for store in stores), forward)

    def load(self, layer: int) -> LayerStatistics:
        """Statistics of one layer."""
        parts = [_load(folder, layer) for folder in self.folders]
        return parts[0] if len(parts) == 1 else combine(parts)

    def totals(self, layers: int) -> Tensor:
        """What the texts together amount to in each layer.

        Args:
            layers: Number of layers.

        Returns:
            (L, 4): number of tokens, sum of the weights of keys, of values, and of `|x|²` of the attention input.
        """
        rows = [torch.stack([_totals(folder, layer) for folder in self.folders]).sum(0) for layer in range(layers)]
        return torch.stack(rows)


def _load(folder: Path, layer: int) -> LayerStatistics:
    try:
        return _unpack(load_file(folder / _layer_file(layer)))
    except (SafetensorError, KeyError) as error:
        raise _damaged(folder, error) from error


def _totals(folder: Path, layer: int) -> Tensor:
    """(4,) as in `StatisticsStore.totals`, without reading the moments."""
    try:
        with safe_open(folder / _layer_file(layer), framework="pt") as file:
            weight, power = file.get_tensor("weight"), file.get_tensor(INPUT_POWER)
    except (SafetensorError, KeyError) as error:
        raise _damaged(folder, error) from error
    return torch.cat([weight, (weight[0] * power)[None]])


def _damaged(folder: Path, error: Exception) -> EnvironmentFault:
    return EnvironmentFault(
        f"damaged statistics in the cache: {error}", where=str(folder), remedy="Delete that folder."
    )


def _layer_file(layer: int) -> str:
    return f"layer_{layer:04d}.safetensors"


MOMENTS = ("input", "key_input", "value_input")
COMPLEX = ("key_second", "gamma")
# () mean |x|² of the attention input, beside its (D, D) moment so that a summary need not read that.
INPUT_POWER = "input.power"


def _pack(statistics: LayerStatistics) -> dict[str, Tensor]:
    """Complex values with a last axis (real, imaginary): safetensors has no complex128."""
    packed: dict[str, Tensor] = {}
    for field in fields(LayerStatistics):
        value = getattr(statistics, field.name)
        if field.name in MOMENTS:
            packed[f"{field.name}.mean"], packed[f"{field.name}.second"] = value.mean, value.second
        else:
            packed[field.name] = torch.view_as_real(value.resolve_conj()) if field.name in COMPLEX else value
    packed[INPUT_POWER] = statistics.input.second.trace()
    return {name: value.contiguous() for name, value in packed.items()}


def _unpack(stored: dict[str, Tensor]) -> LayerStatistics:
    values: dict[str, Any] = {name: stored[name] for name in stored if "." not in name}
    for name in MOMENTS:
        values[name] = Moments(stored[f"{name}.mean"], stored[f"{name}.second"])
    for name in COMPLEX:
        # safetensors aligns to 8 bytes; torch's vectorised complex128 kernels crash unless it is 16, as a copy is.
        values[name] = torch.view_as_complex(stored[name].clone())
    return LayerStatistics(**values)


def calibrate(
    checkpoint: SourceCheckpoint,
    source_digest: str,
    token_ids: Tensor,
    label: str = "calibrating",
    budget_bytes: int = MEMORY_BUDGET_BYTES,
) -> StatisticsStore:
    """Measure every layer on windows of tokens, or find the same measurement on disk.

    Args:
        checkpoint: The source.
        source_digest: Digest of its weights and configuration; part of the key.
        token_ids: (N, T) int64.
        label: What the work is called in front of its progress.
        budget_bytes: Most bytes of hidden states to hold in memory.

    Raises:
        EnvironmentFault: If the disk has no room for hidden states past the budget.
        CheckFailed: If a layer of the source does not compute what its weights say (see `check_reading`).
    """
    digest = sha256_json(
        {
            "version": STATISTICS_VERSION,
            "source": source_digest,
            "torch": metadata.version("torch"),
            "transformers": metadata.version("transformers"),
            "shape": list(token_ids.shape),
            "tokens": token_ids.flatten().tolist(),
        }
    )
    folder = cache_root() / "statistics" / digest.removeprefix("sha256:")
    if all((folder / _layer_file(layer)).is_file() for layer in range(checkpoint.num_layers)):
        return StatisticsStore((folder,), digest, reused=True, forward_seconds=Seconds())
    shutil.rmtree(folder, ignore_errors=True)  # somebody has tidied up in it
    with fill_once(folder) as working:
        streamed = StreamedSource(checkpoint, budget_bytes)
        for done in streamed.layers(token_ids, label):
            save_file(_pack(_measure(checkpoint, done)), working / _layer_file(done.layer))
    return StatisticsStore((folder,), digest, reused=False, forward_seconds=streamed.forward_seconds)


def _measure(checkpoint: SourceCheckpoint, done: LayerPass) -> LayerStatistics:
    weights, frequencies = checkpoint.layer_weights(done.layer), checkpoint.rope.frequencies

    def inputs() -> Iterator[Tensor]:
        for batch in done.batches:
            if batch.windows.start == 0:
                # One window is enough to see that the family's row describes this checkpoint.
                check_reading(weights, frequencies, batch, windows=1)
            yield from batch.attention_input

    return measure_layer(weights, inputs(), frequencies)
