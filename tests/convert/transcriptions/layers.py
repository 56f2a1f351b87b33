"""One attention layer as arrays, and rotary position embedding number by number."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Layer:
    """Weights of a source layer without biases; a head's rows are `x_0 .. x_{P-1}, y_0 .. y_{P-1}`."""

    queries: Array  # (H, d, D)
    keys: Array  # (G, d, D)
    values: Array  # (G, d, D)
    frequencies: Array  # (P,)
    scale: float

    @property
    def pairs(self) -> int:
        """Rotary pairs per head."""
        return int(self.keys.shape[1] // 2)


def score(layer: Layer, query: Array, key: Array, distance: int, rotated: set[int]) -> float:
    """One score, with the pairs of `rotated` turned by the distance and the others not at all."""
    total = 0.0
    for pair in range(layer.pairs):
        angle = layer.frequencies[pair] * distance if pair in rotated else 0.0
        qx, qy = query[pair], query[pair + layer.pairs]
        kx, ky = key[pair], key[pair + layer.pairs]
        # The query turned forward against the key.
        rx, ry = qx * math.cos(angle) - qy * math.sin(angle), qx * math.sin(angle) + qy * math.cos(angle)
        total += rx * kx + ry * ky
    return float(total * layer.scale)
