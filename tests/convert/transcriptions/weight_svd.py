"""MHA2MLA (arXiv 2502.14837), EliteKV (2503.01586) and X-EcoMLA (2503.11132), from their equations."""

from __future__ import annotations

import numpy as np

from tests.convert.transcriptions.layers import Array, Layer, score


def truncated(matrix: Array, rank: int) -> Array:
    """Best approximation of a rank: the SVD's leading part."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    total = np.zeros_like(matrix)
    for i in range(rank):
        total += s[i] * np.outer(u[:, i], vt[i])
    return total


def contribution(layer: Layer, tokens: Array, group: int, pair: int) -> float:
    """MHA2MLA's 2-norm score of a pair of one key head, summed over its query heads (section 3.1)."""
    rep = len(layer.queries) // len(layer.keys)

    def mean_norm(rows: Array) -> float:
        x, y = rows[pair], rows[pair + layer.pairs]
        return float(np.mean([np.hypot(x @ token, y @ token) for token in tokens]))

    queries = sum(mean_norm(layer.queries[head]) for head in range(group * rep, (group + 1) * rep))
    return queries * mean_norm(layer.keys[group])


def content_rows(layer: Layer, kept: list[set[int]]) -> Array:
    """Key rows of all heads whose pairs are not rotated, head by head, real parts first."""
    rows = []
    for head, rotated in enumerate(kept):
        for part in (0, layer.pairs):
            rows += [layer.keys[head][pair + part] for pair in range(layer.pairs) if pair not in rotated]
    return np.stack(rows)


def joint_svd(layer: Layer, rotated: list[set[int]], rank: int) -> tuple[Array, Array]:
    """MHA2MLA section 3.2 and EliteKV's joint decomposition: one SVD of unrotated keys and values."""
    keys = content_rows(layer, rotated)
    values = layer.values.reshape(-1, layer.values.shape[2])
    both = truncated(np.concatenate([keys, values]), rank)
    return both[: len(keys)], both[len(keys) :]


def split_svd(layer: Layer, rotated: list[set[int]], key_rank: int, value_rank: int) -> tuple[Array, Array]:
    """MHA2MLA section 3.2: one SVD each."""
    values = layer.values.reshape(-1, layer.values.shape[2])
    return truncated(content_rows(layer, rotated), key_rank), truncated(values, value_rank)


def ropelite(layer: Layer, windows: Array, group: int, count: int) -> list[int]:
    """EliteKV's greedy search: each step measures every pair not yet chosen, on all causal scores of the key head."""
    rep = len(layer.queries) // len(layer.keys)
    every, chosen = set(range(layer.pairs)), []
    for _ in range(count):
        distances = {}
        for pair in sorted(every - set(chosen)):
            total = 0.0
            for window in windows:
                for head in range(group * rep, (group + 1) * rep):
                    queries, keys = window @ layer.queries[head].T, window @ layer.keys[group].T
                    for t in range(len(window)):
                        for j in range(t + 1):
                            full = score(layer, queries[t], keys[j], t - j, every)
                            part = score(layer, queries[t], keys[j], t - j, {*chosen, pair})
                            total += abs(full - part)
            distances[pair] = total
        chosen.append(min(distances, key=lambda pair: distances[pair]))
    return chosen


def x_ecomla(layer: Layer, slots: int, rank: int) -> tuple[Array, Array, Array]:
    """X-EcoMLA's initialisation, with a head's columns in the order x_0 y_0 x_1 y_1 …

    Returns:
        Rotary rows (2·slots, D) and keys without rotation (G, d - 2·slots, D) in that order, values (G·d, D).
    """
    heads, size, hidden = layer.keys.shape
    columns = np.zeros_like(layer.keys)
    for head in range(heads):
        for pair in range(layer.pairs):
            columns[head, 2 * pair] = layer.keys[head, pair]
            columns[head, 2 * pair + 1] = layer.keys[head, pair + layer.pairs]
    rope = sum(columns[head][size - 2 * slots :] for head in range(heads)) / heads
    both = truncated(np.concatenate([columns.reshape(-1, hidden), layer.values.reshape(-1, hidden)]), rank)
    keys = both[: heads * size].reshape(heads, size, hidden)[:, : size - 2 * slots]
    return np.asarray(rope), keys, both[heads * size :]
