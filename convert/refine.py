"""Refinement after the closed form: block reconstruction, then on request a pass end to end; kept by digest."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mla_convert.cache_dir import cache_root, fill_once
from mla_convert.convert.closed_form import ClosedForm
from mla_convert.convert.continuation import Continuations, continue_windows
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.refinable import RefinableAttention
from mla_convert.convert.refine_block import BlockFit, layer_file, load_layer, refine_blocks
from mla_convert.convert.refine_e2e import refine_end_to_end
from mla_convert.convert.refine_fit import FitSettings, FitTrace, FitWindows, split_windows
from mla_convert.convert.selection import Measured
from mla_convert.convert.source_model import StreamedSource
from mla_convert.convert.states import StateStore
from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import sha256_json
from mla_convert.manifests.refinement import FitRecord, RefinementRecord
from mla_convert.mla.weights import MLALayerWeights

# Part of the cache key: raised whenever the same plan would be refined otherwise.
REFINE_VERSION = 4
# Largest Adam step as a share of each tensor's root mean square. Measured on SmolLM2-135M (docs/fidelity.md).
BLOCK_RATE, E2E_RATE = 0.015, 0.002
BLOCK_CHECKS, E2E_CHECKS = 4, 5
TRACE_FILE = "end_to_end.json"


@dataclass(frozen=True)
class Refined:
    """Refined layers on disk.

    Attributes:
        folder: One file for each layer.
        record: What was done, for the manifest.
    """

    folder: Path
    record: RefinementRecord

    def weights(self, layer: int, closed_form: MLALayerWeights) -> MLALayerWeights:
        """One refined layer; `closed_form` gives its sizes and frequencies."""
        attention = RefinableAttention(closed_form)
        load_layer(attention, self.folder / layer_file(layer))
        return attention.to_weights()


def refine(form: ClosedForm, measured: Measured, token_ids: Tensor, budget_bytes: int) -> Refined:
    """Refine every layer of a plan, or find what was refined before.

    A run that was interrupted goes on with the layer it was in; the pass end to end starts anew.

    Args:
        form: The plan's closed form.
        measured: Its calibration.
        token_ids: (N, T) int64 calibration windows: fitted to, but for one in eight that the fit is judged by.
        budget_bytes: Most bytes of hidden states to hold in memory; past it they go to disk.

    Raises:
        InputRefused: For fewer than two windows.
    """
    source, plan = form.source, form.plan
    spec = plan.refine
    assert spec is not None  # the caller refines plans that say so
    if token_ids.shape[0] < 2:
        raise InputRefused(
            "too few calibration windows to refine on",
            expected="at least 2: one to fit to and one to judge by",
            found=str(token_ids.shape[0]),
            remedy="Give more text, more --calibration-tokens or a smaller --calibration-window.",
        )
    own = _continuations(form, measured, token_ids)
    windows = FitWindows(token_ids if own is None else torch.cat([token_ids, own.ids]), token_ids.shape[0])
    streamed = StreamedSource(source, budget_bytes)
    count, length = windows.ids.shape
    states = partial(StateStore, count, length, source.shape.hidden_size, budget_bytes // 2, cache_root())
    # Both kinds begin with the same layers.
    alike = plan.model_copy(update={"refine": spec.model_copy(update={"kind": "block", "e2e_tokens": None})})
    key = [REFINE_VERSION, alike.plan_id, measured.store.digest]
    root = cache_root() / "refined"

    def start(layer: int) -> MLALayerWeights:
        return form.convert(layer, source.layer_weights(layer), measured.store.load(layer)).weights

    blocks = refine_blocks(streamed, start, source.num_layers, windows, block_settings(plan), states, root / _name(key))
    folder, trace = blocks.folder, None
    if spec.kind == "e2e":
        folder = root / _name([*key, spec.e2e_tokens])
        if not (folder / TRACE_FILE).is_file():
            _end_to_end(streamed, start, blocks, windows, plan, states, budget_bytes, folder)
        trace = FitTrace(**json.loads((folder / TRACE_FILE).read_text(encoding="utf-8")))
    return Refined(folder, _record(plan, token_ids, own, blocks, trace))


def block_settings(plan: ConversionPlan) -> FitSettings:
    """Of each layer's own fit."""
    assert plan.refine is not None
    return FitSettings(plan.refine.steps, plan.refine.batch, BLOCK_RATE, BLOCK_CHECKS, plan.seed)


def e2e_settings(plan: ConversionPlan, window: int) -> FitSettings:
    """Of the pass end to end: as many steps as its tokens allow, at least one."""
    assert plan.refine is not None
    assert plan.refine.e2e_tokens is not None
    steps = max(1, plan.refine.e2e_tokens // (plan.refine.batch * window))
    return FitSettings(steps, plan.refine.batch, E2E_RATE, E2E_CHECKS, plan.seed)


def _name(key: Sequence[object]) -> str:
    return sha256_json(list(key)).removeprefix("sha256:")


def _end_to_end(
    streamed: StreamedSource,
    start: Callable[[int], MLALayerWeights],
    blocks: BlockFit,
    windows: FitWindows,
    plan: ConversionPlan,
    states: Callable[[], StateStore],
    budget_bytes: int,
    folder: Path,
) -> None:
    attentions = []
    for layer in range(len(blocks.traces)):
        attention = RefinableAttention(start(layer))
        load_layer(attention, blocks.folder / layer_file(layer))
        attentions.append(attention)
    settings = e2e_settings(plan, windows.ids.shape[1])
    trace = refine_end_to_end(streamed, attentions, windows, settings, states, budget_bytes)
    with fill_once(folder) as working:
        for layer, (attention, before) in enumerate(zip(attentions, blocks.traces, strict=True)):
            noted = {name: str(value) for name, value in asdict(before).items()}
            tensors = {name: value.contiguous() for name, value in attention.state_dict().items()}
            save_file(tensors, working / layer_file(layer), metadata=noted)
        (working / TRACE_FILE).write_text(json.dumps(asdict(trace)), encoding="utf-8")


def _continuations(form: ClosedForm, measured: Measured, token_ids: Tensor) -> Continuations | None:
    """What the source writes on from the windows that layers are fitted to."""
    spec, seed = form.plan.refine, form.plan.seed
    if spec is None or spec.continued_tokens == 0:
        return None
    openings, _ = split_windows(token_ids.shape[0], seed)
    folder = form.source.location.folder
    return continue_windows(folder, measured.store.digest, token_ids, openings, spec.continued_tokens, seed)


def _record(
    plan: ConversionPlan, token_ids: Tensor, own: Continuations | None, blocks: BlockFit, trace: FitTrace | None
) -> RefinementRecord:
    spec = plan.refine
    assert spec is not None
    _, held = split_windows(token_ids.shape[0], plan.seed)
    window = token_ids.shape[1]
    return RefinementRecord(
        kind=spec.kind,
        version=REFINE_VERSION,
        optimizer="Adam, step relative to each tensor's root mean square, cosine",
        block_rate=BLOCK_RATE,
        block_steps=spec.steps,
        batch=spec.batch,
        window=window,
        windows=token_ids.shape[0],
        held_out_windows=held,
        seed=plan.seed,
        continuations=None if own is None else own.record,
        layers=tuple(FitRecord(**asdict(layer)) for layer in blocks.traces),
        e2e_rate=None if trace is None else E2E_RATE,
        e2e_steps=None if trace is None else e2e_settings(plan, window).steps,
        end_to_end=None if trace is None else FitRecord(**asdict(trace)),
    )
