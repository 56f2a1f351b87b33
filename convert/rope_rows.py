"""Rotary rows of keys and queries from slots, and what the slots leave to the content: pure functions.

Slots that combine other pairs have nothing to do with each other, so each set of pairs is worked on apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.convert.rope_select import RopeSlots


def rotary_keys(slots: RopeSlots, keys: Tensor) -> Tensor:
    """The shared rotary rows `z_s = Σ_{i,g} A_s[i,g] k_{g,i}`.

    Args:
        slots: `m` slots.
        keys: (G, P, D) complex rows, or anything else in place of D.

    Returns:
        (m, D) complex.
    """
    rows = keys.new_zeros(len(slots.mixes), keys.shape[2])
    for pairs, members in slots.blocks():
        analysis = slots.analysis[list(members)][:, list(pairs)]  # (n, p, G)
        rows[list(members)] = torch.einsum("npg,gpD->nD", analysis, keys[:, list(pairs)])
    return rows


def rotary_queries(slots: RopeSlots, queries: Tensor) -> Tensor:
    """The query of each head in each slot: `conj(γ_{a,s}) Σ_i conj(B_s[i,g(a)]) q_{a,i}`.

    With `k ≈ B z`: `conj(q) γ B z = conj(conj(γ) conj(B) q) z`.

    Args:
        slots: `m` slots.
        queries: (H, P, D) complex rows.

    Returns:
        (H, m, D) complex.
    """
    heads, groups = queries.shape[0], slots.synthesis.shape[2]
    rows = queries.new_zeros(heads, len(slots.mixes), queries.shape[2])
    for pairs, members in slots.blocks():
        spread = slots.synthesis[list(members)][:, list(pairs)].conj()  # (n, p, G)
        by_head = spread.repeat_interleave(heads // groups, dim=2)  # (n, p, H)
        rows[:, list(members)] = torch.einsum("nph,hpD->hnD", by_head, queries[:, list(pairs)])
    return rows if slots.query_factor is None else rows * slots.query_factor.conj()[:, :, None]


def unrotated_keys(slots: RopeSlots, keys: Tensor, rotary: Tensor) -> Tensor:
    """`k - B A k`: what no slot holds.

    Args:
        slots: `m` slots.
        keys: (G, P, D) complex rows.
        rotary: (m, D), `rotary_keys` of them.

    Returns:
        (G, P, D) complex.
    """
    left = keys.clone()
    for pairs, members in slots.blocks():
        synthesis = slots.synthesis[list(members)][:, list(pairs)]  # (n, p, G)
        left[:, list(pairs)] -= torch.einsum("npg,nD->gpD", synthesis, rotary[list(members)])
    return left


def content_pairs(slots: RopeSlots) -> tuple[tuple[int, ...], ...]:
    """For each key head, the pairs that its slots do not rebuild completely and that stay content."""
    _, pairs, groups = slots.analysis.shape
    open_pairs = torch.ones(pairs, groups, dtype=torch.bool)
    for block, left in _left_by_block(slots):
        open_pairs[list(block)] = left
    return tuple(tuple(torch.nonzero(open_pairs[:, group]).flatten().tolist()) for group in range(groups))


def _left_by_block(slots: RopeSlots) -> list[tuple[tuple[int, ...], Tensor]]:
    """(pairs, (p, G) whether something of them is left) for each set of pairs."""
    groups = slots.analysis.shape[2]
    found = []
    for pairs, members in slots.blocks():
        size = len(pairs) * groups
        analysis = slots.analysis[list(members)][:, list(pairs)].flatten(1)  # (n, p·G)
        synthesis = slots.synthesis[list(members)][:, list(pairs)].flatten(1)
        left = torch.eye(size, dtype=torch.complex128) - synthesis.T @ analysis  # k ≈ (BᵀA) k
        found.append((pairs, (left.abs().amax(1) > 1e-9).unflatten(0, (len(pairs), groups))))
    return found
