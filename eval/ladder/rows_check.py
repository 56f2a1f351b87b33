"""Are the rows of a live cache, and what is read from them, those of the reference? If not, which fault makes such?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_convert.convert.reload_child import relative
from mla_convert.eval.ladder.live import LayerRecord, LiveRun
from mla_convert.eval.ladder.scores import output_of_latents
from mla_convert.manifests.evaluation.ladder import CacheRows
from mla_convert.mla.attention import (
    LatentRows,
    MLAFactors,
    Rope,
    Step,
    absorb_query,
    absorbed,
    project_query,
    project_rows,
)
from mla_convert.mla.reference import rms_norm

# Rows and outputs of float32 against float64: 1e-6 when right. A row that is another token's is off by about 1.
LIVE_TOLERANCE = 1e-3
SHIFTS = (-2, -1, 1, 2)


@dataclass(frozen=True)
class LiveVerdict:
    """One layer of a live run.

    Attributes:
        rows: For the receipt; None where there are no pages.
        output_error: Of the attention's output over all tokens, relative.
        output_explanation: Which fault would give outputs like those found, None where they are right.
    """

    rows: CacheRows | None
    output_error: float
    output_explanation: str | None


def check_live_layer(index: int, run: LiveRun, factors: MLAFactors) -> LiveVerdict:
    """Judge one layer by what it was given itself, so that a fault is seen where it is and not further down.

    Args:
        index: Of the layer.
        run: The run.
        factors: The layer's factors in float64, from the files.
    """
    record = run.layers[index]
    inputs = record.inputs.double()[None]  # (1, T, D)
    positions = torch.arange(inputs.shape[1])[None]
    step = absorbed(factors, inputs, positions)
    expected = step.held
    error = relative(record.outputs, step.output[0])
    explained = None if error <= LIVE_TOLERANCE else _explain_output(record, factors, inputs, positions, step)
    rows = None if record.rows is None else _check_rows(index, run, record.rows, factors, expected)
    return LiveVerdict(rows, error, explained)


def _check_rows(index: int, run: LiveRun, rows: Tensor, factors: MLAFactors, expected: LatentRows) -> CacheRows:
    width = factors.latent_width
    latent, rope = rows[:, :width].double(), rows[:, width:].double()
    errors = relative(latent, expected.latent[0]), relative(rope, expected.rope[0])
    inputs = run.layers[index].inputs.double()[None]
    explanation = None
    if not errors[0] <= LIVE_TOLERANCE:
        explanation = _explain(latent, latent_faults(factors, inputs, expected.latent[0]), expected.latent[0], run)
    elif not errors[1] <= LIVE_TOLERANCE:
        explanation = _explain(rope, rope_faults(factors, inputs, expected.rope[0]), expected.rope[0], run)
    return CacheRows(
        layer=index,
        tokens=len(rows),
        width=run.row_width,
        expected_width=width + 2 * len(factors.rope.frequencies),
        dtype=run.row_dtype,
        latent_error=errors[0],
        rope_error=errors[1],
        explanation=explanation,
    )


Fault = Callable[[], Tensor]


def latent_faults(factors: MLAFactors, inputs: Tensor, expected: Tensor) -> Mapping[str, Fault]:
    """What latent rows would be under each known fault: (T, d_c).

    Args:
        factors: Of the layer.
        inputs: (1, T, D).
        expected: (T, d_c) the right rows.
    """
    norm = factors.latent_norm

    def unnormed() -> Tensor:
        return project_rows(replace(factors, latent_norm=None), inputs, _zeros(inputs)).latent[0]

    faults: dict[str, Fault] = {"cached before the latent norm": unnormed}
    if norm is not None:
        faults["the latent norm was applied twice"] = lambda: rms_norm(expected, norm.weight, norm.eps)
    return {**faults, **_shifts(expected)}


def rope_faults(factors: MLAFactors, inputs: Tensor, expected: Tensor) -> Mapping[str, Fault]:
    """The same for rotated keys: (T, d_R)."""
    places = torch.arange(inputs.shape[1])[None]

    def turned(positions: Tensor, rope: Rope = factors.rope) -> Fault:
        return lambda: project_rows(replace(factors, rope=rope), inputs, positions).rope[0]

    other = replace(factors.rope, interleaved=not factors.rope.interleaved)
    faults = {f"positions are off by {shift:+d}": turned(places + shift) for shift in SHIFTS}
    return {
        **faults,
        "not rotated": turned(places * 0),
        "rotated twice": turned(places * 2),
        "rotated the wrong way": turned(-places),
        "rotated with the other pairing": turned(places, other),
        **_shifts(expected),
    }


def _shifts(expected: Tensor) -> Mapping[str, Fault]:
    return {f"rows of the token {shift:+d} places away": _rolled(expected, shift) for shift in SHIFTS}


def _rolled(expected: Tensor, shift: int) -> Fault:
    return lambda: expected.roll(-shift, 0)


def _zeros(inputs: Tensor) -> Tensor:
    return torch.zeros(1, inputs.shape[1], dtype=torch.int64)


def _explain(found: Tensor, faults: Mapping[str, Fault], expected: Tensor, run: LiveRun) -> str:
    """The fault whose rows are those found; where none is, from which token on rows are wrong."""
    # The first and last rows of a shifted cache belong to no token of the run.
    inner = slice(max(SHIFTS), -max(SHIFTS)) if len(found) > 4 * max(SHIFTS) else slice(None)
    for name, fault in faults.items():
        if relative(found[inner], fault()[inner]) <= LIVE_TOLERANCE:
            return name
    sizes = expected.norm(dim=-1).clamp(min=float(expected.norm(dim=-1).mean()) * 1e-6)
    wrong = torch.nonzero((found - expected).norm(dim=-1) / sizes > LIVE_TOLERANCE)[:, 0].tolist()
    if wrong and wrong[0] >= run.prefill:
        return f"right for the prefill, wrong from appended token {wrong[0]} on ({len(wrong)} rows)"
    return f"{len(wrong)} of {len(found)} rows differ, the first is token {wrong[0] if wrong else 0}"


def _scores(factors: MLAFactors, inputs: Tensor, positions: Tensor, rows: LatentRows) -> Tensor:
    """(H, T, T) scaled scores of the absorbed form."""
    nope, rope = project_query(factors, inputs, positions)
    query = absorb_query(nope, factors.w_uk)  # (1, T, H, d_c)
    scores = torch.einsum("bqhc,bkc->hqk", query, rows.latent) + torch.einsum("bqhr,bkr->hqk", rope, rows.rope)
    return scores * factors.scale


def _attend(factors: MLAFactors, scores: Tensor, visible: Tensor, rows: LatentRows) -> Tensor:
    """(H, q, T), (q, T) bool -> (q, D)."""
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    latent = torch.einsum("hqk,kc->qhc", weights, rows.latent[0])  # (q, H, d_c)
    return output_of_latents(factors, latent)


def _explain_output(record: LayerRecord, factors: MLAFactors, inputs: Tensor, positions: Tensor, step: Step) -> str:
    """Which keys the last query seems to have seen."""
    rows = step.held
    scores = _scores(factors, inputs, positions, rows)[:, -1:]  # (H, 1, T)
    last, length = record.outputs[-1:].double(), scores.shape[-1]
    newest_first = torch.arange(length).flip(0)
    for seen in range(1, length):
        # What this query sees without the oldest, without the newest, or of the oldest alone.
        windows = {
            f"the last query sees the newest {seen} of {length} tokens": newest_first < seen,
            f"the last query sees the oldest {seen} of {length} tokens": newest_first >= length - seen,
        }
        for what, visible in windows.items():
            if relative(_attend(factors, scores, visible[None], rows), last) <= LIVE_TOLERANCE:
                return what
    worst = int((record.outputs.double() - step.output[0]).norm(dim=-1).argmax())
    return f"outputs over right inputs differ, most at token {worst}"
