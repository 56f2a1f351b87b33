"""Attention scores of a sample of queries, and how much partial rotation changes them: pure functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_convert.convert.rope_rows import rotary_keys, rotary_queries, unrotated_keys
from mla_convert.convert.rope_select import RopeSlots
from mla_convert.convert.statistics import project
from mla_convert.convert.weights import LayerWeights
from mla_convert.mla.rope import rotation, to_pairs

# Scores held per key head over all of its query heads: with 64 pairs in float64, 64 MiB.
SCORES_PER_KEY_HEAD = 2**17


def sampled_positions(windows: int, length: int, heads: int) -> Tensor:
    """Query positions that are looked at, the same in every window and evenly spaced from the last one back.

    Args:
        windows: Number of windows.
        length: Tokens per window.
        heads: Query heads that are scored together.

    Returns:
        (n,) ascending; all positions where their causal scores fit `SCORES_PER_KEY_HEAD`.
    """
    causal = windows * heads * length * (length + 1) / 2
    step = max(1, math.ceil(causal / SCORES_PER_KEY_HEAD))
    return torch.arange(length - 1, -1, -step).flip(0)


def project_pairs(rows: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    """(heads, d, D), (heads, d) or None, (T, D) -> (heads, P, T) complex, unrotated."""
    return to_pairs(project(rows, bias, inputs.double()).transpose(1, 2))


def pair_differences(weights: LayerWeights, group: int, inputs: Tensor, frequencies: Tensor) -> Tensor:
    """What rotating each pair adds to the scores of one key head: `s·Re conj(q_i)(e^{-iθ_iΔ} - 1) k_i`.

    Args:
        weights: Source layer.
        group: Key head.
        inputs: (N, T, D) attention inputs.
        frequencies: (P,).

    Returns:
        (P, n) float64, over the query heads of the group, the sampled queries and the keys up to each.
    """
    rep = weights.shape.heads_per_group
    heads, length = slice(group * rep, (group + 1) * rep), inputs.shape[1]
    at = sampled_positions(inputs.shape[0], length, rep)
    seen = torch.arange(length)[None, :] <= at[:, None]  # (n, T)
    turn = rotation(torch.arange(length), frequencies).T  # (P, T)
    found = []
    for window in inputs:
        q_bias = None if weights.q_bias is None else weights.q_bias[heads]
        k_bias = None if weights.k_bias is None else weights.k_bias[group : group + 1]
        queries = project_pairs(weights.q[heads], q_bias, window)[:, :, at]  # (A, P, n)
        keys = project_pairs(weights.k[group : group + 1], k_bias, window)[0]  # (P, T)
        rotated = _score_by_pair(queries * turn[:, at], keys * turn)
        found.append((rotated - _score_by_pair(queries, keys))[:, :, seen].flatten(1))
    return torch.cat(found, dim=1) * weights.softmax_scale


def _score_by_pair(queries: Tensor, keys: Tensor) -> Tensor:
    """(A, P, n), (P, T) complex -> (P, A, n, T): `Re conj(q) k` of each pair."""
    left = torch.view_as_real(queries.transpose(0, 1).contiguous())  # (P, A, n, 2)
    right = torch.view_as_real(keys.contiguous()).transpose(1, 2)  # (P, 2, T)
    return left @ right[:, None]


def score_error(weights: LayerWeights, slots: RopeSlots, inputs: Tensor, frequencies: Tensor) -> float:
    """Mean absolute error of the scores when only what the slots hold turns and the rest stands still (`γ = 1`).

    Args:
        weights: Source layer.
        slots: Rotary slots.
        inputs: (N, T, D) attention inputs.
        frequencies: (P,) the source's.

    Returns:
        In units of the softmax's argument, over all heads, the sampled queries and the keys up to each.
    """
    shape, length = weights.shape, inputs.shape[1]
    at = sampled_positions(inputs.shape[0], length, shape.heads_per_group)
    seen = torch.arange(length)[None, :] <= at[:, None]
    source_turn = rotation(torch.arange(length), frequencies).T  # (P, T)
    slot_turn = rotation(torch.arange(length), slots.frequencies).T  # (m, T)
    total = 0.0
    for window in inputs:
        queries = project_pairs(weights.q, weights.q_bias, window)[:, :, at]  # (H, P, n)
        keys = project_pairs(weights.k, weights.k_bias, window)  # (G, P, T)
        shared = rotary_keys(slots, keys)  # (m, T)
        content = unrotated_keys(slots, keys, shared).repeat_interleave(shape.heads_per_group, dim=0)
        turned = _scores(rotary_queries(slots, queries) * slot_turn[:, at], (shared * slot_turn)[None])
        exact = keys.repeat_interleave(shape.heads_per_group, dim=0) * source_turn
        error = turned + _scores(queries, content) - _scores(queries * source_turn[:, at], exact)  # (H, n, T)
        total += float(error[:, seen].abs().sum())
    count = inputs.shape[0] * shape.num_heads * int(seen.sum())
    return weights.softmax_scale * total / count


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """(H, P, n), (H or 1, P, T) complex -> (H, n, T): `Re Σ_i conj(q_i) k_i`."""
    left = torch.cat([queries.real, queries.imag], dim=1).transpose(1, 2)  # (H, n, 2P)
    return left @ torch.cat([keys.real, keys.imag], dim=1)
