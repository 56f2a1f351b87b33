"""Attention inputs of a few calibration windows, layer by layer on disk: what moments cannot answer is asked of them.

Moments do not hold a mean absolute score error, a mean of norms or a distribution of distances. A fixed number of
tokens bounds time, memory and disk whatever the calibration text is.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_convert.cache_dir import cache_root, fill_once
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.source_model import StreamedSource
from mla_convert.errors import EnvironmentFault
from mla_convert.manifests.digest import sha256_json

SAMPLE_TOKENS = 2048


@dataclass(frozen=True)
class AttentionSample:
    """Inputs of every layer's attention, one file per layer.

    Attributes:
        folder: Where they lie.
    """

    folder: Path

    def load(self, layer: int) -> Tensor:
        """(N, T, D) float32 inputs of one layer's attention, after its norm."""
        try:
            return load_file(self.folder / _layer_file(layer))["input"]
        except (SafetensorError, KeyError) as error:
            raise EnvironmentFault(
                f"damaged attention inputs in the cache: {error}", where=str(self.folder), remedy="Delete that folder."
            ) from error


def _layer_file(layer: int) -> str:
    return f"layer_{layer:04d}.safetensors"


def sample_attention(checkpoint: SourceCheckpoint, statistics_digest: str, token_ids: Tensor) -> AttentionSample:
    """Run the source over the first calibration windows and keep its attention inputs, or find them on disk.

    Args:
        checkpoint: The source.
        statistics_digest: Of the statistics measured on these windows; names source, tokens and library versions.
        token_ids: (N, T) int64, in the seeded order of calibration.

    Returns:
        Inputs of as many whole windows as fit `SAMPLE_TOKENS`, at least one.
    """
    chosen = token_ids[: max(1, SAMPLE_TOKENS // token_ids.shape[1])]
    digest = sha256_json({"statistics": statistics_digest, "windows": chosen.shape[0]})
    folder = cache_root() / "attention-inputs" / digest.removeprefix("sha256:")
    if not all((folder / _layer_file(layer)).is_file() for layer in range(checkpoint.num_layers)):
        shutil.rmtree(folder, ignore_errors=True)  # somebody has tidied up in it
        with fill_once(folder) as working:
            for done in StreamedSource(checkpoint).layers(chosen, "sampling attention"):
                inputs = torch.cat([batch.attention_input for batch in done.batches])  # (N, T, D)
                save_file({"input": inputs.contiguous()}, working / _layer_file(done.layer))
    return AttentionSample(folder)
