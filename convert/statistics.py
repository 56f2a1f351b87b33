"""What calibration measures of one attention layer, in float64, and the pure function that measures it.

All sums are first-order weights: how much an error in a score or in a value moves the layer's output, with errors
at different keys taken as independent. Attention output `Σ_j p_tj v_j` changes by `p_tj (v_j - v̄_t)` per unit of
score `(t, j)` and by `p_tj` per unit of value `j`; so `u_tj = p_tj² ‖W_O(v_j - v̄_t)‖²` weighs score errors and
`p_tj² ‖W_O‖²` weighs value errors. A token counts for what attention makes of it, not as one among many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mla_convert.convert.weights import LayerWeights
from mla_convert.mla.rope import rotation, to_pairs

# Scores of one head group that are held at once: 32 MB in float64, of which about five copies live together.
SCORES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Moments:
    """First and second moment of the attention input under some weighting of the tokens.

    Attributes:
        mean: (D,).
        second: (D, D), uncentred.
    """

    mean: Tensor
    second: Tensor

    def covariance(self, *, centred: bool) -> Tensor:
        """(D, D) second moment, about the mean if `centred`."""
        return self.second - torch.outer(self.mean, self.mean) if centred else self.second


@dataclass(frozen=True)
class LayerStatistics:
    """Means over the calibration tokens of one layer, float64 (complex128 where said).

    Attributes:
        tokens: () number of tokens seen.
        input: Mean and second moment of the attention input, every token alike.
        key_input: The same, token `j` weighted by `Σ_t Σ_a u_tj ‖q_t‖²`.
        value_input: The same, token `j` weighted by `Σ_t Σ_a p_tj² ‖W_O^a‖²`.
        key_second: (P, G, G) complex, `E[k_{·,i} k_{·,i}^H]` per pair, uncentred, bias included,
            weighted as `key_input`.
        query_metric: (H, d, d) `s²·E_t[(Σ_j u_tj) q_t q_tᵀ]`, `s` the softmax scale: the output error of a head per
            unit error of its keys (math.md 3).
        value_weight: (H,) `E_t Σ_j p_tj²`: the output error of a head per unit error of its values.
        gamma: (H, P) complex, `E[e^{-iθ_iΔ}]` over the distances that the head attends to, weighted by
            `u_tj |q_{t,i}|²`.
        query_norm: (H, P) `E|q_{a,i}|`.
        key_norm: (G, P) `E|k_{g,i}|`.
        weight: (3,) sum of the token weights of `input`, `key_input` and `value_input`.
        gamma_weight: (H, P) sum of the weights of `gamma`.
    """

    tokens: Tensor
    input: Moments
    key_input: Moments
    value_input: Moments
    key_second: Tensor
    query_metric: Tensor
    value_weight: Tensor
    gamma: Tensor
    query_norm: Tensor
    key_norm: Tensor
    weight: Tensor
    gamma_weight: Tensor


@dataclass(frozen=True)
class _WindowSums:
    """Sums over one window of the quantities that `LayerStatistics` averages."""

    key_second: Tensor
    query_metric: Tensor
    value_weight: Tensor
    gamma: Tensor
    gamma_weight: Tensor
    query_norm: Tensor
    key_norm: Tensor
    # Token weights of the three kinds of moments, then weighted sums of x and x xᵀ.
    weight: Tensor  # (3,)
    first: Tensor  # (3, D)
    second: Tensor  # (3, D, D)


def project(rows: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    """(heads, d, D), (heads, d) or None, (T, D) -> (heads, T, d)."""
    out = torch.einsum("hdD,tD->htd", rows, inputs)
    return out if bias is None else out + bias[:, None, :]


def attention_probabilities(queries: Tensor, keys: Tensor, frequencies: Tensor, scale: float, start: int = 0) -> Tensor:
    """Causal attention of one head group over one window, or over some of its rows.

    Args:
        queries: (A, R, P) complex, unrotated, the query heads of one group at the positions from `start` on.
        keys: (T, P) complex, unrotated, `T >= start + R`.
        frequencies: (P,).
        scale: Softmax scale.
        start: Position of the first query.

    Returns:
        (A, R, T) float64, rows sum to one.
    """
    rows, length = queries.shape[1], keys.shape[0]
    turn = rotation(torch.arange(length), frequencies)  # (T, P)
    # Re(conj(q) k) is a real dot product of twice the length: half the work of the complex one.
    scores = _as_real(queries * turn[start : start + rows]) @ _as_real(keys * turn).T  # (A, R, T)
    future = torch.ones(rows, length, dtype=torch.bool).triu(start + 1)
    return (scores * scale).masked_fill_(future, float("-inf")).softmax(-1)


def _as_real(pairs: Tensor) -> Tensor:
    """(..., P) complex -> (..., 2P) real and imaginary parts side by side."""
    return torch.view_as_real(pairs).flatten(-2)


def score_error_weights(probabilities: Tensor, values: Tensor, output: Tensor) -> Tensor:
    """`p_tj² ‖W_O(v_j - v̄_t)‖²`: squared output change per squared change of score `(t, j)`.

    The derivative of a softmax-averaged value with respect to one score is `p_tj (v_j - v̄_t)`.

    Args:
        probabilities: (A, R, T).
        values: (T, d) of the group's value head.
        output: (A, D, d) output projection of each query head.

    Returns:
        (A, R, T).
    """
    metric = output.transpose(1, 2) @ output  # (A, d, d)
    averaged = probabilities @ values  # (A, R, d), v̄_t
    weighted = averaged @ metric  # (A, R, d)
    own = torch.einsum("td,ade,te->at", values, metric, values)  # (A, T)
    spread = (weighted @ values.T).mul_(-2).add_(own[:, None, :]).add_((weighted * averaged).sum(-1, keepdim=True))
    return spread.clamp_(min=0).mul_(probabilities).mul_(probabilities)


@dataclass(frozen=True)
class _GroupSums:
    """What one key/value head and its query heads contribute in one window."""

    query_metric: Tensor  # (A, d, d)
    value_weight: Tensor  # (A,)
    gamma: Tensor  # (A, P)
    gamma_weight: Tensor  # (A, P)
    key_weight: Tensor  # (T,)
    value_token_weight: Tensor  # (T,)


def _group_sums(
    probabilities: Tensor, values: Tensor, output: Tensor, queries: Tensor, query_pairs: Tensor, turn: Tensor
) -> _GroupSums:
    """(A, R, T), (T, d), (A, D, d), (A, R, d), (A, R, P), (T, P) -> sums over the last `R` rows of the `T`."""
    u = score_error_weights(probabilities, values, output)  # (A, R, T)
    squared = probabilities.square()
    omega = u.sum(-1)  # (A, R)
    power = query_pairs.abs().square()  # (A, R, P)
    turned = torch.view_as_complex((u @ _as_real(turn)).unflatten(-1, (-1, 2)))  # (A, R, P), Σ_j u_tj e^{iθj}
    return _GroupSums(
        query_metric=torch.einsum("at,atd,ate->ade", omega, queries, queries),
        value_weight=squared.sum((-1, -2)),
        gamma=(power * turned * turn[-queries.shape[1] :].conj()).sum(1),
        gamma_weight=(power * omega[..., None]).sum(1),
        key_weight=torch.einsum("atj,at->j", u, queries.square().sum(-1)),
        value_token_weight=torch.einsum("atj,a->j", squared, output.square().sum((1, 2))),
    )


def row_blocks(heads: int, length: int) -> Iterator[slice]:
    """Rows of a window in blocks whose scores of `heads` query heads fit into `SCORES_AT_ONCE`."""
    rows = max(1, SCORES_AT_ONCE // (heads * length))
    for start in range(0, length, rows):
        yield slice(start, min(start + rows, length))


def _group_of_window(
    weights: LayerWeights,
    group: int,
    values: Tensor,
    queries: Tensor,
    pairs: tuple[Tensor, Tensor],
    frequencies: Tensor,
) -> _GroupSums:
    """(T, d), (A, T, d), ((A, T, P), (T, P)) of one key/value head -> its sums, block by block of query rows."""
    shape, (query_pairs, key_pairs) = weights.shape, pairs
    output = weights.o[group * shape.heads_per_group : (group + 1) * shape.heads_per_group]  # (A, D, d)
    turn = rotation(torch.arange(len(values)), frequencies)  # (T, P)
    blocks = []
    for rows in row_blocks(shape.heads_per_group, len(values)):
        # Keys after the block's last query are in its future.
        own, seen = query_pairs[:, rows], slice(0, rows.stop)
        p = attention_probabilities(own, key_pairs[seen], frequencies, weights.softmax_scale, rows.start)
        sums = _group_sums(p, values[seen], output, queries[:, rows], own, turn[seen])
        blocks.append([getattr(sums, field.name) for field in fields(_GroupSums)])
    return _GroupSums(*(_padded_sum(parts) for parts in zip(*blocks, strict=True)))


def _padded_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum of tensors, the shorter ones taken as zero behind their end (the first axis; the last part is longest)."""
    total = torch.zeros_like(parts[-1])
    for part in parts:
        total[: len(part)] += part
    return total


