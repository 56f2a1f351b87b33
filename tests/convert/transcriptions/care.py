"""CARE (arXiv 2603.17946). SVD-LLM (2403.07378) whitens the same way, by a Cholesky factor."""

from __future__ import annotations

import numpy as np

from tests.convert.transcriptions.layers import Array


def covariance(tokens: Array) -> Array:
    """`C = E[x xᵀ]`, not centred."""
    total = np.zeros((tokens.shape[1], tokens.shape[1]))
    for token in tokens:
        total += np.outer(token, token)
    return total / len(tokens)


def whitened(weight: Array, c: Array, rank: int, *, cholesky: bool = False) -> Array:
    """`Ŵ` from the SVD of `W S`, `S Sᵀ = C`, unwhitened: rows of `weight` (n, D) are outputs."""
    if cholesky:
        root = np.linalg.cholesky(c)
    else:
        values, vectors = np.linalg.eigh(c)
        root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
    u, s, vt = np.linalg.svd(weight @ root, full_matrices=False)
    return np.asarray(u[:, :rank] @ np.diag(s[:rank]) @ vt[:rank] @ np.linalg.inv(root))


def shared_ranks(key_values: list[float], value_values: list[float], rank: int) -> tuple[int, int]:
    """Rank-plus-one priority with keys and values competing for one width."""

    def priority(spectrum: list[float], r: int) -> float:
        tail = sum(value**2 for value in spectrum[r:])
        return spectrum[r] ** 2 / tail if r < len(spectrum) and tail > 0 else -1.0

    given = {"keys": 0, "values": 0}
    for _ in range(rank):
        keys, values = priority(key_values, given["keys"]), priority(value_values, given["values"])
        given["keys" if keys >= values else "values"] += 1
    return given["keys"], given["values"]
