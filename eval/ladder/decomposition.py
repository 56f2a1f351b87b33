"""Where the error of a running conversion comes from, each part with the others held fixed (seed 1, 0x0B and 0x0E).

`Δ_total = Δ_conversion + Δ_absorption + Δ_numeric + Δ_selection + Δ_runtime` is a diagnosis, not a claim that errors
add up. All parts are errors of the attention's output in the layer where the part is largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.convert.reload_child import relative
from mla_convert.decode.abi import DecodeCall
from mla_convert.decode.reference import ReferenceBackend
from mla_convert.decode.rows import RowFormat, encode
from mla_convert.eval.ladder.live import LiveRun, run_live
from mla_convert.eval.ladder.scores import output_of_latents, source_window
from mla_convert.eval.ladder.target_layers import TargetLayers
from mla_convert.eval.loading import load_model
from mla_convert.eval.serving import served
from mla_convert.eval.suite_context import SuiteContext
from mla_convert.manifests.evaluation.ladder import DecompositionSection, ErrorPart
from mla_convert.mla.attention import (
    LatentRows,
    MLAFactors,
    absorb_query,
    absorbed,
    expanded,
    project_query,
)
from mla_convert.progress import track

PREFILL, STEPS = 48, 16
HELD = {
    "conversion": "both in float64, expanded, every earlier token visible, the same inputs",
    "absorption": "the converted factors in float64, the same rows, every earlier token visible",
    "numeric": "the absorbed float64 reference, every earlier token visible; only the rows' format changes",
    "selection": "the absorbed float64 reference over float64 rows; only which rows are visible changes",
    "runtime": "the rows' format and the visible set; the backend against the float64 reference on its own inputs",
}


@dataclass(frozen=True)
class _Layer:
    """What every part of one layer starts from, float64.

    Attributes:
        factors: Of the conversion.
        inputs: (1, T, D).
        positions: (1, T).
        rows: Of the reference.
        expected: (T, D) the absorbed reference's output.
    """

    factors: MLAFactors
    inputs: Tensor
    positions: Tensor
    rows: LatentRows
    expected: Tensor


@torch.inference_mode()
def measure_decomposition(context: SuiteContext) -> DecompositionSection:
    """Measure each part in every layer, on what the running model gives its layers.

    Raises:
        InputRefused: For a target that cannot be loaded.
    """
    target = TargetLayers.open(context.target, context.manifest)
    ids = context.prepared.windows.ids[0, : PREFILL + STEPS]
    model = load_model(context.target)
    with served(model, context.prepared.options.backend) as running:
        run = run_live(running, ids, min(PREFILL, max(1, len(ids) // 2)))
    del model
    worst: dict[tuple[str, str], float] = {}
    for index in track(range(len(run.layers)), "error by part"):
        for part, error in _parts(context, target, run, index):
            worst[part] = max(error, worst.get(part, 0.0))
    parts = [
        ErrorPart(name=name, variant=variant, error=error, held_fixed=HELD[name])  # type: ignore[arg-type]
        for (name, variant), error in worst.items()
    ]
    return DecompositionSection(tokens=len(ids), parts=tuple(parts))


def _parts(
    context: SuiteContext, target: TargetLayers, run: LiveRun, index: int
) -> Iterator[tuple[tuple[str, str], float]]:
    """Each part's error in one layer, by name and variant."""
    source, factors = context.prepared.source, target.factors(index)
    inputs = run.layers[index].inputs.double()[None]
    positions = torch.arange(inputs.shape[1])[None]
    step = absorbed(factors, inputs, positions)
    layer = _Layer(factors, inputs, positions, step.held, step.output[0])
    own = source_window(source.layer_weights(index), inputs[0], source.rope.frequencies).output
    yield ("conversion", "source to expanded"), relative(layer.expected / target.residual_scale, own)
    yield (
        ("absorption", "expanded to absorbed"),
        relative(layer.expected, expanded(factors, inputs, positions).output[0]),
    )
    for name, form in row_formats(layer.rows).items():
        yield ("numeric", f"{name} rows"), relative(_over_rows(layer, form), layer.expected)
    visible = run.layers[index].rows
    seen = len(layer.expected) if visible is None else len(visible)
    yield ("selection", "dense"), relative(_last(layer, seen), layer.expected[-1])
    yield ("runtime", f"{run.row_dtype} rows"), relative(run.layers[index].outputs, layer.expected)


def row_formats(rows: LatentRows) -> Mapping[str, RowFormat]:
    """Every format that rows of these widths can be kept in."""
    widths = rows.latent.shape[-1], rows.rope.shape[-1]
    formats = {dtype: RowFormat.plain(*widths, dtype) for dtype in ("float32", "bfloat16", "float16")}
    named = RowFormat.flashmla_fp8() if widths == (512, 64) else RowFormat.grouped_fp8(*widths)
    return {**formats, named.name: named}


def _query(layer: _Layer) -> Tensor:
    """(1, T, H, d_c + d_R) absorbed queries."""
    nope, rope = project_query(layer.factors, layer.inputs, layer.positions)
    return torch.cat([absorb_query(nope, layer.factors.w_uk), rope], dim=-1)


def _over_rows(layer: _Layer, form: RowFormat) -> Tensor:
    """(T, D): float64 attention over rows that were stored in a format."""
    stored = encode(form, layer.rows.latent[0].float(), layer.rows.rope[0].float())  # (T, row)
    call = DecodeCall(
        q=_query(layer),
        pool=stored[None],  # one page of T rows
        format=form,
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.tensor([len(stored)], dtype=torch.int32),
        scale=layer.factors.scale,
        causal=True,
    )
    return output_of_latents(layer.factors, ReferenceBackend().run(call).out[0].double())


def _last(layer: _Layer, seen: int) -> Tensor:
    """(D,) output of the last query over as many of the first rows as the running cache holds."""
    query = _query(layer)[0, -1]  # (H, d_c + d_R)
    rows = torch.cat([layer.rows.latent[0], layer.rows.rope[0]], dim=-1)[:seen]  # (seen, d_c + d_R)
    weights = (query @ rows.T * layer.factors.scale).softmax(-1)  # (H, seen)
    return output_of_latents(layer.factors, (weights @ layer.rows.latent[0, :seen])[None])[0]
