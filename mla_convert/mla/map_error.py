"""How far the maps of one attention layer are from those of another, whatever bases they are written in.

A score is a bilinear form of two inputs that depends on their distance Δ, `Re Σ_m conj(q_m) e^{-iθ_m Δ} k_m` plus the
content part (math.md 1), and what a head adds is `W_O W_V`. Neither changes with the basis of heads or latent, so a
source and a conversion can be compared without knowing how one was made from the other.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.mla.attention import MLAFactors, Norm
from mla_convert.mla.weights import MLALayerWeights

# A score's mean over the first distances is its content, what is left of it its position.
CONTENT_SPAN = 256
DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class ScoreRows:
    """Rows of the score of each query head, float64; the softmax scale is in the queries.

    Attributes:
        q_content: (H, n, D).
        k_content: (H, n, D).
        q_rope: (H, m, D) complex.
        k_rope: (H, m, D) complex.
        frequencies: (m,) radians per position.
    """

    q_content: Tensor
    k_content: Tensor
    q_rope: Tensor
    k_rope: Tensor
    frequencies: Tensor


@dataclass(frozen=True)
class ValueRows:
    """Rows of what each query head adds to the stream, float64.

    Attributes:
        output: (H, D, d_V).
        value: (H, d_V, D).
    """

    output: Tensor
    value: Tensor


@dataclass(frozen=True)
class LayerMaps:
    """Both maps of a layer."""

    scores: ScoreRows
    values: ValueRows


@dataclass(frozen=True)
class MapErrors:
    """Frobenius norms of differences over those of the first layer's maps; all heads and `DISTANCES` together.

    Attributes:
        key: Of the whole score.
        content: Of its mean over the distances below `CONTENT_SPAN`.
        position: Of the rest.
        value: Of `W_O W_V`.
    """

    key: float
    content: float
    position: float
    value: float


@dataclass(frozen=True)
class InputMetric:
    """How often the text uses each input direction.

    Attributes:
        query: (D, D) second moment of the inputs of queries.
        key: (D, D) covariance of the inputs of keys and values: what is the same for all keys moves no weight.
    """

    query: Tensor
    key: Tensor


def maps_of_weights(weights: MLALayerWeights) -> LayerMaps:
    """The maps of a converted layer before a profile lays it out."""
    rep = weights.heads_per_group
    k_content = torch.einsum("gnr,rD->gnD", weights.k_up, weights.latent).repeat_interleave(rep, dim=0)
    value = torch.einsum("gvr,rD->gvD", weights.v_up, weights.latent).repeat_interleave(rep, dim=0)
    scale = weights.softmax_scale
    return LayerMaps(
        ScoreRows(
            weights.q_nope * scale,
            k_content,
            weights.q_rope * scale,
            weights.k_rope.expand(weights.q_rope.shape),
            weights.frequencies,
        ),
        ValueRows(weights.output, value),
    )


def maps_of_factors(factors: MLAFactors) -> LayerMaps:
    """The maps of a stock layer in float64. A norm is replaced by its factor at an input of zero.

    That is what it is for a conversion's neutralised norm (design.md, output profiles), at any input.
    """
    latent = factors.latent_width
    down = _normed(factors.kv_down[:latent], _head(factors.kv_down_bias, latent), factors.latent_norm)  # (d_c, D)
    up = factors.q_up if factors.q_down is None else _through_bottleneck(factors)  # (H, d_N + d_R, D)
    nope = factors.nope_width
    queries = up * factors.scale
    key_rope = _complex(factors.kv_down[None, latent:], factors.rope.interleaved) * factors.rope.amplitude
    query_rope = _complex(queries[:, nope:], factors.rope.interleaved) * factors.rope.amplitude
    return LayerMaps(
        ScoreRows(
            queries[:, :nope],
            torch.einsum("hnc,cD->hnD", factors.w_uk, down),
            query_rope,
            key_rope.expand(query_rope.shape),
            factors.rope.frequencies,
        ),
        ValueRows(factors.w_o, torch.einsum("hvc,cD->hvD", factors.w_uv, down)),
    )


def map_errors(source: LayerMaps, target: LayerMaps, metric: InputMetric | None = None) -> MapErrors:
    """Distance of `target`'s maps from `source`'s.

    Args:
        source: What is right.
        target: What is judged.
        metric: Of the inputs; None takes every direction alike.
    """
    queries, keys = (None, None) if metric is None else (metric.query, metric.key)
    key, content, position = _score_errors(source.scores, target.scores, queries, keys)
    return MapErrors(key, content, position, _value_error(source.values, target.values, keys))


def _score_errors(
    source: ScoreRows, target: ScoreRows, query_metric: Tensor | None, key_metric: Tensor | None
) -> tuple[float, float, float]:
    """The whole, content and position."""
    rows = [_stacked(part.q_content, part.q_rope) for part in (source, target)]
    seen = [_stacked(part.k_content, part.k_rope) for part in (source, target)]
    own = rows[0].shape[1]
    queries = _gram(torch.cat([rows[0], -rows[1]], dim=1), query_metric)  # (H, R, R)
    keys = _gram(torch.cat(seen, dim=1), key_metric)  # (H, R, R)
    means = [_turns(part.frequencies, torch.arange(CONTENT_SPAN)).mean(0) for part in (source, target)]
    contents = [part.q_content.shape[1] for part in (source, target)]

    def squares(turns: list[Tensor], content: float) -> tuple[float, float]:
        turn = torch.block_diag(*(_turn(n, c, content) for n, c in zip(contents, turns, strict=True)))
        products = queries * (turn @ keys @ turn.T)
        return float(products.sum()), float(products[:, :own, :own].sum())

    whole, position = [0.0, 0.0], [0.0, 0.0]
    for distance in DISTANCES:
        turns = [_turns(part.frequencies, torch.tensor([distance]))[0] for part in (source, target)]
        for total, part in (
            (whole, squares(turns, 1.0)),
            (position, squares([c - mean for c, mean in zip(turns, means, strict=True)], 0.0)),
        ):
            total[0] += part[0]
            total[1] += part[1]
    return _relative(*whole), _relative(*squares(means, 1.0)), _relative(*position)


def _value_error(source: ValueRows, target: ValueRows, metric: Tensor | None) -> float:
    outputs = torch.cat([source.output, -target.output], dim=2).transpose(1, 2)  # (H, d + d_V, D)
    values = torch.cat([source.value, target.value], dim=1)  # (H, d + d_V, D)
    products = _gram(outputs, None) * _gram(values, metric)
    own = source.value.shape[1]
    return _relative(float(products.sum()), float(products[:, :own, :own].sum()))


def _relative(error: float, size: float) -> float:
    # Rounding may leave a difference of nothing a little below zero.
    return math.sqrt(max(error, 0.0) / size) if size > 0 else math.sqrt(max(error, 0.0))


def _stacked(content: Tensor, rope: Tensor) -> Tensor:
    """(H, n, D), (H, m, D) complex -> (H, n + 2m, D)."""
    return torch.cat([content, rope.real, rope.imag], dim=1)


def _gram(rows: Tensor, metric: Tensor | None) -> Tensor:
    """(H, R, D) -> (H, R, R)."""
    return (rows if metric is None else rows @ metric) @ rows.transpose(1, 2)


def _turns(frequencies: Tensor, distances: Tensor) -> Tensor:
    """(m,), (N,) -> (N, m) complex `e^{-iθΔ}`."""
    angle = -distances.double()[:, None] * frequencies.double()
    return torch.polar(torch.ones_like(angle), angle)


def _turn(content: int, turns: Tensor, content_factor: float) -> Tensor:
    """(n + 2m, n + 2m): what multiplies the key rows of `_stacked`."""
    eye = torch.eye(content, dtype=torch.float64) * content_factor
    real, imag = torch.diag(turns.real), torch.diag(turns.imag)
    turn: Tensor = torch.block_diag(eye, torch.cat([torch.cat([real, -imag], 1), torch.cat([imag, real], 1)]))
    return turn


def _complex(rows: Tensor, interleaved: bool) -> Tensor:
    """(H, d_R, D) real rows -> (H, d_R / 2, D) complex."""
    x, y = (rows[:, 0::2], rows[:, 1::2]) if interleaved else rows.chunk(2, dim=1)
    return torch.complex(x.contiguous(), y.contiguous())


def _head(bias: Tensor | None, width: int) -> Tensor | None:
    return None if bias is None else bias[:width]


def _normed(rows: Tensor, bias: Tensor | None, norm: Norm | None) -> Tensor:
    """(r, D): the rows with the norm's factor at an input of zero."""
    if norm is None:
        return rows
    power = 0.0 if bias is None else float(bias.square().mean())
    return rows * (norm.weight / math.sqrt(power + norm.eps))[:, None]


