"""Everything outside of attention is the source's: each tensor must be a copy, to the last bit of its dtype."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from mla_convert.convert.checkpoint import EMBEDDING, TIED_HEAD, SourceCheckpoint
from mla_convert.convert.target import STREAM_WRITERS
from mla_convert.convert.tensor_files import row_blocks
from mla_convert.eval.ladder.target_layers import TargetLayers
from mla_convert.manifests.evaluation.ladder import Finding, Stage
from mla_convert.progress import track

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def copy_findings(source: SourceCheckpoint, target: TargetLayers) -> Iterator[Finding]:
    """Tensors of the written folder that are not the source's, scaled as the manifest says and rounded once.

    Args:
        source: The source.
        target: The conversion.
    """
    files = target.written.files
    for name in track(sorted(files.infos), "copied tensors", unit="tensor"):
        if ".self_attn." in name:
            continue
        origin = EMBEDDING if name == TIED_HEAD and source.tied else name
        scaled = name == EMBEDDING or name.endswith(STREAM_WRITERS)
        error = _difference(source.tensor(origin), files.read(name), target.residual_scale if scaled else 1.0)
        if error is not None:
            found = _LAYER.match(name)
            stage: Stage = "logits" if found is None else "rest of the layer"
            what = f"{name} is not the source's"
            layer = None if found is None else int(found[1])
            yield Finding(stage=stage, layer=layer, what=what, measured=error, allowed=0.0)


def _difference(source: torch.Tensor, written: torch.Tensor, scale: float) -> float | None:
    """None for a copy; else the relative error, or 1 where something is not finite."""
    if source.shape != written.shape:
        return 1.0
    error, size, equal = 0.0, 0.0, True
    for own, copy in zip(row_blocks(source), row_blocks(written), strict=True):
        expected = (own if scale == 1.0 else own.double() * scale).to(copy.dtype)
        equal = equal and torch.equal(expected, copy)
        error += float((copy.double() - expected.double()).square().sum())
        size += float(expected.double().square().sum())
    if equal:
        return None
    relative = (error / size) ** 0.5 if size > 0 else error**0.5
    return relative if relative < float("inf") else 1.0
