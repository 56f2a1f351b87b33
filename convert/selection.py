"""The rotary slots of every layer, from a plan and what calibration has measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_convert.convert.attention_sample import AttentionSample
from mla_convert.convert.calibrate import StatisticsStore
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.detuning import detuning_factor
from mla_convert.convert.greedy_pairs import greedy_scores
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.rope_rows import rotary_keys, unrotated_keys
from mla_convert.convert.rope_select import (
    RopeSlots,
    SlotGrid,
    allocate_components,
    allocate_heads,
    best_heads,
    component_slots,
    geometric_grid,
    head_slots,
    high_pairs,
    low_pairs,
    mean_slots,
    pair_grid,
    rotary_components,
    two_norm_scores,
    uniform_pairs,
)
from mla_convert.convert.rorope import fold_errors, rorope_slots
from mla_convert.convert.score_error import project_pairs
from mla_convert.convert.statistics import LayerStatistics, project
from mla_convert.convert.weights import LayerWeights
from mla_convert.mla.rope import from_pairs


@dataclass(frozen=True)
class Measured:
    """What calibration measured.

    Attributes:
        store: Statistics of all layers.
        sample: Attention inputs of some windows, None where nothing asks for them.
    """

    store: StatisticsStore
    sample: AttentionSample | None

    def inputs(self, layer: int) -> Tensor:
        """(N, T, D) attention inputs of one layer."""
        if self.sample is None:
            raise ValueError("this plan needs a sample of attention inputs")
        return self.sample.load(layer)


@dataclass(frozen=True)
class Selection:
    """One frequency list for the model and how each layer fills it.

    Attributes:
        plan: What was decided.
        source: The source.
        measured: None where the plan needs no calibration.
        grid: Pairs and frequencies of the slots, the same in every layer.
        fold: FreqFold of `rorope`, else None.
        scores: (G, P) of each layer, for policies that rank the pairs of each key head; else empty.
    """

    plan: ConversionPlan
    source: SourceCheckpoint
    measured: Measured | None
    grid: SlotGrid
    fold: int | None = None
    scores: tuple[Tensor, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Slots per source pair."""
        return tuple(self.grid.pairs.count(pair) for pair in range(self.source.shape.pairs))

    def slots(self, layer: int, weights: LayerWeights) -> RopeSlots:
        """The slots of one layer.

        Args:
            layer: Index.
            weights: That layer's.
        """
        shape, frequencies, policy = self.source.shape, self.source.rope.frequencies, self.plan.rope_policy
        if policy == "optimal":
            components = rotary_components(_needed(self.measured).store.load(layer))
            slots = component_slots(components, self.counts, self.grid.frequencies)
            return self._tuned(slots, layer, weights)
        if self.scores:
            return head_slots(shape, best_heads(self.scores[layer], self.counts), frequencies)
        if policy == "mean":
            return mean_slots(shape, len(self.grid.pairs), frequencies)
        if self.fold is not None:
            moments = _needed(self.measured).store.load(layer).input
            return rorope_slots(weights, moments, frequencies, len(self.grid.pairs), self.fold)
        every = tuple(range(shape.num_kv_heads))
        return head_slots(shape, tuple(every if count else () for count in self.counts), frequencies)

    def _tuned(self, slots: RopeSlots, layer: int, weights: LayerWeights) -> RopeSlots:
        """The measured constant before slots that turn at another frequency than their pair's."""
        own = self.source.rope.frequencies[list(self.grid.pairs)]
        if self.plan.gamma != "measured" or torch.allclose(own, self.grid.frequencies, rtol=1e-9, atol=0):
            return slots
        inputs = _needed(self.measured).inputs(layer)
        factor = detuning_factor(weights, inputs, self.source.rope.frequencies, self.grid.pairs, self.grid.frequencies)
        return replace(slots, query_factor=factor)

    def balance(self, layer: int, weights: LayerWeights, slots: RopeSlots) -> float:
        """`α` of the plan's balance for one layer."""
        if self.plan.balance == "none":
            return 1.0
        return key_value_balance(weights, slots, _needed(self.measured).inputs(layer))


def key_value_balance(weights: LayerWeights, slots: RopeSlots, inputs: Tensor) -> float:
    """TransMLA's `α = E_t‖K_nope x_t‖ / E_t‖V x_t‖` (arXiv 2502.07864, section 4.3, equation 20).

    Read as a ratio of norms, which makes them equal as the section asks; one of squared norms would not. The released
    code takes the mean over channels of each channel's norm over tokens instead.

    Args:
        weights: Source layer.
        slots: Rotary slots; what they leave of the keys is `K_nope`.
        inputs: (N, T, D) attention inputs.
    """
    tokens = inputs.flatten(0, 1).double()  # (N·T, D)
    keys = project_pairs(weights.k, weights.k_bias, tokens)  # (G, P, N·T)
    content = from_pairs(unrotated_keys(slots, keys, rotary_keys(slots, keys)))  # (G, d, N·T)
    values = project(weights.v, weights.v_bias, tokens)  # (G, N·T, d)
    key_norm = content.square().sum((0, 1)).sqrt().mean()
    value_norm = values.square().sum((0, 2)).sqrt().mean()
    return float(key_norm / value_norm) if float(key_norm) > 0 and float(value_norm) > 0 else 1.0


