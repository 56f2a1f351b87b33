from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from mla_convert.convert import factorize
from mla_convert.convert.factorize import ContentMap, Factors, damped, joint, psd_sqrt, split, split_ranks
from tests.convert.support import SEEDED, normal, spd
from tests.tolerances import FLOAT64_ALGEBRA

KEYS, VALUES, HIDDEN = 6, 8, 11


def content(rows: int, seed: int, *, hidden: int = HIDDEN, covariance: Tensor | None = None) -> ContentMap:
    return ContentMap(
        rows=normal(rows, hidden, seed=seed),
        metric=spd(rows, seed + 1),
        covariance=spd(hidden, seed + 2) if covariance is None else covariance,
    )


def one_metric(seed: int = 0) -> tuple[ContentMap, ContentMap]:
    """Keys and values under the same input covariance: one SVD is the optimum."""
    covariance = spd(HIDDEN, seed + 90)
    return content(KEYS, seed, covariance=covariance), content(VALUES, seed + 10, covariance=covariance)


def two_metrics(seed: int = 0) -> tuple[ContentMap, ContentMap]:
    return content(KEYS, seed), content(VALUES, seed + 10)


def plain(target: ContentMap) -> ContentMap:
    rows, hidden = target.rows.shape
    return replace(
        target, metric=torch.eye(rows, dtype=torch.float64), covariance=torch.eye(hidden, dtype=torch.float64)
    )


def loss(keys: ContentMap, values: ContentMap, factors: Factors) -> float:
    return keys.error(factors.key_up @ factors.down) + values.error(factors.value_up @ factors.down)


def tails(target: ContentMap) -> NDArray[np.float64]:
    """`tails[r]`: the least weighted error of rank `r`, from numpy's SVD between Cholesky factors."""
    left = np.linalg.cholesky(target.metric.numpy())
    right = np.linalg.cholesky(target.covariance.numpy())
    singular = np.linalg.svd(left.T @ target.rows.numpy() @ right, compute_uv=False)
    return np.append(np.cumsum(singular[::-1] ** 2)[::-1], 0.0)


def stacked(keys: ContentMap, values: ContentMap) -> ContentMap:
    return ContentMap(
        torch.cat([keys.rows, values.rows]), torch.block_diag(keys.metric, values.metric), values.covariance
    )


def test_the_error_is_the_expected_squared_output_error() -> None:
    target = content(KEYS, 3)
    approximation = normal(KEYS, HIDDEN, seed=4)
    difference = (target.rows - approximation).numpy()

    total = 0.0
    for i in range(KEYS):
        for j in range(KEYS):
            total += float(target.metric[i, j]) * difference[j] @ target.covariance.numpy() @ difference[i]

    assert target.error(approximation) == pytest.approx(total, rel=FLOAT64_ALGEBRA)


@pytest.mark.parametrize("rank", range(1, KEYS + VALUES + 1))
def test_joint_in_the_identity_metric_is_the_truncated_svd(rank: int) -> None:
    keys, values = (plain(target) for target in one_metric())
    left, singular, right = np.linalg.svd(stacked(keys, values).rows.numpy(), full_matrices=False)
    best = (left[:, :rank] * singular[:rank]) @ right[:rank]

    factors = joint(keys, values, rank)

    rebuilt = torch.cat([factors.key_up, factors.value_up]) @ factors.down
    assert np.allclose(rebuilt.numpy(), best, rtol=0, atol=1e-9)
    assert np.allclose(factors.singular_values.numpy(), singular, rtol=1e-9)
    kept = (singular[:rank] ** 2).sum() / (singular**2).sum()
    assert factors.energy_kept == pytest.approx(kept, rel=1e-9)


@pytest.mark.parametrize("rank", range(1, HIDDEN + 1))
def test_joint_reaches_the_least_error_of_its_metric(rank: int) -> None:
    keys, values = one_metric()

    found = loss(keys, values, joint(keys, values, rank))

    scale = tails(stacked(keys, values))
    assert found == pytest.approx(scale[rank], rel=1e-8, abs=1e-10 * scale[0])


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_no_random_factors_are_better(rank: int) -> None:
    keys, values = one_metric()
    best = loss(keys, values, joint(keys, values, rank))

    for seed in range(60):
        down = normal(rank, HIDDEN, seed=seed)
        # Every competitor gets the best ups its latent allows.
        seen = down @ keys.covariance
        inverse = torch.linalg.inv(seen @ down.T)
        key_up, value_up = keys.rows @ seen.T @ inverse, values.rows @ seen.T @ inverse
        rebuilt = keys.error(key_up @ down) + values.error(value_up @ down)
        assert rebuilt >= best * (1 - 1e-9)