def _window_sums(weights: LayerWeights, inputs: Tensor, frequencies: Tensor) -> _WindowSums:
    shape = weights.shape
    queries, keys = project(weights.q, weights.q_bias, inputs), project(weights.k, weights.k_bias, inputs)
    values = project(weights.v, weights.v_bias, inputs)  # (G, T, d)
    query_pairs = to_pairs(queries.transpose(1, 2)).transpose(1, 2)  # (H, T, P)
    key_pairs = to_pairs(keys.transpose(1, 2)).transpose(1, 2)  # (G, T, P)
    groups = []
    for group in range(shape.num_kv_heads):
        heads = slice(group * shape.heads_per_group, (group + 1) * shape.heads_per_group)
        pairs = query_pairs[heads], key_pairs[group]
        groups.append(_group_of_window(weights, group, values[group], queries[heads], pairs, frequencies))
    key_weight = torch.stack([group.key_weight for group in groups]).sum(0)  # (T,)
    value_weight = torch.stack([group.value_token_weight for group in groups]).sum(0)  # (T,)
    token_weights = torch.stack([torch.ones_like(key_weight), key_weight, value_weight])  # (3, T)
    return _WindowSums(
        key_second=torch.einsum("t,gtp,htp->pgh", key_weight.to(key_pairs.dtype), key_pairs, key_pairs.conj()),
        query_metric=torch.cat([group.query_metric for group in groups]) * weights.softmax_scale**2,
        value_weight=torch.cat([group.value_weight for group in groups]),
        gamma=torch.cat([group.gamma for group in groups]),
        gamma_weight=torch.cat([group.gamma_weight for group in groups]),
        query_norm=query_pairs.abs().sum(1),
        key_norm=key_pairs.abs().sum(1),
        weight=token_weights.sum(1),
        first=token_weights @ inputs,
        second=torch.stack([(inputs * weight[:, None]).T @ inputs for weight in token_weights]),
    )


