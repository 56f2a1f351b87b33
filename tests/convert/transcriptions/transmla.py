"""TransMLA (arXiv 2502.07864), equation by equation."""

from __future__ import annotations

import numpy as np

from tests.convert.transcriptions.layers import Array, Layer


def leading_vectors(matrix: Array, count: int) -> Array:
    """Eigenvectors of a symmetric matrix as columns, of its `count` largest eigenvalues."""
    values, vectors = np.linalg.eigh(matrix)
    order = sorted(range(len(values)), key=lambda i: -values[i])
    return np.stack([vectors[:, i] for i in order[:count]], axis=1)


def fold_rotation(layer: Layer, tokens: Array, first: int, fold: int) -> Array:
    """`U_l` of section 4.2: PCA over heads (and folded frequencies), real and imaginary parts as separate samples."""
    names = [(pair, head) for pair in range(first, first + fold) for head in range(len(layer.keys))]
    second = np.zeros((len(names), len(names)))
    for token in tokens:
        for part in (0, layer.pairs):
            sample = np.array([layer.keys[head][pair + part] @ token for pair, head in names])
            second += np.outer(sample, sample)
    return leading_vectors(second, len(names))


def rotary_and_rest(layer: Layer, tokens: Array, slots: int, fold: int) -> tuple[list[Array], Array]:
    """Rows of the shared rotary key, two per slot, and the projector onto what stays without rotation.

    Returns:
        `[real row, imaginary row]` (2, D) of each slot, and (G·d, G·d) on the stacked rows of all heads.
    """
    heads, size = layer.keys.shape[:2]
    stacked = layer.keys.reshape(heads * size, -1)
    stride = layer.pairs // slots
    rest, rows = np.eye(heads * size), []
    for slot in range(slots):
        frequency = slot * stride
        first = (frequency // fold) * fold
        rotation = fold_rotation(layer, tokens, first, fold)
        column = rotation[:, (frequency - first) // stride if fold > stride else 0]
        parts = []
        for part in (0, layer.pairs):
            direction = np.zeros(heads * size)
            place = 0
            for pair in range(first, first + fold):
                for head in range(heads):
                    direction[head * size + pair + part] = column[place]
                    place += 1
            parts.append(direction @ stacked)
            rest -= np.outer(direction, direction)
        rows.append(np.stack(parts))
    return rows, rest


def balance(content: Array, values: Array, tokens: Array) -> float:
    """Equation 20: mean norm of the keys without rotation over that of the values."""
    key = sum(float(np.sqrt(np.sum((content @ token) ** 2))) for token in tokens)
    value = sum(float(np.sqrt(np.sum((values @ token) ** 2))) for token in tokens)
    return key / value


def compressed(layer: Layer, tokens: Array, rest: Array, rank: int) -> tuple[Array, Array]:
    """Section 4.3 and appendix D: joint PCA of balanced activations; maps of keys without rotation and of values."""
    heads, size = layer.keys.shape[:2]
    content = rest @ layer.keys.reshape(heads * size, -1)
    values = layer.values.reshape(heads * size, -1)
    alpha = balance(content, values, tokens)
    joint = np.concatenate([content / alpha, values])
    second = np.zeros((len(joint), len(joint)))
    for token in tokens:
        activation = joint @ token
        second += np.outer(activation, activation)
    r_kv = leading_vectors(second, rank)
    down = r_kv.T @ joint  # equation 35
    up_keys, up_values = alpha * r_kv[: heads * size], r_kv[heads * size :]  # equations 36 and 37
    return up_keys @ down, up_values @ down