@pytest.mark.parametrize("rank", [1, 4, 8])
@pytest.mark.parametrize("maps", [one_metric, two_metrics])
def test_no_small_change_of_the_factors_is_better(rank: int, maps: object) -> None:
    keys, values = maps()  # type: ignore[operator]
    factors = joint(keys, values, rank)
    best = loss(keys, values, factors)

    for seed in range(30):
        for part in ("down", "key_up", "value_up"):
            old: Tensor = getattr(factors, part)
            # The alternation stops near its fixed point: a step must be long enough to be uphill there.
            moved = old + 0.03 * float(old.norm()) / old.numel() ** 0.5 * normal(*old.shape, seed=seed)
            assert loss(keys, values, replace(factors, **{part: moved})) > best


@pytest.mark.parametrize(("key_rank", "value_rank"), [(0, 3), (2, 3), (5, 7), (6, 8)])
def test_split_reaches_the_least_error_of_each(key_rank: int, value_rank: int) -> None:
    keys, values = two_metrics()

    factors = split(keys, values, key_rank, value_rank)

    key_error = keys.error(factors.key_up @ factors.down)
    value_error = values.error(factors.value_up @ factors.down)
    assert key_error == pytest.approx(tails(keys)[key_rank], rel=1e-8, abs=1e-10)
    assert value_error == pytest.approx(tails(values)[value_rank], rel=1e-8, abs=1e-10)


def test_the_latent_of_split_is_a_concatenation() -> None:
    factors = split(*two_metrics(), 2, 3)

    assert factors.down.shape == (5, HIDDEN)
    assert factors.key_up.shape == (KEYS, 5)
    assert factors.value_up.shape == (VALUES, 5)
    assert not factors.key_up[:, 2:].any()
    assert not factors.value_up[:, :2].any()


@SEEDED
@given(seed=st.integers(0, 50), rank=st.integers(1, KEYS + VALUES))
def test_split_ranks_are_the_best_way_to_share(seed: int, rank: int) -> None:
    keys, values = two_metrics(seed)
    key_tails, value_tails = tails(keys), tails(values)

    key_rank, value_rank = split_ranks(keys, values, rank)

    assert key_rank + value_rank == rank
    choices = [(k, rank - k) for k in range(rank + 1) if k <= KEYS and rank - k <= VALUES]
    best = min(key_tails[k] + value_tails[v] for k, v in choices)
    assert key_tails[key_rank] + value_tails[value_rank] == pytest.approx(best, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("maps", [one_metric, two_metrics])
@pytest.mark.parametrize("rank", [HIDDEN, KEYS + VALUES, 40])
def test_full_rank_is_exact(rank: int, maps: object) -> None:
    keys, values = maps()  # type: ignore[operator]

    factors = joint(keys, values, rank)

    assert torch.allclose(factors.key_up @ factors.down, keys.rows, rtol=0, atol=FLOAT64_ALGEBRA)
    assert torch.allclose(factors.value_up @ factors.down, values.rows, rtol=0, atol=FLOAT64_ALGEBRA)
    assert factors.energy_kept == pytest.approx(1.0)


def test_full_rank_of_split_is_exact_and_rows_of_zeros_need_no_rank() -> None:
    keys, values = two_metrics()
    keys = replace(keys, rows=torch.cat([keys.rows[:4], torch.zeros(2, HIDDEN, dtype=torch.float64)]))

    factors = split(keys, values, 4, VALUES)
    together = joint(keys, values, 4 + VALUES)

    for found in (factors, together):
        assert torch.allclose(found.key_up @ found.down, keys.rows, rtol=0, atol=FLOAT64_ALGEBRA)
        assert torch.allclose(found.value_up @ found.down, values.rows, rtol=0, atol=FLOAT64_ALGEBRA)


@SEEDED
@given(keys=st.integers(0, 9), values=st.integers(1, 9), hidden=st.integers(1, 9), same=st.booleans(), data=st.data())
def test_shapes(keys: int, values: int, hidden: int, same: bool, data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, hidden))
    covariance = spd(hidden, 5)
    key_map = content(keys, 1, hidden=hidden, covariance=covariance)
    value_map = content(values, 2, hidden=hidden, covariance=covariance if same else spd(hidden, 6))

    factors = joint(key_map, value_map, rank)

    width = factors.down.shape[0]
    assert width == min(rank, keys + values)
    assert factors.down.shape == (width, hidden)
    assert factors.key_up.shape == (keys, width)
    assert factors.value_up.shape == (values, width)
    assert 0 < factors.energy_kept <= 1 + FLOAT64_ALGEBRA
    assert all(bool(part.isfinite().all()) for part in (factors.down, factors.key_up, factors.value_up))


