"""The whole ladder of one conversion: its files layer by layer, then the running model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mla_convert.eval.ladder.copies import copy_findings
from mla_convert.eval.ladder.drift import measure_drift
from mla_convert.eval.ladder.findings import drift_findings, frame_findings, layer_findings, live_findings
from mla_convert.eval.ladder.layers import Ladder
from mla_convert.eval.ladder.live import LiveRun, run_live
from mla_convert.eval.ladder.rows_check import LiveVerdict, check_live_layer
from mla_convert.eval.ladder.target_layers import TargetLayers
from mla_convert.eval.loading import load_model
from mla_convert.eval.serving import Served, served
from mla_convert.eval.source_states import SourceStates, source_states
from mla_convert.eval.suite_context import SuiteContext
from mla_convert.manifests.evaluation.ladder import CacheRows, Drift, Finding, LadderSection
from mla_convert.mla.map_error import DISTANCES
from mla_convert.progress import track


@dataclass(frozen=True)
class LadderSizes:
    """How much goes through the ladder.

    Attributes:
        windows: Windows through every layer.
        length: Tokens of each; scores are (heads, length, length) in float64.
        prefill: Tokens before the first appended one.
        steps: Appended tokens.
    """

    windows: int
    length: int
    prefill: int
    steps: int


SIZES = {"quick": LadderSizes(2, 256, 64, 256), "full": LadderSizes(8, 512, 64, 256)}


def measure_ladder(context: SuiteContext) -> LadderSection:
    """Climb the ladder.

    Raises:
        CheckFailed: For activations that are not finite.
        InputRefused: For a target that cannot be loaded.
    """
    sizes, windows = SIZES[context.suite], context.prepared.windows
    ids = windows.ids[: sizes.windows, : sizes.length]
    target = TargetLayers.open(context.target, context.manifest)
    dtype = context.manifest.method.output_dtype
    run = Ladder(context.prepared.source, target, ids).run()
    findings = list(copy_findings(context.prepared.source, target))
    foreign = {item.layer for item in findings}
    lossless = context.manifest.reload_check.kind == "lossless-vs-source"
    for layer, recorded in zip(run.layers, context.manifest.layers, strict=True):
        copied = layer.line.index not in foreign
        findings += layer_findings(layer, recorded, dtype, copied=copied, lossless=lossless)
    if None not in foreign:
        findings += frame_findings(run.embedding_error, run.logit_error, dtype)
    states = source_states(context.prepared.source, context.prepared.digests, windows)
    model = load_model(context.target)
    with served(model, context.prepared.options.backend) as running:
        live = measure_live(running, target, states, _live_ids(context, sizes), sizes.prefill)
    return LadderSection(
        windows=len(ids),
        window_length=ids.shape[1],
        distances=DISTANCES,
        layers=tuple(layer.line for layer in run.layers),
        cache_rows=live.rows,
        drift=live.drift,
        findings=(*findings, *live.findings),
    )


@dataclass(frozen=True)
class LiveFindings:
    """What the running model showed."""

    rows: tuple[CacheRows, ...]
    drift: Drift
    findings: tuple[Finding, ...]


def measure_live(
    running: Served, target: TargetLayers, states: SourceStates, ids: torch.Tensor, prefill: int
) -> LiveFindings:
    """Decode step by step and hold rows, outputs and logits against the reference.

    Args:
        running: The converted model as it is served.
        target: Its files.
        states: The source's states; those of its first window belong to `ids`.
        ids: (T,) the beginning of that window.
        prefill: Tokens of the first pass; fewer where the window is short.
    """
    run = run_live(running, ids, min(prefill, max(1, len(ids) // 2)))
    verdicts = list(_verdicts(run, target))
    drift = measure_drift(running, run, states.window(0)[: len(ids)], states.head)
    findings = [finding for index, verdict in enumerate(verdicts) for finding in live_findings(index, verdict)]
    rows = tuple(verdict.rows for verdict in verdicts if verdict.rows is not None)
    return LiveFindings(rows, drift, (*findings, *drift_findings(drift)))


def _verdicts(run: LiveRun, target: TargetLayers) -> Iterator[LiveVerdict]:
    for index in track(range(len(run.layers)), "cache rows"):
        yield check_live_layer(index, run, target.factors(index))


def _live_ids(context: SuiteContext, sizes: LadderSizes) -> torch.Tensor:
    return context.prepared.windows.ids[0, : sizes.prefill + sizes.steps]
