"""Which rotary components stay rotary: published policies and the optimal one, as pure functions.

A *slot* is one rotary pair of the single shared key row. Slot `s` turns at one frequency and holds
`z_s = Σ_{i,g} A_s[i,g] k_{g,i}`, a complex-linear map over the source pairs and key heads; they are rebuilt as
`k_{g,i} ≈ Σ_s B_s[i,g] z_s`. Maps over the heads of one pair commute with its rotation (math.md 1), so nothing is
approximated beyond what no slot holds; a slot that mixes pairs, or turns at another frequency than its pair's, is an
approximation by design.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.convert.statistics import LayerStatistics
from mla_convert.convert.weights import AttentionShape


@dataclass(frozen=True)
class RopeSlots:
    """The rotary slots of one layer.

    Attributes:
        mixes: Source pairs that each slot combines, ascending.
        frequencies: (m,) float64, radians per position at which each slot turns.
        analysis: (m, P, G) complex128, `A_s`; zero outside the slot's pairs.
        synthesis: (m, P, G) complex128, `B_s`; zero outside the slot's pairs.
        component: Which component each slot holds: an eigenvector's rank, or for policies that place single heads,
            the key head.
        query_factor: (H, m) complex128, the constant `γ` that each query head puts before a slot that turns at
            another frequency than its pair's, or None for one.
    """

    mixes: tuple[tuple[int, ...], ...]
    frequencies: Tensor
    analysis: Tensor
    synthesis: Tensor
    component: tuple[int, ...]
    query_factor: Tensor | None = None

    def blocks(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """(source pairs, slots that combine just them) for each set of pairs: what can be computed apart."""
        found: dict[tuple[int, ...], list[int]] = {}
        for slot, pairs in enumerate(self.mixes):
            found.setdefault(pairs, []).append(slot)
        return tuple((pairs, tuple(slots)) for pairs, slots in found.items())


def single_pair_slots(
    pairs: tuple[int, ...],
    frequencies: Tensor,
    analysis: Tensor,
    synthesis: Tensor,
    component: tuple[int, ...],
    source_pairs: int,
) -> RopeSlots:
    """Slots that each hold a component of one pair.

    Args:
        pairs: Source pair of each slot.
        frequencies: (m,) radians per position.
        analysis: (m, G) complex, over the heads of the slot's pair.
        synthesis: (m, G) complex.
        component: Of each slot.
        source_pairs: `P`.
    """
    slots = list(range(len(pairs)))
    spread = [
        torch.zeros(len(pairs), source_pairs, rows.shape[1], dtype=torch.complex128) for rows in (analysis, synthesis)
    ]
    for target, rows in zip(spread, (analysis, synthesis), strict=True):
        target[slots, list(pairs)] = rows
    return RopeSlots(tuple((pair,) for pair in pairs), frequencies, spread[0], spread[1], component)


@dataclass(frozen=True)
class SlotGrid:
    """The rotary slots that all layers share: a stock checkpoint has one list of frequencies.

    Attributes:
        pairs: Source pair of each slot, the one whose frequency it has or, on a denser grid, is close to.
        frequencies: (m,) float64, radians per position.
        stride: Source pairs from one slot to the next, where the slots lie on `ϑ_j = θ^(-2·stride·j/d)`.
    """

    pairs: tuple[int, ...]
    frequencies: Tensor
    stride: float


def pair_grid(pairs: tuple[int, ...], frequencies: Tensor) -> SlotGrid:
    """Slots at their pairs' own frequencies; `frequencies` (P,) are the source's."""
    return SlotGrid(pairs, frequencies[list(pairs)], float(pairs[1] - pairs[0]) if len(pairs) > 1 else 1.0)


def geometric_grid(theta: float, head_dim: int, count: int, stride: float) -> SlotGrid:
    """`ϑ_j = θ^(-2·stride·j/d)`, what stock `default` rope can hold; strides below one give pairs several slots."""
    steps = torch.arange(count, dtype=torch.float64) * stride
    base = torch.tensor(theta, dtype=torch.float64)
    return SlotGrid(tuple(int(step) for step in steps.tolist()), torch.pow(base, -2 * steps / head_dim), stride)


def high_pairs(pairs: int, count: int) -> tuple[int, ...]:
    """The `count` fastest pairs (MHA2MLA, section 3.1, `S_high`)."""
    _check_count(pairs, count)
    return tuple(range(count))


def low_pairs(pairs: int, count: int) -> tuple[int, ...]:
    """The `count` slowest pairs (MHA2MLA, section 3.1, `S_low`)."""
    _check_count(pairs, count)
    return tuple(range(pairs - count, pairs))


def uniform_pairs(pairs: int, count: int) -> tuple[int, ...]:
    """`count` pairs at equal spacing, from the fastest on (MHA2MLA, section 3.1, `S_uniform`)."""
    _check_count(pairs, count)
    return tuple(index * pairs // count for index in range(count))


def _check_count(pairs: int, count: int) -> None:
    if not 0 < count <= pairs:
        raise ValueError(f"cannot keep {count} of {pairs} rotary pairs")


def two_norm_scores(statistics: LayerStatistics) -> Tensor:
    """MHA2MLA's contribution score `Σ_{a∈g} E‖q_{a,i}‖ · E‖k_{g,i}‖` (section 3.1, `S_2-norm`).

    Returns:
        (G, P).
    """
    groups = statistics.key_norm.shape[0]
    queries: Tensor = statistics.query_norm.unflatten(0, (groups, -1)).sum(1)  # (G, P)
    return queries * statistics.key_norm


def rotation_weights(statistics: LayerStatistics) -> Tensor:
    """`Λ_{i,g}`: output error per unit of power of pair `i` of key head `g` that is not rotated (math.md 2).

    A pair replaced by its best constant `γ` loses `1 - |γ|²` of its power, weighted by what the head's query
    metric says a score error costs. The real part of a product with a phase-free error takes half the power.

    Returns:
        (P, G).
    """
    half = statistics.gamma.shape[1]
    diagonal = statistics.query_metric.diagonal(dim1=1, dim2=2)  # (H, d)
    power = (diagonal[:, :half] + diagonal[:, half:]) / 2  # (H, P)
    lost = power * (1 - statistics.gamma.abs().square()).clamp(min=0)
    by_group: Tensor = lost.unflatten(0, (statistics.key_norm.shape[0], -1)).sum(1)  # (G, P)
    return by_group.T


@dataclass(frozen=True)
class RotaryComponents:
    """Eigen-decomposition, per pair, of what is lost by not rotating it.

    Attributes:
        loss: (P, G) descending in each row.
        analysis: (P, G, G) complex; `[i, c]` gives component `c` of pair `i` as a row over the heads.
        synthesis: (P, G, G) complex; `[i, c]` rebuilds the heads from it.
    """

    loss: Tensor
    analysis: Tensor
    synthesis: Tensor


def rotary_components(statistics: LayerStatistics) -> RotaryComponents:
    """Components over the key heads, per pair, in the order of what they are worth.

    Eigenvectors of `Λ_i^{1/2} E[k_{·,i} k_{·,i}^H] Λ_i^{1/2}`; dropping component `c` costs its eigenvalue.
    """
    weight = rotation_weights(statistics)  # (P, G)
    floor = weight.amax() * 1e-12 + torch.finfo(torch.float64).tiny
    root = weight.clamp(min=floor).sqrt()  # (P, G)
    weighted = root[:, :, None] * statistics.key_second * root[:, None, :]  # (P, G, G)
    values, vectors = torch.linalg.eigh(weighted)
    values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
    by_component = vectors.transpose(1, 2)  # (P, component, G)
    # Analysis and synthesis only need the heads' weights relative to each other: rows keep the keys' scale.
    share = (root / root.amax(-1, keepdim=True))[:, None, :]
    return RotaryComponents(
        loss=values,
        analysis=by_component.conj() * share,
        synthesis=by_component / share,
    )


def allocate_components(losses: Tensor, slots: int) -> tuple[int, ...]:
    """One frequency list for all layers: how many components of each pair to rotate.

    Args:
        losses: (L, P, G), each layer's component losses, already weighed against each other.
        slots: Number of slots to hand out.

    Returns:
        Components per pair, `slots` in all. Losses descend within a pair, so the largest totals are also a
        prefix of each pair's components.
    """
    total = losses.sum(0)  # (P, G)
    if slots > total.numel():
        raise ValueError(f"{slots} slots asked for, {total.numel()} components exist")
    order = total.flatten().argsort(descending=True, stable=True)[:slots]
    return tuple(torch.bincount(order // total.shape[1], minlength=total.shape[0]).tolist())


def component_slots(components: RotaryComponents, counts: tuple[int, ...], frequencies: Tensor) -> RopeSlots:
    """The leading `counts[i]` components of each pair as slots.

    Args:
        components: Of one layer.
        counts: Slots per pair.
        frequencies: (m,) at which the slots turn: their pairs' own, or a grid close to them.
    """
    index = [(pair, component) for pair, count in enumerate(counts) for component in range(count)]
    pairs, ranks = tuple(pair for pair, _ in index), tuple(component for _, component in index)
    return single_pair_slots(
        pairs,
        frequencies,
        components.analysis[list(pairs), list(ranks)],
        components.synthesis[list(pairs), list(ranks)],
        ranks,
        len(counts),
    )


def head_slots(shape: AttentionShape, heads_by_pair: tuple[tuple[int, ...], ...], frequencies: Tensor) -> RopeSlots:
    """Slots that each hold one key head's pair untouched: MHA2MLA's per-head keys in one shared row.

    Args:
        shape: Source sizes.
        heads_by_pair: For each pair, the key heads whose pair is kept.
        frequencies: (P,) the source's.
    """
    index = [(pair, head) for pair, heads in enumerate(heads_by_pair) for head in heads]
    pairs = tuple(pair for pair, _ in index)
    single = torch.zeros(len(index), shape.num_kv_heads, dtype=torch.complex128)
    for slot, (_, head) in enumerate(index):
        single[slot, head] = 1
    component = tuple(head for _, head in index)
    return single_pair_slots(pairs, frequencies[list(pairs)], single, single, component, shape.pairs)


def mean_slots(shape: AttentionShape, count: int, frequencies: Tensor) -> RopeSlots:
    """The mean over the key heads of the `count` slowest pairs, the same for every head (X-EcoMLA, arXiv 2503.11132).

    The paper takes the last `d_R` columns of a head. We read columns in the order in which a pair's two numbers are
    neighbours, so that each row keeps its partner and its frequency.

    Args:
        shape: Source sizes.
        count: Slots.
        frequencies: (P,) the source's.
    """
    pairs = low_pairs(shape.pairs, count)
    ones = torch.ones(count, shape.num_kv_heads, dtype=torch.complex128)
    analysis = ones / shape.num_kv_heads
    return single_pair_slots(pairs, frequencies[list(pairs)], analysis, ones, (0,) * count, shape.pairs)


def allocate_heads(scores: Tensor, per_head: int) -> tuple[int, ...]:
    """One frequency list for all layers from per-head scores: how many heads keep each pair.

    Each layer and head votes for its `per_head` best pairs with its share of the layer's score. The list is
    model-wide because a stock checkpoint has one; a layer then gives a pair's slots to its best heads.

    Args:
        scores: (L, G, P).
        per_head: Pairs kept per key head on average.

    Returns:
        Heads per pair, `G·per_head` in all.
    """
    share = scores / scores.sum((1, 2), keepdim=True)
    ranked = share.sort(dim=1, descending=True).values.transpose(1, 2)  # (L, P, G): c-th best head of each pair
    return allocate_components(ranked, per_head * scores.shape[1])


def best_heads(scores: Tensor, counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """For each pair the `counts[i]` key heads of one layer with the highest score, ascending.

    Args:
        scores: (G, P).
        counts: Heads per pair.
    """
    order = scores.argsort(dim=0, descending=True, stable=True)  # (G, P)
    return tuple(tuple(sorted(order[:count, pair].tolist())) for pair, count in enumerate(counts))
