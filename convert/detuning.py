"""The constant before a slot that turns at a slightly wrong frequency.

A component of pair `i` (frequency `θ_i`) in a slot of frequency `ϑ` loses `λ·E|e^{-iθ_iΔ} - γ e^{-iϑΔ}|²`, least for
`γ = E[e^{-i(θ_i - ϑ)Δ}]` over the distances where a score error matters: the same mean as for a pair that is not
rotated at all (math.md 2), of the difference of the frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.convert.score_error import project_pairs
from mla_convert.convert.statistics import attention_probabilities, project, score_error_weights
from mla_convert.convert.weights import LayerWeights
from mla_convert.mla.rope import rotation


def detuning_factor(
    weights: LayerWeights, inputs: Tensor, frequencies: Tensor, pairs: tuple[int, ...], stored: Tensor
) -> Tensor:
    """`γ` of each query head and slot, weighted as `LayerStatistics.gamma`.

    Args:
        weights: Source layer.
        inputs: (N, T, D) attention inputs.
        frequencies: (P,) the source's.
        pairs: Source pair of each slot.
        stored: (m,) frequencies of the slots.

    Returns:
        (H, m) complex128, of magnitude at most one; one where the frequencies agree.
    """
    shape, rep = weights.shape, weights.shape.heads_per_group
    turn = rotation(torch.arange(inputs.shape[1]), frequencies[list(pairs)] - stored)  # (T, m)
    total = torch.zeros(shape.num_heads, len(pairs), dtype=torch.complex128)
    weight = torch.zeros(shape.num_heads, len(pairs), dtype=torch.float64)
    for window in inputs.double():
        queries = project_pairs(weights.q, weights.q_bias, window).transpose(1, 2)  # (H, T, P)
        keys = project_pairs(weights.k, weights.k_bias, window).transpose(1, 2)  # (G, T, P)
        values = project(weights.v, weights.v_bias, window)  # (G, T, d)
        for group in range(shape.num_kv_heads):
            heads = slice(group * rep, (group + 1) * rep)
            p = attention_probabilities(queries[heads], keys[group], frequencies, weights.softmax_scale)
            u = score_error_weights(p, values[group], weights.o[heads])  # (A, T, T)
            power = queries[heads][:, :, list(pairs)].abs().square()  # (A, T, m)
            turned = torch.complex(u @ turn.real, u @ turn.imag)  # (A, T, m), Σ_j u_tj e^{i(θ-ϑ)j}
            total[heads] += (power * turned * turn.conj()).sum(1)
            weight[heads] += (power * u.sum(-1)[..., None]).sum(1)
    return total / weight.clamp(min=torch.finfo(torch.float64).tiny)
