"""The maps of a source layer, to be compared with those of its conversion."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.convert.weights import LayerWeights
from mla_convert.mla.map_error import LayerMaps, ScoreRows, ValueRows
from mla_convert.mla.rope import to_pairs


def source_maps(weights: LayerWeights, frequencies: Tensor) -> LayerMaps:
    """All pairs of the source are rotary rows; it has no content part.

    Args:
        weights: One layer.
        frequencies: (P,) radians per position.
    """
    rep = weights.shape.heads_per_group
    queries = to_pairs(weights.q) * weights.softmax_scale  # (H, P, D)
    keys = to_pairs(weights.k).repeat_interleave(rep, dim=0)  # (H, P, D)
    none = torch.zeros(weights.shape.num_heads, 0, weights.shape.hidden_size, dtype=torch.float64)
    return LayerMaps(
        ScoreRows(none, none, queries, keys, frequencies.double()),
        ValueRows(weights.o, weights.v.repeat_interleave(rep, dim=0)),
    )
