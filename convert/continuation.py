"""More to fit to than the user's text: the source goes on with its calibration windows.

A few thousand tokens say too little about millions of weights (docs/fidelity.md). What the source writes after the
opening of a window is of the same kind of text, costs no data, and its answers are known as they are for any text
(the idea of LLM-QAT, arXiv 2305.17888, section 3.1, with openings from the calibration text).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_convert.cache_dir import cache_root, fill_once
from mla_convert.convert.source_writer import SourceWriter
from mla_convert.manifests.digest import sha256_json
from mla_convert.manifests.refinement import ContinuationRecord

# The source's whole distribution: a cut tail would never be fitted to.
TEMPERATURE, TOP_P = 1.0, 1.0
# Openings are this share of a window: enough to set the subject.
OPENING_SHARE = 1 / 8
BATCH = 40
FILE, NAME = "continuations.safetensors", "ids"


@dataclass(frozen=True)
class Continuations:
    """What the source wrote.

    Attributes:
        ids: (M, T) int64 windows, opening included.
        record: For the manifest.
    """

    ids: Tensor
    record: ContinuationRecord


def continue_windows(
    folder: Path, key: str, windows: Tensor, openings: Sequence[int], tokens: int, seed: int
) -> Continuations:
    """Let the source go on with windows of its calibration, or find what it wrote before.

    Args:
        folder: The source's files.
        key: Digest of the source and of the windows.
        windows: (N, T) int64.
        openings: Numbers of the windows that openings may be taken from; those that fits are judged by are not
            among them.
        tokens: How many to write, openings included: rounded up to whole windows.
        seed: Of the places of the openings and of the draws.
    """
    length = windows.shape[1]
    opening, count = max(1, int(length * OPENING_SHARE)), math.ceil(tokens / length)
    versions = [metadata.version(name) for name in ("torch", "transformers")]
    digest = sha256_json([key, list(openings), opening, count, seed, TEMPERATURE, TOP_P, BATCH, versions])
    place = cache_root() / "continuations" / digest.removeprefix("sha256:")
    if not (place / FILE).is_file():
        with fill_once(place) as working:
            written = _write(folder, _draw_openings(windows[list(openings)], opening, count, seed), length, seed)
            save_file({NAME: written}, working / FILE)
    ids = load_file(place / FILE)[NAME]
    record = ContinuationRecord(
        windows=count,
        opening_tokens=opening,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        sha256=sha256_json(ids.tolist()).removeprefix("sha256:"),
    )
    return Continuations(ids, record)


def _draw_openings(windows: Tensor, opening: int, count: int, seed: int) -> Tensor:
    """(count, opening): pieces from anywhere in the windows, each window in turn."""
    generator = torch.Generator().manual_seed(seed)
    turns = math.ceil(count / windows.shape[0])
    order = torch.cat([torch.randperm(windows.shape[0], generator=generator) for _ in range(turns)])[:count]
    starts = torch.randint(windows.shape[1] - opening + 1, (count,), generator=generator)
    return torch.stack(
        [
            windows[window, start : start + opening]
            for window, start in zip(order.tolist(), starts.tolist(), strict=True)
        ]
    )


def _write(folder: Path, openings: Tensor, length: int, seed: int) -> Tensor:
    """(M, opening) -> (M, length)."""
    source = SourceWriter(folder)
    written: list[Tensor] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for batch in openings.split(BATCH):
            done = sum(part.shape[0] for part in written)
            label = f"the source writes on, {done} of {openings.shape[0]} windows"
            rows = source.extend(
                batch.tolist(), length, temperature=TEMPERATURE, top_p=TOP_P, may_end=False, label=label
            )
            written.append(rows)
    return torch.cat(written)