def _through_bottleneck(factors: MLAFactors) -> Tensor:
    """(H, d_N + d_R, D): query rows over the inputs of the layer."""
    assert factors.q_down is not None  # the caller has one
    down = _normed(factors.q_down, factors.q_down_bias, factors.q_norm)  # (r_q, D)
    return torch.einsum("hnr,rD->hnD", factors.q_up, down)


PROBES = 32
"""Numbers that stand for a map: each a random projection, so that their relative change is that of the map."""


@dataclass(frozen=True)
class MapProbes:
    """A layer's maps in a few numbers, whatever basis they are written in; every tensor is (`PROBES`,) float64.

    Attributes:
        content: Of the score's mean over the distances below `CONTENT_SPAN`, all heads.
        position: Of the rest at the distances `DISTANCES`.
        value: Of `W_O W_V`.
    """

    content: Tensor
    position: Tensor
    value: Tensor


def map_probes(maps: LayerMaps) -> MapProbes:
    """Project the maps on fixed vectors of signs: `Σ_h σ_h u^T A_h v` for `PROBES` draws of `σ`, `u` and `v`.

    The signs are bits of SHAKE-256, so that they are the same everywhere. Of a change of the maps by ε, relative in the
    Frobenius norm, the numbers show about ε (Johnson and Lindenstrauss, 1984), whatever its direction.
    """
    heads, hidden = maps.values.output.shape[:2]
    queries, keys = (_signs(name, PROBES, hidden) for name in ("query", "key"))
    scores = maps.scores
    means = _turns(scores.frequencies, torch.arange(CONTENT_SPAN)).mean(0)  # (m,)
    q, k = (
        torch.einsum("hnD,pD->phn", rows, probe)
        for rows, probe in ((scores.q_content, queries), (scores.k_content, keys))
    )
    q_rope, k_rope = (
        torch.einsum("hmD,pD->phm", rows, probe.to(rows.dtype))
        for rows, probe in ((scores.q_rope, queries), (scores.k_rope, keys))
    )
    products = q_rope.conj() * k_rope  # (P, H, m)
    content = (q * k).sum(-1) + (products * means).sum(-1).real  # (P, H)
    turns = _turns(scores.frequencies, torch.tensor(DISTANCES)) - means  # (N, m)
    position = torch.einsum("phm,nm->nph", products, turns).real  # (N, P, H)
    value = torch.einsum("hDv,pD->phv", maps.values.output, queries)
    value = (value * torch.einsum("hvD,pD->phv", maps.values.value, keys)).sum(-1)  # (P, H)
    weights = _signs("head", PROBES, heads)
    mixing = _signs("distance", len(DISTANCES), PROBES * heads).view(len(DISTANCES), PROBES, heads)
    return MapProbes((content * weights).sum(-1), (position * mixing).sum((0, 2)), (value * weights).sum(-1))


def _signs(name: str, rows: int, columns: int) -> Tensor:
    """(rows, columns) float64 of ±1."""
    count = rows * columns
    drawn = torch.frombuffer(bytearray(hashlib.shake_256(name.encode()).digest(-(-count // 8))), dtype=torch.uint8)
    bits = (drawn[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return (2.0 * bits.flatten()[:count].double() - 1.0).view(rows, columns)
