"""EliteKV's RoPElite (arXiv 2503.01586): pairs picked one by one for each key head.

Each step adds the pair whose rotation brings the scores closest to those of full rotation, in mean absolute (L1)
distance, while all pairs not yet picked stand still. The scores before the softmax are compared, causal ones alone.
The released code measures whole runs of the model once per step; what a pair's rotation adds to a score does not
depend on the other pairs, so we compute it once and update one residual, which is the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.convert.score_error import pair_differences
from mla_convert.convert.weights import LayerWeights


@dataclass(frozen=True)
class GreedyOrder:
    """Pairs of one key head in the order in which they were picked.

    Attributes:
        pairs: All `P` pairs.
        errors: (P + 1,) mean absolute score error with none, one, … all of them rotated.
    """

    pairs: tuple[int, ...]
    errors: Tensor


def greedy_order(differences: Tensor) -> GreedyOrder:
    """Pick pairs until all are picked; of equal ones the fastest.

    Args:
        differences: (P, n), what rotating each pair adds to each score.
    """
    residual = differences.sum(0)  # (n,): full rotation less none
    left, picked, errors = list(range(differences.shape[0])), [], [residual.abs().mean()]
    while left:
        # cdist sums |residual - difference| without a table of the size of `differences`.
        distance = torch.cdist(residual[None], differences[left], p=1)[0]  # (pairs left,)
        best = int(distance.argmin())
        errors.append(distance[best] / differences.shape[1])
        picked.append(left.pop(best))
        residual = residual - differences[picked[-1]]
    return GreedyOrder(tuple(picked), torch.stack(errors))


def greedy_scores(weights: LayerWeights, inputs: Tensor, frequencies: Tensor) -> Tensor:
    """What each pair is worth to its key head, so that the largest scores are the greedy picks.

    A pair scores the error that it removed when it was picked, at most that of the picks before it.

    Args:
        weights: Source layer.
        inputs: (N, T, D) attention inputs.
        frequencies: (P,).

    Returns:
        (G, P) float64, positive.
    """
    rows = []
    for group in range(weights.shape.num_kv_heads):
        order = greedy_order(pair_differences(weights, group, inputs, frequencies))
        gains = (order.errors[:-1] - order.errors[1:]).cummin(0).values  # (P,) in the order of the picks
        # Of picks that are worth the same, or nothing, the earlier one still comes first.
        gains = gains * (1 - 1e-9 * torch.arange(len(gains), dtype=torch.float64))
        places = torch.arange(len(gains), 0, -1, dtype=torch.float64) * torch.finfo(torch.float64).tiny
        row = torch.zeros(weights.shape.pairs, dtype=torch.float64)
        row[list(order.pairs)] = torch.maximum(gains, places)
        rows.append(row)
    return torch.stack(rows)
