"""TransMLA's RoRoPE and FreqFold (arXiv 2502.07864, section 4.2, equation 19, and appendices B and C).

Turning the stacked heads of one frequency by one orthogonal matrix, the same for real and imaginary parts, changes no
score. PCA makes that matrix gather the keys in the first components, which stay rotary; the rest stops turning.
FreqFold does it for `f` neighbouring frequencies at once, as if they were one.

The released code keeps frequencies at a uniform stride, one component each (`collapse`), which is what a target with
one shared rotary key can hold; so do we. It adds 1 % of the mean variance to the diagonal before the PCA, which moves
no eigenvector, and picks `f` by perplexity on the evaluation text, which we do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.convert.rope_select import RopeSlots
from mla_convert.convert.score_error import score_error
from mla_convert.convert.statistics import Moments
from mla_convert.convert.weights import LayerWeights
from mla_convert.mla.rope import to_pairs

FOLDS = (1, 2, 4, 8)


def legal_folds(pairs: int, slots: int) -> tuple[int, ...]:
    """Folds of `FOLDS` that divide the pairs and whose components fill slots at a uniform stride."""
    stride = pairs // slots
    return tuple(fold for fold in FOLDS if pairs % fold == 0 and (fold % stride == 0 or stride % fold == 0))


def key_moments(weights: LayerWeights, moments: Moments, pairs: tuple[int, ...]) -> Tensor:
    """`E[x xᵀ + y yᵀ]` of some pairs of all key heads, real and imaginary parts counted alike.

    Args:
        weights: Source layer.
        moments: Of the attention input.
        pairs: Source pairs.

    Returns:
        (p·G, p·G) float64, pair-major.
    """
    rows = to_pairs(weights.k)[:, list(pairs)].transpose(0, 1).flatten(0, 1)  # (p·G, D)
    second = rows @ moments.second.to(rows.dtype) @ rows.conj().T
    if weights.k_bias is not None:
        bias = to_pairs(weights.k_bias)[:, list(pairs)].T.flatten()  # (p·G,)
        mean = rows @ moments.mean.to(rows.dtype)
        second = (
            second + torch.outer(mean, bias.conj()) + torch.outer(bias, mean.conj()) + torch.outer(bias, bias.conj())
        )
    return second.real


def principal_components(second: Tensor) -> Tensor:
    """Eigenvectors of a symmetric matrix as columns, by descending eigenvalue."""
    vectors: Tensor = torch.linalg.eigh(second).eigenvectors.flip(1)
    return vectors


def rorope_slots(weights: LayerWeights, moments: Moments, frequencies: Tensor, count: int, fold: int) -> RopeSlots:
    """`count` slots at a uniform stride `s = P / count`, filled with principal components.

    Slot `n` turns at `θ_{ns}`. It lies in fold `⌊ns/f⌋` and holds the next component of it: the first, where
    the folds are no wider than the stride.

    Args:
        weights: Source layer.
        moments: Of the attention input, every token alike.
        frequencies: (P,) the source's.
        count: Slots; divides `P`.
        fold: `f`.
    """
    shape = weights.shape
    stride = shape.pairs // count
    synthesis = torch.zeros(count, shape.pairs, shape.num_kv_heads, dtype=torch.complex128)
    bases: dict[tuple[int, ...], Tensor] = {}  # (f·G, f·G) each
    mixes, component = [], []
    for slot in range(count):
        first = slot * stride // fold * fold
        pairs = tuple(range(first, first + fold))
        rank = slot * stride % fold // stride
        if pairs not in bases:
            bases[pairs] = principal_components(key_moments(weights, moments, pairs))
        synthesis[slot, list(pairs)] = bases[pairs][:, rank].unflatten(0, (fold, -1)).to(torch.complex128)
        mixes.append(pairs)
        component.append(rank)
    own = frequencies[torch.arange(count) * stride]
    # Real and orthogonal: what rebuilds is what analyses.
    return RopeSlots(tuple(mixes), own, synthesis, synthesis, tuple(component))


def fold_errors(
    weights: LayerWeights, moments: Moments, inputs: Tensor, frequencies: Tensor, count: int
) -> dict[int, float]:
    """Mean absolute score error of one layer for each legal fold, on a sample of calibration inputs (N, T, D)."""
    return {
        fold: score_error(weights, rorope_slots(weights, moments, frequencies, count, fold), inputs, frequencies)
        for fold in legal_folds(weights.shape.pairs, count)
    }
