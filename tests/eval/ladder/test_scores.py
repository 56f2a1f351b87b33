"""Scores, their parts and their distances, written out token by token."""

from __future__ import annotations

import math

import pytest
import torch

from mla_convert.convert.source_reading import source_attention
from mla_convert.convert.weights import AttentionShape, LayerWeights
from mla_convert.eval.ladder.scores import (
    WindowAttention,
    causal_softmax,
    rotary_scores,
    score_errors,
    source_window,
    target_window,
)
from mla_convert.mla.attention import MLAFactors, Norm, Rope, expanded
from tests.convert.support import normal
from tests.tolerances import ABSORBED_FLOAT64, FLOAT64_ALGEBRA

TOKENS, HIDDEN, HEADS, GROUPS, SIZE = 7, 10, 4, 2, 6
FREQUENCIES = torch.tensor([1.0, 0.2, 0.01], dtype=torch.float64)


def source() -> LayerWeights:
    shape = AttentionShape(HIDDEN, HEADS, GROUPS, SIZE)
    return LayerWeights(
        shape=shape,
        q=normal(HEADS, SIZE, HIDDEN, seed=1),
        k=normal(GROUPS, SIZE, HIDDEN, seed=2),
        v=normal(GROUPS, SIZE, HIDDEN, seed=3),
        o=normal(HEADS, HIDDEN, SIZE, seed=4),
        q_bias=normal(HEADS, SIZE, seed=5),
        k_bias=normal(GROUPS, SIZE, seed=6),
        v_bias=normal(GROUPS, SIZE, seed=7),
        o_bias=normal(HIDDEN, seed=8),
        softmax_scale=0.3,
    )


def factors(interleaved: bool) -> MLAFactors:
    nope, rope, latent, value = 5, 6, 8, 3
    return MLAFactors(
        q_down=None,
        q_down_bias=None,
        q_norm=None,
        q_up=normal(HEADS, nope + rope, HIDDEN, seed=11),
        kv_down=normal(latent + rope, HIDDEN, seed=12),
        kv_down_bias=normal(latent + rope, seed=13),
        latent_norm=Norm(normal(latent, seed=14), 1e-6),
        w_uk=normal(HEADS, nope, latent, seed=15),
        w_uv=normal(HEADS, value, latent, seed=16),
        w_o=normal(HEADS, HIDDEN, value, seed=17),
        output_bias=normal(HIDDEN, seed=18),
        rope=Rope(FREQUENCIES, interleaved, amplitude=1.1),
        scale=0.4,
    )


def test_the_source_s_window_is_its_attention() -> None:
    inputs = normal(TOKENS, HIDDEN, seed=20)
    found = source_window(source(), inputs, FREQUENCIES)
    expected = source_attention(source(), inputs, FREQUENCIES)
    assert float((found.output - expected).abs().max()) < FLOAT64_ALGEBRA * float(expected.abs().max())


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_target_s_window_is_its_expanded_attention(interleaved: bool) -> None:
    inputs, layer = normal(TOKENS, HIDDEN, seed=20), factors(interleaved)
    found = target_window(layer, inputs)
    step = expanded(layer, inputs[None], torch.arange(TOKENS)[None])
    assert float((found.output - step.output[0]).norm() / step.output.norm()) < ABSORBED_FLOAT64
    assert float((causal_softmax(found.scores) - step.weights[0]).abs().max()) < ABSORBED_FLOAT64


def test_content_is_the_score_s_mean_over_the_window_s_distances() -> None:
    queries, keys = (
        torch.complex(normal(1, TOKENS, 3, seed=seed), normal(1, TOKENS, 3, seed=seed + 1)) for seed in (1, 3)
    )
    scores, content = rotary_scores(queries, keys, FREQUENCIES)
    for query in range(TOKENS):
        for key in range(TOKENS):
            at = [
                sum(
                    (queries[0, query, pair].conj() * keys[0, key, pair] * torch.exp(-1j * FREQUENCIES[pair] * d)).real
                    for pair in range(3)
                )
                for d in [query - key, *range(TOKENS)]
            ]
            assert float(scores[0, query, key]) == pytest.approx(float(at[0]), rel=1e-9)
            assert float(content[0, query, key]) == pytest.approx(float(sum(at[1:])) / TOKENS, rel=1e-9)


def plain_errors(source: WindowAttention, target: WindowAttention) -> dict[str, tuple[float, ...]]:
    """The same, one row at a time."""
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in ("content", "position", "score")}
    row_max = lse = variation = 0.0
    for head in range(source.scores.shape[0]):
        for query in range(source.scores.shape[1]):
            seen = slice(0, query + 1)
            rows = [part[head, query, seen] - part[head, query, seen].mean() for part in (source.scores, target.scores)]
            fixed = [
                part[head, query, seen] - part[head, query, seen].mean() for part in (source.content, target.content)
            ]
            for name, ours, theirs in (
                ("score", *rows),
                ("content", *fixed),
                ("position", rows[0] - fixed[0], rows[1] - fixed[1]),
            ):
                sums[name] += torch.stack([(ours - theirs).square().sum(), ours.square().sum()])
            row_max += abs(float(rows[0].max() - rows[1].max()))
            lse += abs(math.log(float(rows[0].exp().sum())) - math.log(float(rows[1].exp().sum())))
            variation += float((rows[0].softmax(-1) - rows[1].softmax(-1)).abs().sum()) / 2
    means = {"row_max": (row_max,), "lse": (lse,), "total_variation": (variation,)}
    return {**{name: tuple(pair.tolist()) for name, pair in sums.items()}, **means}


def test_errors_are_those_of_each_row() -> None:
    inputs = normal(TOKENS, HIDDEN, seed=20)
    pair = source_window(source(), inputs, FREQUENCIES), target_window(factors(True), inputs)

    found, expected = score_errors(*pair), plain_errors(*pair)

    for name, expected_value in expected.items():
        value = getattr(found, name)
        assert (value if isinstance(value, tuple) else (value,)) == pytest.approx(expected_value, rel=1e-9)
    assert found.rows == HEADS * TOKENS
    both = found.plus(found)
    assert both.score == (2 * found.score[0], 2 * found.score[1])
    assert (both.rows, both.lse) == (2 * found.rows, 2 * found.lse)


def test_a_constant_for_all_keys_of_a_query_is_no_error() -> None:
    inputs = normal(TOKENS, HIDDEN, seed=20)
    window = source_window(source(), inputs, FREQUENCIES)
    moved = WindowAttention(
        window.scores + normal(HEADS, TOKENS, 1, seed=5),
        window.content + normal(HEADS, TOKENS, 1, seed=6),
        window.output,
    )

    found = score_errors(window, moved)

    assert max(found.score[0], found.content[0], found.position[0], found.row_max, found.lse) < FLOAT64_ALGEBRA
    assert found.total_variation < FLOAT64_ALGEBRA
