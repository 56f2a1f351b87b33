"""Attention scores of one window under a source layer and under its conversion, and how far apart they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.convert.statistics import project
from mla_convert.convert.weights import LayerWeights
from mla_convert.mla.attention import MLAFactors, expand_value, project_query, project_rows
from mla_convert.mla.rope import rotation, to_pairs


@dataclass(frozen=True)
class WindowAttention:
    """One window in one layer, float64.

    Attributes:
        scores: (H, T, T) scaled scores; what lies ahead of a query is meaningless.
        content: (H, T, T) the same with each pair's turn replaced by its mean over the window's distances: what does
            not depend on where query and key stand.
        output: (T, D) what attention adds to the stream.
    """

    scores: Tensor
    content: Tensor
    output: Tensor


@dataclass(frozen=True)
class ScoreErrors:
    """Sums over heads and queries of one window, from which errors over all windows are made.

    Scores are taken about their mean over the keys that a query sees: what moves them all alike moves no weight.
    """

    content: tuple[float, float]
    position: tuple[float, float]
    score: tuple[float, float]
    row_max: float
    lse: float
    total_variation: float
    rows: int

    def plus(self, other: ScoreErrors) -> ScoreErrors:
        """Both windows together."""

        def added(ours: tuple[float, float], theirs: tuple[float, float]) -> tuple[float, float]:
            return ours[0] + theirs[0], ours[1] + theirs[1]

        return ScoreErrors(
            added(self.content, other.content),
            added(self.position, other.position),
            added(self.score, other.score),
            self.row_max + other.row_max,
            self.lse + other.lse,
            self.total_variation + other.total_variation,
            self.rows + other.rows,
        )


def source_window(weights: LayerWeights, inputs: Tensor, frequencies: Tensor) -> WindowAttention:
    """The source's attention on (T, D) float64 inputs, all heads at once.

    Args:
        weights: Of the layer.
        inputs: After the layer's input norm.
        frequencies: (P,).
    """
    queries = _pairs(project(weights.q, weights.q_bias, inputs)) * weights.softmax_scale  # (H, T, P)
    rep = weights.shape.heads_per_group
    keys = _pairs(project(weights.k, weights.k_bias, inputs)).repeat_interleave(rep, dim=0)  # (H, T, P)
    values = project(weights.v, weights.v_bias, inputs).repeat_interleave(rep, dim=0)  # (H, T, d)
    scores, content = rotary_scores(queries, keys, frequencies)
    heads = causal_softmax(scores) @ values  # (H, T, d)
    output = torch.einsum("htd,hDd->tD", heads, weights.o)
    return WindowAttention(scores, content, output if weights.o_bias is None else output + weights.o_bias)


def target_window(factors: MLAFactors, inputs: Tensor) -> WindowAttention:
    """A converted layer's attention on (T, D) float64 inputs, from its factors (DeepSeek-V2, section 2.1)."""
    zeros = torch.zeros(1, len(inputs), dtype=torch.int64)  # turned below, so not here
    nope, rope = project_query(factors, inputs[None], zeros)
    rows = project_rows(factors, inputs[None], zeros)
    keys = torch.einsum("kc,hnc->hkn", rows.latent[0], factors.w_uk)  # (H, T, d_N)
    fixed = nope[0].transpose(0, 1) @ keys.transpose(1, 2)  # (H, T, T)
    query_pairs = _pairs(rope[0].transpose(0, 1))  # (H, T, m)
    key_pairs = _pairs(rows.rope).expand(query_pairs.shape)  # (H, T, m)
    turned, mean = rotary_scores(query_pairs, key_pairs, factors.rope.frequencies)
    scores, content = (fixed + turned) * factors.scale, (fixed + mean) * factors.scale
    latent = causal_softmax(scores) @ rows.latent[0]  # (H, T, d_c)
    return WindowAttention(scores, content, output_of_latents(factors, latent.transpose(0, 1)))


def output_of_latents(factors: MLAFactors, latent: Tensor) -> Tensor:
    """(q, H, d_c) weighted latents -> (q, D): what the layer adds to the stream."""
    heads = expand_value(latent[None], factors.w_uv)[0]  # (q, H, d_V)
    output = torch.einsum("qhv,hDv->qD", heads, factors.w_o)
    return output if factors.output_bias is None else output + factors.output_bias


def rotary_scores(queries: Tensor, keys: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """(H, T, m) complex queries and keys -> (H, T, T) turned by their distance, and turned by the mean over distances.

    `Re Σ_m conj(q_m) e^{-iθ_m (t-j)} k_m` (math.md 1).
    """
    length = queries.shape[1]
    turn = rotation(torch.arange(length), frequencies)  # (T, m), e^{iθp}
    mean = turn.conj().mean(0)  # (m,), over the distances 0 … T - 1
    scores = ((queries * turn).conj() @ (keys * turn).transpose(1, 2)).real
    return scores, (queries.conj() @ (keys * mean).transpose(1, 2)).real


def causal_softmax(scores: Tensor) -> Tensor:
    """(H, T, T) -> weights of the keys up to each query."""
    return scores.masked_fill(_ahead(scores.shape[-1]), float("-inf")).softmax(-1)


def score_errors(source: WindowAttention, target: WindowAttention) -> ScoreErrors:
    """Distances of the scores, their parts and their softmax, of one window."""
    ahead = _ahead(source.scores.shape[-1])
    ours, theirs = _centred(source.scores, ahead), _centred(target.scores, ahead)
    contents = _centred(source.content, ahead), _centred(target.content, ahead)
    positions = ours - contents[0], theirs - contents[1]
    hidden = [part.masked_fill(ahead, float("-inf")) for part in (ours, theirs)]
    highest = [part.max(-1).values for part in hidden]
    sums = [part.logsumexp(-1) for part in hidden]
    weights = [part.softmax(-1) for part in hidden]
    return ScoreErrors(
        content=_squares(*contents),
        position=_squares(*positions),
        score=_squares(ours, theirs),
        row_max=float((highest[0] - highest[1]).abs().sum()),
        lse=float((sums[0] - sums[1]).abs().sum()),
        total_variation=float((weights[0] - weights[1]).abs().sum() / 2),
        rows=highest[0].numel(),
    )


def _pairs(rows: Tensor) -> Tensor:
    """(H, T, d) half-split -> (H, T, d / 2) complex."""
    return to_pairs(rows.transpose(1, 2)).transpose(1, 2)


def _ahead(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def _centred(scores: Tensor, ahead: Tensor) -> Tensor:
    """About the mean of what a query sees; 0 ahead of it."""
    seen = scores.masked_fill(ahead, 0.0)
    mean = seen.sum(-1, keepdim=True) / (~ahead).sum(-1, keepdim=True)
    return (seen - mean).masked_fill(ahead, 0.0)


def _squares(source: Tensor, target: Tensor) -> tuple[float, float]:
    return float((target - source).square().sum()), float(source.square().sum())