def needs_sample(plan: ConversionPlan) -> bool:
    """Whether a plan asks for more than moments."""
    detuned = plan.rope_stride < 1 and plan.gamma == "measured"
    return plan.rope_policy == "greedy" or plan.freqfold == "auto" or plan.balance != "none" or detuned


def select(plan: ConversionPlan, source: SourceCheckpoint, measured: Measured | None) -> Selection:
    """Choose the model's frequency list.

    A stock checkpoint has one list, so layers vote with their share of what not rotating would lose.
    """
    shape, frequencies = source.shape, source.rope.frequencies
    if plan.rope_policy == "optimal" and plan.profile == "engine":
        # Stock rope holds a geometric set; unless asked otherwise the fastest pairs, one component each. A stride
        # above one lost more wherever it was measured (docs/fidelity.md).
        grid = geometric_grid(source.rope.theta, shape.head_dim, plan.rope_slots, plan.rope_stride)
        return Selection(plan, source, measured, _snapped(grid, frequencies))
    if plan.rope_policy == "rorope":
        stride = shape.pairs // plan.rope_slots
        grid = pair_grid(tuple(range(0, shape.pairs, stride)), frequencies)
        fold = choose_fold(plan, source, _needed(measured)) if plan.freqfold == "auto" else plan.freqfold
        return Selection(plan, source, measured, grid, fold)
    scores: tuple[Tensor, ...] = ()
    if plan.rope_policy in SCORES:
        score, needed = SCORES[plan.rope_policy], _needed(measured)
        scores = tuple(score(source, needed, layer) for layer in range(source.num_layers))
    counts = _counts(plan, source, measured, scores)
    pairs = tuple(pair for pair, count in enumerate(counts) for _ in range(count))
    return Selection(plan, source, measured, pair_grid(pairs, frequencies), scores=scores)


def _snapped(grid: SlotGrid, frequencies: Tensor) -> SlotGrid:
    """The source's own number wherever a slot turns at its pair's frequency, free of the rounding of a power."""
    own = frequencies[list(grid.pairs)]
    return replace(grid, frequencies=torch.where((grid.frequencies / own - 1).abs() < 1e-12, own, grid.frequencies))


def _counts(
    plan: ConversionPlan, source: SourceCheckpoint, measured: Measured | None, scores: tuple[Tensor, ...]
) -> tuple[int, ...]:
    """Slots per source pair."""
    shape, per_head = source.shape, plan.rope_slots // source.shape.num_kv_heads
    if plan.rope_policy == "optimal":
        store = _needed(measured).store
        losses = torch.stack([_component_share(store.load(layer)) for layer in range(source.num_layers)])
        return allocate_components(losses, plan.rope_slots)
    if scores:
        return allocate_heads(torch.stack(scores), per_head)
    if plan.rope_policy == "mean":
        return _as_counts(low_pairs(shape.pairs, plan.rope_slots), shape.pairs)
    chosen = {"high": high_pairs, "low": low_pairs, "uniform": uniform_pairs}[plan.rope_policy](shape.pairs, per_head)
    return tuple(shape.num_kv_heads * count for count in _as_counts(chosen, shape.pairs))


def choose_fold(plan: ConversionPlan, source: SourceCheckpoint, measured: Measured) -> int:
    """The FreqFold with the smallest mean absolute score error over all layers, on calibration text.

    Of equal ones the smallest.
    """
    totals: dict[int, float] = {}
    for layer in range(source.num_layers):
        weights, moments = source.layer_weights(layer), measured.store.load(layer).input
        errors = fold_errors(weights, moments, measured.inputs(layer), source.rope.frequencies, plan.rope_slots)
        totals = {fold: totals.get(fold, 0.0) + error for fold, error in errors.items()}
    return min(sorted(totals), key=totals.__getitem__)


def _norm_scores(_source: SourceCheckpoint, measured: Measured, layer: int) -> Tensor:
    return two_norm_scores(measured.store.load(layer))


def _greedy_scores(source: SourceCheckpoint, measured: Measured, layer: int) -> Tensor:
    return greedy_scores(source.layer_weights(layer), measured.inputs(layer), source.rope.frequencies)


# Policies that rank the pairs of each key head: (G, P) scores of one layer.
SCORES: dict[str, Callable[[SourceCheckpoint, Measured, int], Tensor]] = {
    "2-norm": _norm_scores,
    "greedy": _greedy_scores,
}


def _needed(measured: Measured | None) -> Measured:
    if measured is None:
        raise ValueError("this rope policy needs calibration statistics")
    return measured


def _component_share(statistics: LayerStatistics) -> Tensor:
    loss = rotary_components(statistics).loss  # (P, G)
    return loss / loss.sum().clamp(min=torch.finfo(loss.dtype).tiny)


def _as_counts(pairs: tuple[int, ...], source_pairs: int) -> tuple[int, ...]:
    return tuple(1 if pair in pairs else 0 for pair in range(source_pairs))
