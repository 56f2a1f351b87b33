"""The rotary slots of every layer, from a plan and the calibration statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.convert.calibrate import StatisticsStore
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.rope_select import (
    RopeSlots,
    allocate_components,
    allocate_heads,
    best_heads,
    component_slots,
    head_slots,
    high_pairs,
    low_pairs,
    rotary_components,
    two_norm_scores,
    uniform_pairs,
)
from mla_convert.convert.statistics import LayerStatistics
from mla_convert.convert.weights import AttentionShape


@dataclass(frozen=True)
class Selection:
    """One frequency list for the model and how each layer fills it.

    Attributes:
        policy: Rope policy.
        counts: Slots per pair.
        shape: Source sizes.
    """

    policy: str
    counts: tuple[int, ...]
    shape: AttentionShape

    @property
    def pairs(self) -> tuple[int, ...]:
        """Source pair of each slot; the same in every layer."""
        return tuple(pair for pair, count in enumerate(self.counts) for _ in range(count))

    def slots(self, statistics: LayerStatistics | None) -> RopeSlots:
        """The slots of one layer."""
        if self.policy == "optimal":
            return component_slots(rotary_components(_needed(statistics)), self.counts)
        if self.policy == "2-norm":
            return head_slots(self.shape, best_heads(two_norm_scores(_needed(statistics)), self.counts))
        every = tuple(range(self.shape.num_kv_heads))
        return head_slots(self.shape, tuple(every if count else () for count in self.counts))


def _needed(statistics: LayerStatistics | None) -> LayerStatistics:
    if statistics is None:
        raise ValueError("this rope policy needs calibration statistics")
    return statistics


def select(plan: ConversionPlan, source: SourceCheckpoint, store: StatisticsStore | None) -> Selection:
    """Choose the model's frequency list.

    A stock checkpoint has one list, so layers vote with their share of what not rotating would lose.
    """
    shape = source.shape
    per_head = plan.rope_slots // shape.num_kv_heads
    if plan.rope_policy == "optimal" and plan.profile == "engine":
        # Stock rope holds one component each of pairs 0, s, 2s, …; a stride above one lost more wherever it was
        # measured (docs/fidelity.md), so the fastest pairs it is.
        return Selection("optimal", _as_counts(high_pairs(shape.pairs, plan.rope_slots), shape), shape)
    if plan.rope_policy == "optimal":
        losses = torch.stack([_component_share(_load(store, layer)) for layer in range(source.num_layers)])
        return Selection("optimal", allocate_components(losses, plan.rope_slots), shape)
    if plan.rope_policy == "2-norm":
        scores = torch.stack([two_norm_scores(_load(store, layer)) for layer in range(source.num_layers)])
        return Selection("2-norm", allocate_heads(scores, per_head), shape)
    chosen = {"high": high_pairs, "low": low_pairs, "uniform": uniform_pairs}[plan.rope_policy](shape.pairs, per_head)
    counts = tuple(shape.num_kv_heads * count for count in _as_counts(chosen, shape))
    return Selection(plan.rope_policy, counts, shape)


def _load(store: StatisticsStore | None, layer: int) -> LayerStatistics:
    if store is None:
        raise ValueError("this rope policy needs calibration statistics")
    return store.load(layer)


def _component_share(statistics: LayerStatistics) -> Tensor:
    loss = rotary_components(statistics).loss  # (P, G)
    return loss / loss.sum().clamp(min=torch.finfo(loss.dtype).tiny)


def _as_counts(pairs: tuple[int, ...], shape: AttentionShape) -> tuple[int, ...]:
    return tuple(1 if pair in pairs else 0 for pair in range(shape.pairs))
