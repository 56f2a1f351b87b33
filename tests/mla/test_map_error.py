"""Distances between the maps of two layers, beside the dense bilinear forms that they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_convert.mla.attention import MLAFactors, Norm, Rope
from mla_convert.mla.map_error import (
    CONTENT_SPAN,
    DISTANCES,
    InputMetric,
    LayerMaps,
    ScoreRows,
    ValueRows,
    map_errors,
    maps_of_factors,
    maps_of_weights,
)
from mla_convert.mla.weights import MLALayerWeights
from tests.convert.support import normal
from tests.tolerances import FLOAT64_ALGEBRA

HEADS, HIDDEN, NOPE, PAIRS, VALUE, LATENT = 3, 11, 5, 4, 6, 7


def paired(*shape: int, seed: int) -> Tensor:
    return torch.complex(normal(*shape, seed=seed), normal(*shape, seed=seed + 100))


def layer(seed: int, nope: int = NOPE, pairs: int = PAIRS) -> LayerMaps:
    scores = ScoreRows(
        normal(HEADS, nope, HIDDEN, seed=seed),
        normal(HEADS, nope, HIDDEN, seed=seed + 1),
        paired(HEADS, pairs, HIDDEN, seed=seed + 2),
        paired(HEADS, pairs, HIDDEN, seed=seed + 3),
        torch.tensor([1.0, 0.3, 0.01, 0.0007][:pairs], dtype=torch.float64),
    )
    values = ValueRows(normal(HEADS, HIDDEN, VALUE, seed=seed + 4), normal(HEADS, VALUE, HIDDEN, seed=seed + 5))
    return LayerMaps(scores, values)


def form(maps: LayerMaps, distance: int) -> Tensor:
    """(H, D, D): score of a query input and a key input that many positions before it."""
    rows = maps.scores
    turned = rows.k_rope * torch.exp(-1j * rows.frequencies * distance)[:, None]
    content = rows.q_content.transpose(1, 2) @ rows.k_content
    return content + (rows.q_rope.conj().transpose(1, 2) @ turned).real


def weighed(form: Tensor, metric: InputMetric) -> float:
    root_q, root_k = (torch.linalg.cholesky(m) for m in (metric.query, metric.key))
    return float((root_q.T @ form @ root_k).norm())


@pytest.mark.parametrize("weighted", [False, True])
def test_norms_are_those_of_the_dense_forms(weighted: bool) -> None:
    source, target = layer(1, nope=0), layer(20, pairs=2)
    eye = torch.eye(HIDDEN, dtype=torch.float64)
    metric = InputMetric(eye, eye)
    if weighted:
        spread = [normal(HIDDEN, HIDDEN, seed=seed) for seed in (50, 51)]
        metric = InputMetric(*(part @ part.T + eye for part in spread))
    means = [torch.stack([form(maps, d) for d in range(CONTENT_SPAN)]).mean(0) for maps in (source, target)]
    whole, position = [], []
    for distance in DISTANCES:
        ours, theirs = form(source, distance), form(target, distance)
        whole.append([weighed(ours - theirs, metric) ** 2, weighed(ours, metric) ** 2])
        left = [ours - means[0], theirs - means[1]]
        position.append([weighed(left[0] - left[1], metric) ** 2, weighed(left[0], metric) ** 2])
    outputs = [maps.values.output @ maps.values.value for maps in (source, target)]
    root = torch.linalg.cholesky(metric.key)

    found = map_errors(source, target, metric if weighted else None)

    for value, squares in ((found.key, whole), (found.position, position)):
        total = torch.tensor(squares, dtype=torch.float64).sum(0)
        assert value == pytest.approx(float((total[0] / total[1]).sqrt()), rel=FLOAT64_ALGEBRA)
    assert found.content == pytest.approx(
        weighed(means[0] - means[1], metric) / weighed(means[0], metric), rel=FLOAT64_ALGEBRA
    )
    expected = ((outputs[0] - outputs[1]) @ root).norm() / (outputs[0] @ root).norm()
    assert found.value == pytest.approx(float(expected), rel=FLOAT64_ALGEBRA)


def test_another_basis_is_no_difference() -> None:
    source = layer(1)
    turn, mix = (torch.linalg.qr(normal(size, size, seed=9))[0] for size in (NOPE, VALUE))
    phase = torch.exp(1j * normal(PAIRS, seed=3))[:, None]
    rows, values = source.scores, source.values
    moved = LayerMaps(
        replace(
            rows,
            q_content=2 * turn @ rows.q_content,
            k_content=turn @ rows.k_content / 2,
            q_rope=rows.q_rope * phase,
            k_rope=rows.k_rope * phase,
        ),
        ValueRows(values.output @ mix.T * 4, mix @ values.value / 4),
    )

    found = map_errors(source, moved)

    assert max(found.key, found.content, found.position, found.value) < 1e-7


@pytest.mark.parametrize(
    ("part", "larger"),
    [("k_content", "content"), ("k_rope", "position"), ("value", "value")],
)
def test_what_is_damaged_is_what_moves(part: str, larger: str) -> None:
    source = layer(1, pairs=2)
    if part == "value":
        target = replace(source, values=replace(source.values, value=source.values.value * 1.5))
    else:
        target = replace(source, scores=replace(source.scores, **{part: getattr(source.scores, part) * 1.5}))

    found = map_errors(source, target)

    errors = {name: getattr(found, name) for name in ("content", "position", "value")}
    assert max(errors, key=lambda name: errors[name]) == larger
    assert (found.value > 1e-6) == (part == "value")


def test_value_scaled_by_half_again_is_half_off() -> None:
    source = layer(1)
    target = replace(source, values=replace(source.values, value=source.values.value * 1.5))
    assert map_errors(source, target).value == pytest.approx(0.5, rel=FLOAT64_ALGEBRA)


def test_a_layer_of_zeros_is_its_own_copy_and_far_from_others() -> None:
    zeros = layer(1)
    zeros = LayerMaps(
        replace(zeros.scores, **{n: v * 0 for n, v in vars(zeros.scores).items() if n != "frequencies"}),
        ValueRows(zeros.values.output * 0, zeros.values.value),
    )
    assert vars(map_errors(zeros, zeros)) == {"key": 0.0, "content": 0.0, "position": 0.0, "value": 0.0}
    assert map_errors(zeros, layer(1)).key > 1


def test_stock_factors_and_plain_weights_of_one_layer_have_the_same_maps() -> None:
    weights = MLALayerWeights(
        q_nope=normal(HEADS, NOPE, HIDDEN, seed=1),
        q_nope_bias=None,
        q_rope=paired(HEADS, PAIRS, HIDDEN, seed=2),
        q_rope_bias=None,
        k_rope=paired(PAIRS, HIDDEN, seed=3),
        k_rope_bias=None,
        latent=normal(LATENT, HIDDEN, seed=4),
        k_up=normal(1, NOPE, LATENT, seed=5),
        v_up=normal(1, VALUE, LATENT, seed=6),
        output=normal(HEADS, HIDDEN, VALUE, seed=7),
        output_bias=None,
        frequencies=torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64),
        softmax_scale=0.3,
    )
    small = 2.0**-30

    def rows(pairs: Tensor) -> Tensor:
        return torch.stack([pairs.real, pairs.imag], dim=-2).flatten(-3, -2)

    factors = MLAFactors(
        q_down=None,
        q_down_bias=None,
        q_norm=None,
        q_up=torch.cat([weights.q_nope, rows(weights.q_rope)], dim=1),
        kv_down=torch.cat([weights.latent * small, rows(weights.k_rope)]),
        kv_down_bias=None,
        latent_norm=Norm(torch.full((LATENT,), 1e-3 / small, dtype=torch.float64), 1e-6),
        w_uk=weights.k_up.repeat_interleave(HEADS, dim=0),
        w_uv=weights.v_up.repeat_interleave(HEADS, dim=0),
        w_o=weights.output,
        output_bias=None,
        rope=Rope(weights.frequencies, interleaved=True),
        scale=0.3,
    )

    found = map_errors(maps_of_weights(weights), maps_of_factors(factors))

    assert max(vars(found).values()) < 1e-7
