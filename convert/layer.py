"""The conversion of one attention layer, as a pure function: weights and statistics in, MLA weights out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.convert.factorize import SPLIT_RULES, ContentMap, Factors, damped, joint, split
from mla_convert.convert.rope_rows import content_pairs, rotary_keys, rotary_queries, unrotated_keys
from mla_convert.convert.rope_select import RopeSlots
from mla_convert.convert.statistics import LayerStatistics, Moments
from mla_convert.convert.weights import AttentionShape, LayerWeights
from mla_convert.mla.rope import from_pairs, to_pairs
from mla_convert.mla.weights import MLALayerWeights


@dataclass(frozen=True)
class LayerPlan:
    """What to do with one layer, resolved: nothing is left to choose.

    Attributes:
        slots: Rotary slots.
        qk_nope_head_dim: Content key width per head.
        kv_lora_rank: Useful latent rank.
        factorization: `joint` or `split`.
        key_rank: Key rank of `split`; None lets the spectra of the layer decide.
        weighting: `weight`, `activation` or `output`.
        measured_gamma: Fold the measured constant of unrotated pairs into the queries; else the constant is 1.
        output_constant: Whether the profile can add a constant to the attention output.
        damping: Share of the mean input variance added to every direction.
        centred: Judge keys about their mean, and values too where the profile can add it to the output. Published
            methods use the raw second moment and keep no constant.
        balance: `α`, by which the keys are divided before the decomposition and multiplied after it.
        rank_rule: How `split` shares the rank without a key rank: `spectra`, or `care`.
        whole_keys: Decompose the keys with their rotary rows and drop those afterwards; else decompose what the
            slots leave.
    """

    slots: RopeSlots
    qk_nope_head_dim: int
    kv_lora_rank: int
    factorization: str
    key_rank: int | None
    weighting: str
    measured_gamma: bool
    output_constant: bool
    damping: float
    centred: bool = True
    balance: float = 1.0
    rank_rule: str = "spectra"
    whole_keys: bool = False


@dataclass(frozen=True)
class LayerQuality:
    """How far one converted layer is from its source, by its maps (before any forward pass).

    Attributes:
        key_map_error: Relative Frobenius error of the key map (rotary and content together).
        value_map_error: Relative Frobenius error of the value map.
        weighted_key_error: The same of the content keys in the metric of the factorisation, None without statistics.
        weighted_value_error: The same of the values, None without statistics.
        split_ranks: Key and value ranks of `split`, else None.
        energy_kept: Share of the weighted squared spectrum within the rank.
        singular_values: The weighted spectrum, descending.
        predicted_output_error: First-order expected squared change of the attention output, None unless the
            weighting is `output`.
    """

    key_map_error: float
    value_map_error: float
    weighted_key_error: float | None
    weighted_value_error: float | None
    split_ranks: tuple[int, int] | None
    energy_kept: float
    singular_values: tuple[float, ...]
    predicted_output_error: float | None


def _content_rows(pairs: Tensor, kept: tuple[int, ...], width: int) -> Tensor:
    """(heads, P, ...) complex -> (heads, width, ...) real rows of the kept pairs, zero rows up to `width`."""
    rows = from_pairs(pairs[:, list(kept)])
    if rows.shape[1] > width:
        raise ValueError(f"{len(kept)} content pairs do not fit qk_nope_head_dim {width}")
    return torch.cat([rows, rows.new_zeros(rows.shape[0], width - rows.shape[1], *rows.shape[2:])], dim=1)


def _gamma(weights: LayerWeights, statistics: LayerStatistics | None, plan: LayerPlan) -> Tensor:
    shape = weights.shape
    if plan.measured_gamma and statistics is not None:
        return statistics.gamma
    return torch.ones(shape.num_heads, shape.pairs, dtype=torch.complex128)


def _query_content(
    weights: LayerWeights, gamma: Tensor, kept: tuple[tuple[int, ...], ...], width: int
) -> tuple[Tensor, Tensor | None]:
    """Content query rows with each head's `γ` folded in: `Re conj(q) γ k = Re conj(conj(γ) q) k`."""
    rep = weights.shape.heads_per_group
    folded = to_pairs(weights.q) * gamma.conj()[:, :, None]  # (H, P, D)
    bias = None if weights.q_bias is None else to_pairs(weights.q_bias) * gamma.conj()
    rows, biases = [], []
    for head in range(weights.shape.num_heads):
        pairs = kept[head // rep]
        rows.append(_content_rows(folded[head : head + 1], pairs, width))
        if bias is not None:
            biases.append(_content_rows(bias[head : head + 1], pairs, width))
    return torch.cat(rows), torch.cat(biases) if biases else None


def _key_metric(
    statistics: LayerStatistics, gamma: Tensor, kept: tuple[tuple[int, ...], ...], width: int, groups: int
) -> Tensor:
    """(G·width, G·width) block-diagonal metric of the content keys, with `γ` folded as in the queries."""
    heads, half = gamma.shape
    blocks = []
    for group in range(groups):
        block = torch.zeros(width, width, dtype=torch.float64)
        size = len(kept[group])
        for head in range(group * heads // groups, (group + 1) * heads // groups):
            turned = _turn_metric(statistics.query_metric[head], gamma[head].conj())
            index = [*kept[group], *(pair + half for pair in kept[group])]
            block[: 2 * size, : 2 * size] += turned[index][:, index]
        blocks.append(block)
    metric: Tensor = torch.block_diag(*blocks)
    return metric


def _turn_metric(metric: Tensor, factor: Tensor) -> Tensor:
    """`T M Tᵀ` where `T` multiplies each half-split pair by a complex number: (d, d), (P,) -> (d, d)."""
    real, imaginary = torch.diag(factor.real), torch.diag(factor.imag)
    turn = torch.cat([torch.cat([real, -imaginary], 1), torch.cat([imaginary, real], 1)], 0)
    return turn @ metric @ turn.T


def _value_metric(weights: LayerWeights, statistics: LayerStatistics) -> Tensor:
    """(G·d, G·d) block-diagonal `Σ_{a∈g} π_a W_O^{aᵀ} W_O^a`."""
    per_head = torch.einsum("hDv,hDw->hvw", weights.o, weights.o) * statistics.value_weight[:, None, None]
    metric: Tensor = torch.block_diag(*per_head.unflatten(0, (weights.shape.num_kv_heads, -1)).sum(1))
    return metric


def _content_maps(
    weights: LayerWeights,
    statistics: LayerStatistics | None,
    plan: LayerPlan,
    key_rows: Tensor,
    gamma: Tensor,
    kept: tuple[tuple[int, ...], ...],
) -> tuple[ContentMap, ContentMap]:
    """Keys and values to factorise, each in the metric that the plan's weighting asks for."""
    shape = weights.shape
    value_rows = weights.v.flatten(0, 1)  # (G·d, D)
    identity = torch.eye(shape.hidden_size, dtype=torch.float64)
    key_metric = torch.eye(key_rows.shape[0], dtype=torch.float64) / plan.balance**2
    value_metric = torch.eye(value_rows.shape[0], dtype=torch.float64)
    key_covariance = value_covariance = identity
    if statistics is not None and plan.weighting != "weight":
        seen_keys, seen_values = _moments(statistics, plan)
        # A constant in the keys moves every score of a query alike; one in the values needs a place to go.
        key_covariance = damped(seen_keys.covariance(centred=plan.centred), plan.damping)
        value_centred = plan.centred and plan.output_constant
        value_covariance = damped(seen_values.covariance(centred=value_centred), plan.damping)
    if statistics is not None and plan.weighting == "output":
        judged = (tuple(range(shape.pairs)),) * shape.num_kv_heads if plan.whole_keys else kept
        width = key_rows.shape[0] // shape.num_kv_heads
        key_metric = _key_metric(statistics, gamma, judged, width, shape.num_kv_heads)
        value_metric = _value_metric(weights, statistics)
    return (
        ContentMap(key_rows, key_metric, key_covariance),
        ContentMap(value_rows, value_metric, value_covariance),
    )


def _moments(statistics: LayerStatistics, plan: LayerPlan) -> tuple[Moments, Moments]:
    """Input moments for keys and for values: by what a token's error costs, or every token alike."""
    if plan.weighting == "output":
        return statistics.key_input, statistics.value_input
    return statistics.input, statistics.input


def _output_bias(
    weights: LayerWeights, statistics: LayerStatistics | None, plan: LayerPlan, value_error: Tensor
) -> Tensor | None:
    """The source's output bias, its value bias through `W_O`, and the mean of what the latent does not carry."""
    if not plan.output_constant:
        return None
    constant = torch.zeros(value_error.shape[0], dtype=torch.float64)  # (G·d,)
    if weights.v_bias is not None:
        constant = constant + weights.v_bias.flatten()
    if statistics is not None and plan.weighting != "weight" and plan.centred:
        constant = constant + value_error @ _moments(statistics, plan)[1].mean
    per_head = constant.unflatten(0, (weights.shape.num_kv_heads, -1)).repeat_interleave(
        weights.shape.heads_per_group, dim=0
    )  # (H, d)
    bias = torch.einsum("hDv,hv->D", weights.o, per_head)
    return bias if weights.o_bias is None else bias + weights.o_bias


def _kept_pairs(plan: LayerPlan, shape: AttentionShape) -> tuple[tuple[int, ...], ...]:
    """For each key head, the pairs of its content rows."""
    if not plan.whole_keys:
        return content_pairs(plan.slots)
    rotated = {pair for pairs in plan.slots.mixes for pair in pairs}
    return (tuple(pair for pair in range(shape.pairs) if pair not in rotated),) * shape.num_kv_heads


def _key_rows(weights: LayerWeights, residual: Tensor, kept: tuple[tuple[int, ...], ...], plan: LayerPlan) -> Tensor:
    """(n, D) key rows of all heads to be decomposed."""
    if plan.whole_keys:
        return weights.k.flatten(0, 1)
    width = plan.qk_nope_head_dim
    return torch.cat([_content_rows(residual[g : g + 1], pairs, width) for g, pairs in enumerate(kept)]).flatten(0, 1)


def _key_up(factors: Factors, kept: tuple[tuple[int, ...], ...], plan: LayerPlan, shape: AttentionShape) -> Tensor:
    """(G, d_N, r) content keys from the latent."""
    if not plan.whole_keys:
        rows: Tensor = factors.key_up.unflatten(0, (shape.num_kv_heads, plan.qk_nope_head_dim))
        return rows
    whole = to_pairs(factors.key_up.unflatten(0, (shape.num_kv_heads, shape.head_dim)))  # (G, P, r)
    return torch.cat([_content_rows(whole[g : g + 1], pairs, plan.qk_nope_head_dim) for g, pairs in enumerate(kept)])


def convert_layer(
    weights: LayerWeights, statistics: LayerStatistics | None, plan: LayerPlan
) -> tuple[MLALayerWeights, LayerQuality]:
    """Convert one layer.

    Args:
        weights: Source layer, float64.
        statistics: Calibration of this layer; None only where the plan needs none.
        plan: Resolved choices.

    Returns:
        The MLA layer in float64 and its distance from the source.

    Raises:
        ValueError: If the plan needs statistics and none are given.
    """
    if statistics is None and plan.weighting != "weight":
        raise ValueError(f"weighting {plan.weighting!r} needs calibration statistics")
    shape, slots, width = weights.shape, plan.slots, plan.qk_nope_head_dim
    gamma = _gamma(weights, statistics, plan)
    kept = _kept_pairs(plan, shape)
    key_pairs = to_pairs(weights.k)  # (G, P, D)
    k_rope = rotary_keys(slots, key_pairs)  # (m, D)
    residual = unrotated_keys(slots, key_pairs, k_rope)
    q_nope, q_nope_bias = _query_content(weights, gamma, kept, width)

    key_rows = _key_rows(weights, residual, kept, plan)
    keys, values = _content_maps(weights, statistics, plan, key_rows, gamma, kept)
    ranks = _split_ranks(plan, keys, values)
    factors = joint(keys, values, plan.kv_lora_rank) if ranks is None else split(keys, values, *ranks)
    value_error = values.rows - factors.value_up @ factors.down
    k_bias, q_bias = weights.k_bias, weights.q_bias
    converted = MLALayerWeights(
        q_nope=q_nope,
        q_nope_bias=q_nope_bias,
        q_rope=rotary_queries(slots, to_pairs(weights.q)),
        q_rope_bias=None if q_bias is None else rotary_queries(slots, to_pairs(q_bias)[..., None])[..., 0],
        k_rope=k_rope,
        k_rope_bias=None if k_bias is None else rotary_keys(slots, to_pairs(k_bias)[..., None])[..., 0],
        latent=factors.down,
        k_up=_key_up(factors, kept, plan, shape),
        v_up=factors.value_up.unflatten(0, (shape.num_kv_heads, shape.head_dim)),
        output=weights.o,
        output_bias=_output_bias(weights, statistics, plan, value_error),
        frequencies=slots.frequencies,
        softmax_scale=weights.softmax_scale,
    )
    return converted, _quality(weights, plan, keys, values, factors, ranks, residual)


def _split_ranks(plan: LayerPlan, keys: ContentMap, values: ContentMap) -> tuple[int, int] | None:
    if plan.factorization == "joint":
        return None
    if plan.key_rank is None:
        return SPLIT_RULES[plan.rank_rule](keys, values, plan.kv_lora_rank)
    return plan.key_rank, plan.kv_lora_rank - plan.key_rank


def _quality(
    weights: LayerWeights,
    plan: LayerPlan,
    keys: ContentMap,
    values: ContentMap,
    factors: Factors,
    ranks: tuple[int, int] | None,
    residual: Tensor,
) -> LayerQuality:
    key_fit, value_fit = factors.key_up @ factors.down, factors.value_up @ factors.down
    key_loss, value_loss = keys.error(key_fit), values.error(value_fit)
    zero_keys, zero_values = torch.zeros_like(keys.rows), torch.zeros_like(values.rows)
    weighted = plan.weighting != "weight"
    predictable = plan.weighting == "output" and not plan.whole_keys
    return LayerQuality(
        key_map_error=_ratio(_key_error(weights, plan, keys.rows - key_fit, residual).norm(), weights.k.norm()),
        value_map_error=_ratio((values.rows - value_fit).norm(), weights.v.norm()),
        weighted_key_error=_share(key_loss, keys.error(zero_keys)) if weighted else None,
        weighted_value_error=_share(value_loss, values.error(zero_values)) if weighted else None,
        split_ranks=ranks,
        energy_kept=factors.energy_kept,
        singular_values=tuple(float(value) for value in factors.singular_values),
        predicted_output_error=key_loss + value_loss if predictable else None,
    )


def _key_error(weights: LayerWeights, plan: LayerPlan, fit_error: Tensor, residual: Tensor) -> Tensor:
    """Rows of the key map that the converted layer does not compute."""
    if not plan.whole_keys:
        # Rotary rows are exact, so the whole error of the key map is the error of its content rows.
        return fit_error
    error = to_pairs(fit_error.unflatten(0, (weights.shape.num_kv_heads, weights.shape.head_dim)))  # (G, P, D)
    rotated = sorted({pair for pairs in plan.slots.mixes for pair in pairs})
    error[:, rotated] = residual[:, rotated]
    return error


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if float(whole) > 0 else 0.0


def _share(part: float, whole: float) -> float:
    return (max(part, 0.0) / whole) ** 0.5 if whole > 0 else 0.0