@pytest.mark.parametrize("seed", range(0, 200, 20))
@pytest.mark.parametrize("rank", [1, 3, 6, 9])
def test_the_alternation_is_never_worse_than_its_start(seed: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = two_metrics(seed)
    start = joint(replace(keys, covariance=values.covariance), values, rank)

    steps = []
    for count in (0, 1, 2, 4, 12):
        monkeypatch.setattr(factorize, "ALTERNATIONS", count)
        steps.append(loss(keys, values, joint(keys, values, rank)))

    assert steps[0] <= loss(keys, values, start) * (1 + 1e-9)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(steps))


def test_the_alternation_ends_where_the_gradient_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half step solves its least squares: run long, no direction of either factor leads down."""
    monkeypatch.setattr(factorize, "ALTERNATIONS", 4000)
    keys, values = two_metrics(7)
    factors = joint(keys, values, 4)
    parts = [part.clone().requires_grad_() for part in (factors.down, factors.key_up, factors.value_up)]
    down, key_up, value_up = parts

    total = torch.zeros((), dtype=torch.float64)
    for target, up in ((keys, key_up), (values, value_up)):
        difference = target.rows - up @ down
        total = total + torch.trace(target.metric @ difference @ target.covariance @ difference.T)
    total.backward()

    for part in parts:
        assert part.grad is not None
        assert float(part.grad.norm() * part.detach().norm()) <= 1e-5 * float(total.detach())


def test_the_alternation_has_something_to_gain() -> None:
    """The tests above are empty where the start is already the optimum."""
    keys, values = two_metrics(7)
    start = joint(replace(keys, covariance=values.covariance), values, 4)
    assert loss(keys, values, joint(keys, values, 4)) < 0.95 * loss(keys, values, start)


@SEEDED
@given(size=st.integers(1, 12), seed=st.integers(0, 30))
def test_roots(size: int, seed: int) -> None:
    matrix = spd(size, seed)

    root, inverse = psd_sqrt(matrix)

    assert torch.allclose(root @ root, matrix, rtol=0, atol=FLOAT64_ALGEBRA)
    assert torch.allclose(inverse @ root, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-9)
    assert torch.allclose(root, root.T)


def test_a_singular_matrix_has_a_finite_root() -> None:
    vector = normal(4, 1, seed=1)

    root, inverse = psd_sqrt(vector @ vector.T)

    assert torch.allclose(root @ root, vector @ vector.T, rtol=0, atol=1e-9)
    assert bool(inverse.isfinite().all())
    assert all(bool(part.isfinite().all()) for part in psd_sqrt(torch.zeros(3, 3, dtype=torch.float64)))


def test_damping_adds_a_share_of_the_mean_variance() -> None:
    covariance = torch.diag(torch.tensor([3.0, 1.0, 0.0, 0.0], dtype=torch.float64))

    found = damped(covariance, 0.5)

    assert found.diagonal().tolist() == [3.5, 1.5, 0.5, 0.5]


def test_the_latent_is_never_wider_than_its_input() -> None:
    factors = joint(content(0, 1, hidden=1, covariance=spd(1, 5)), content(2, 2, hidden=1, covariance=spd(1, 6)), 2)

    assert factors.down.shape == (1, 1)


def test_the_same_maps_give_the_same_factors_to_the_last_bit() -> None:
    first = joint(*two_metrics(3), 5)

    for _ in range(20):
        again = joint(*two_metrics(3), 5)
        assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in ("down", "key_up", "value_up"))
