"""Which of what the ladder measured is a fault, and no loss that the conversion was expected to make.

A lossy conversion may be as far from its source as its widths make it. What it may not do is differ from what its own
manifest recorded when it was written, or run as something else than what its files say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mla_convert.convert.reload_child import relative
from mla_convert.eval.ladder.layers import LayerFindings
from mla_convert.eval.ladder.rows_check import LIVE_TOLERANCE, LiveVerdict
from mla_convert.manifests.evaluation.ladder import Drift, Finding, Stage
from mla_convert.manifests.layers import LayerReceipt

# What is copied from the source, computed with: rounding of the stored dtype, with room for what an MLP makes of it.
STORED_SLACK = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
# Projections of the maps, which show a change of any direction as large as it is: rounding of each factor once.
PROBE_SLACK = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
# transformers' float32 classes against float64 algebra on the same stored numbers.
CLASS_TOLERANCE = 1e-3
# The factor of a neutralised norm is one number: half the square of the latent's share, at most 2^-10.
NORM_SPREAD = 1e-3
STEP_TOLERANCE = 1e-3


def layer_findings(
    found: LayerFindings, recorded: LayerReceipt, dtype: str, *, copied: bool, lossless: bool
) -> Iterator[Finding]:
    """Faults in the files of one layer.

    Args:
        found: What was measured.
        recorded: What the manifest says of the layer.
        dtype: Of the stored attention weights.
        copied: Whether its norms and MLP are the source's to the last bit.
        lossless: Whether the conversion says that it lost nothing.
    """
    slack, index = STORED_SLACK[dtype], found.line.index
    if copied and not found.line.rest_error <= slack:
        what = "norms and MLP are the source's but do not compute what the source's do"
        yield Finding(stage="rest of the layer", layer=index, what=what, measured=found.line.rest_error, allowed=slack)
    if not found.class_error <= CLASS_TOLERANCE:
        what = "transformers computes something else from these files than the manifest's identity says"
        yield Finding(stage="layer output", layer=index, what=what, measured=found.class_error, allowed=CLASS_TOLERANCE)
    if lossless and not max(vars(found.maps).values()) <= slack:
        what = "a lossless conversion whose maps are not the source's"
        worst = max(vars(found.maps).values())
        yield Finding(stage="layer output", layer=index, what=what, measured=worst, allowed=slack)
    if not found.spread <= NORM_SPREAD:
        what = "the latent norm is active: its factor differs from token to token"
        yield Finding(stage="latent row", layer=index, what=what, measured=found.spread, allowed=NORM_SPREAD)
    else:
        # Behind an active norm there is no one map to compare.
        yield from _map_findings(found, recorded, dtype)


def _map_findings(found: LayerFindings, recorded: LayerReceipt, dtype: str) -> Iterator[Finding]:
    probes, slack = found.probes, PROBE_SLACK[dtype]
    errors: dict[Stage, float] = {
        "content score": _apart(probes.content, recorded.written_content_probes),
        "position score": _apart(probes.position, recorded.written_position_probes),
        "value map": _apart(probes.value, recorded.written_value_probes),
    }
    moved = {stage: error for stage, error in errors.items() if not error <= slack}
    # A rotary row that is wrong moves the mean over its turns a little too: the score's worse part is the one at fault.
    if {"content score", "position score"} <= moved.keys():
        parts: tuple[Stage, Stage] = ("content score", "position score")
        del moved[min(parts, key=lambda stage: moved[stage])]
    for stage, error in moved.items():
        what = "the map is not the one that was written: its projections differ"
        yield Finding(stage=stage, layer=found.line.index, what=what, measured=error, allowed=slack)


def _apart(found: Tensor, recorded: Sequence[float]) -> float:
    """Relative distance of two sets of projections; 1 where they are of another kind or not finite."""
    expected = torch.tensor(recorded, dtype=torch.float64)
    if expected.shape != found.shape or not bool(torch.isfinite(found).all()):
        return 1.0
    return relative(found, expected)


def live_findings(index: int, verdict: LiveVerdict) -> Iterator[Finding]:
    """Faults of the running model in one layer."""
    rows = verdict.rows
    if rows is not None and rows.width != rows.expected_width:
        what = f"rows of {rows.width} numbers, {rows.expected_width} expected"
        yield Finding(stage="cache row", layer=index, what=what, measured=rows.width, allowed=rows.expected_width)
    if rows is not None and rows.explanation is not None:
        latent = not rows.latent_error <= LIVE_TOLERANCE
        stage: Stage = "latent row" if latent else "rope row"
        error = rows.latent_error if latent else rows.rope_error
        yield Finding(stage=stage, layer=index, what=rows.explanation, measured=error, allowed=LIVE_TOLERANCE)
    elif verdict.output_explanation is not None:
        what = verdict.output_explanation
        stage = "visible set" if what.startswith("the last query sees") else "attention probability"
        yield Finding(stage=stage, layer=index, what=what, measured=verdict.output_error, allowed=LIVE_TOLERANCE)


def drift_findings(drift: Drift) -> Iterator[Finding]:
    """Decoding step by step that is not the model's own one pass."""
    if not drift.one_pass_error <= STEP_TOLERANCE:
        what = "decoding step by step differs from one pass over the same tokens"
        yield Finding(
            stage="repeated decode", layer=None, what=what, measured=drift.one_pass_error, allowed=STEP_TOLERANCE
        )


def frame_findings(embedding: float, logits: float, dtype: str) -> Sequence[Finding]:
    """Faults outside the layers, where the tensors are copies: relative errors on the source's own states."""
    slack = STORED_SLACK[dtype]
    parts = (
        ("the embedding is the source's but does not compute the same", embedding),
        ("last norm and head are the source's but do not compute the same", logits),
    )
    return [
        Finding(stage="logits", layer=None, what=what, measured=error, allowed=slack)
        for what, error in parts
        if not error <= slack
    ]