def measure_layer(weights: LayerWeights, windows: Iterable[Tensor], frequencies: Tensor) -> LayerStatistics:
    """Measure one layer on windows of its attention inputs.

    Args:
        weights: The source layer, float64.
        windows: N inputs (T, D) of the attention (after the layer's norm), any float dtype; each is read once.
        frequencies: (P,) radians per position.

    Returns:
        Means over the `N·T` tokens.
    """
    total: list[Tensor] | None = None
    tokens = 0
    for window in windows:
        sums = _window_sums(weights, window.double(), frequencies)
        parts = [getattr(sums, field.name) for field in fields(_WindowSums)]
        total = parts if total is None else [a.add_(b) for a, b in zip(total, parts, strict=True)]
        tokens += window.shape[0]
    if total is None:
        raise ValueError("measure_layer needs at least one window")
    return _means(_WindowSums(*total), tokens)


def _means(sums: _WindowSums, tokens: int) -> LayerStatistics:
    tiny = torch.finfo(torch.float64).tiny
    weight = sums.weight.clamp(min=tiny)  # (3,)
    plain, keys, values = (
        Moments(first / total, second / total)
        for first, second, total in zip(sums.first, sums.second, weight, strict=True)
    )
    return LayerStatistics(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        input=plain,
        key_input=keys,
        value_input=values,
        key_second=sums.key_second / weight[1],
        query_metric=sums.query_metric / tokens,
        value_weight=sums.value_weight / tokens,
        gamma=sums.gamma / sums.gamma_weight.clamp(min=tiny),
        query_norm=sums.query_norm / tokens,
        key_norm=sums.key_norm / tokens,
        weight=sums.weight,
        gamma_weight=sums.gamma_weight,
    )


def combine(parts: Sequence[LayerStatistics], weights: Sequence[float] | None = None) -> LayerStatistics:
    """Statistics of one layer on several texts together: means weighted by the sums they are means over.

    Args:
        parts: One or more, of the same layer.
        weights: What each part's sums are multiplied by; without them the result is that of one measurement on all
            windows, up to rounding.

    Returns:
        The means; `tokens` counts those seen, whatever they weigh.
    """
    factors = torch.ones(len(parts), dtype=torch.float64) if weights is None else torch.tensor(weights).double()
    if len(parts) != len(factors) or not parts:
        raise ValueError("combine needs one weight for each of one or more parts")
    weight = torch.stack([part.weight * factor for part, factor in zip(parts, factors, strict=True)])  # (S, 3)
    gamma_weight = torch.stack([part.gamma_weight * factor for part, factor in zip(parts, factors, strict=True)])
    plain, keys, values = weight.unbind(1)
    return LayerStatistics(
        tokens=torch.stack([part.tokens for part in parts]).sum(),
        input=_mean_moments([part.input for part in parts], plain),
        key_input=_mean_moments([part.key_input for part in parts], keys),
        value_input=_mean_moments([part.value_input for part in parts], values),
        key_second=_mean([part.key_second for part in parts], keys),
        query_metric=_mean([part.query_metric for part in parts], plain),
        value_weight=_mean([part.value_weight for part in parts], plain),
        gamma=_mean([part.gamma for part in parts], gamma_weight),
        query_norm=_mean([part.query_norm for part in parts], plain),
        key_norm=_mean([part.key_norm for part in parts], plain),
        weight=weight.sum(0),
        gamma_weight=gamma_weight.sum(0),
    )


def _mean_moments(parts: Sequence[Moments], weight: Tensor) -> Moments:
    return Moments(_mean([part.mean for part in parts], weight), _mean([part.second for part in parts], weight))


def _mean(parts: Sequence[Tensor], weight: Tensor) -> Tensor:
    """Mean of `S` equal shapes, weighted by (S,) or by (S, *shape)."""
    share = weight / weight.sum(0).clamp(min=torch.finfo(weight.dtype).tiny)
    total = torch.zeros_like(parts[0])
    for part, own in zip(parts, share, strict=True):
        total = total + own * part
    return total
