"""The source's side of an evaluation, computed once for a text and kept on disk by digest.

Kept are the states that the output head reads, (N, T, D), instead of the logits, (N, T, V): the head is one
matrix product away and V is up to a hundred times D.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mla_convert.cache_dir import cache_root, fill_once
from mla_convert.convert.checkpoint import EMBEDDING, TIED_HEAD, SourceCheckpoint
from mla_convert.convert.receipts import SourceDigests
from mla_convert.errors import CheckFailed
from mla_convert.eval.cache_bytes import CacheMeasurement, measure_cache
from mla_convert.eval.loading import hidden_states, load_model, plain_head
from mla_convert.eval.text import EvalWindows
from mla_convert.manifests.digest import combined_digest, sha256_json
from mla_convert.progress import track

# Part of the key: raised whenever what is stored changes its meaning.
STATES_VERSION = 1
STATES_FILE = "states.safetensors"
CACHE_FILE = "cache.json"


@dataclass(frozen=True)
class SourceStates:
    """What the source makes of a text.

    Attributes:
        folder: Where the states are.
        digest: Key of the source, the tokens and the versions that computed them.
        reused: Whether they were found instead of computed.
        head: (V, D) float32 output head.
        cache: What the source's cache holds.
    """

    folder: Path
    digest: str
    reused: bool
    head: Tensor
    cache: CacheMeasurement

    def window(self, index: int) -> Tensor:
        """(T, D) float32 states of one window."""
        with safe_open(self.folder / STATES_FILE, framework="pt") as file:
            states: Tensor = file.get_slice("states")[index]
        return states


def source_states(source: SourceCheckpoint, digests: SourceDigests, windows: EvalWindows) -> SourceStates:
    """Run the source over the windows, or find the same run on disk.

    Args:
        source: The opened source.
        digests: Of its files; part of the key.
        windows: The tokens.

    Raises:
        InputRefused: If transformers cannot load the source, or its head is more than a matrix product.
        CheckFailed: If the source computes NaN or infinity.
    """
    digest = sha256_json(
        {
            "version": STATES_VERSION,
            "files": combined_digest(digests.files),
            "config": digests.config,
            "tokens": windows.ids_digest,
            "dtype": "float32",
            "torch": metadata.version("torch"),
            "transformers": metadata.version("transformers"),
        }
    )
    folder = cache_root() / "source-hidden" / digest.removeprefix("sha256:")
    reused = folder.is_dir()
    if not reused:
        _compute(source, windows, folder)
    return SourceStates(
        folder=folder,
        digest=digest,
        reused=reused,
        head=source.tensor(EMBEDDING if source.tied else TIED_HEAD).float(),
        cache=CacheMeasurement.from_json(json.loads((folder / CACHE_FILE).read_text(encoding="utf-8"))),
    )


def _compute(source: SourceCheckpoint, windows: EvalWindows, folder: Path) -> None:
    model = load_model(source.location.folder)
    plain_head(model, windows.ids[0])
    states = [hidden_states(model, ids) for ids in track(windows.ids, "running the source", unit="window")]
    if not all(bool(torch.isfinite(window).all()) for window in states):
        raise CheckFailed(
            "the source computes values that are not finite",
            found="NaN or infinity",
            where=str(source.location.folder),
        )
    measured = measure_cache(model, source.attention_dtype)
    with fill_once(folder) as working:
        save_file({"states": torch.stack(states)}, working / STATES_FILE)
        (working / CACHE_FILE).write_text(json.dumps(measured.to_json(), indent=2) + "\n", encoding="utf-8")
