"""What rorope, greedy and detuned slots have to hold as functions of any layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_convert.convert.detuning import detuning_factor
from mla_convert.convert.greedy_pairs import greedy_order, greedy_scores
from mla_convert.convert.layer import LayerPlan, convert_layer
from mla_convert.convert.rope_rows import content_pairs
from mla_convert.convert.rope_select import (
    RopeSlots,
    component_slots,
    geometric_grid,
    head_slots,
    mean_slots,
    rotary_components,
    single_pair_slots,
)
from mla_convert.convert.rorope import key_moments, legal_folds, principal_components, rorope_slots
from mla_convert.convert.score_error import (
    SCORES_PER_KEY_HEAD,
    pair_differences,
    sampled_positions,
    score_error,
)
from mla_convert.convert.source_reading import source_attention
from mla_convert.convert.weights import AttentionShape, LayerWeights
from mla_convert.mla.reference import mla_attention
from tests.convert.support import (
    SEEDED,
    THETA,
    frequencies_of,
    generator,
    measured,
    normal,
    random_layer,
    random_windows,
)
from tests.tolerances import FLOAT64_ALGEBRA

SHAPE = AttentionShape(hidden_size=24, num_heads=6, num_kv_heads=3, head_dim=16)
ONE_HEAD = AttentionShape(hidden_size=24, num_heads=2, num_kv_heads=1, head_dim=16)


def rotated_heads(weights: LayerWeights, frequencies: Tensor, seed: int) -> RopeSlots:
    """All components of all pairs in the basis of RoRoPE's rotations."""
    moments = measured(weights, seed, windows=1, length=16).input
    pairs, heads = weights.shape.pairs, weights.shape.num_kv_heads
    bases = torch.cat([principal_components(key_moments(weights, moments, (pair,))).T for pair in range(pairs)])
    own = tuple(pair for pair in range(pairs) for _ in range(heads))
    rows = bases.to(torch.complex128)
    return single_pair_slots(own, frequencies[list(own)], rows, rows, tuple(range(heads)) * pairs, pairs)


@SEEDED
@given(seed=st.integers(0, 99), bias=st.booleans())
def test_the_rotation_of_rorope_keeps_all_scores(seed: int, bias: bool) -> None:
    weights, frequencies = random_layer(SHAPE, seed, bias=bias), frequencies_of(SHAPE)
    slots, inputs = rotated_heads(weights, frequencies, seed), random_windows(SHAPE, seed, windows=1, length=12)

    assert content_pairs(slots) == ((), (), ())
    assert score_error(weights, slots, inputs, frequencies) <= FLOAT64_ALGEBRA
    assert score_error(weights, slots, inputs, frequencies.flip(0)) > 1e-3


@SEEDED
@given(seed=st.integers(0, 99), data=st.data())
def test_the_leading_components_of_a_fold_hold_most_power(seed: int, data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([1, 2, 4, 8]))
    fold = data.draw(st.sampled_from(legal_folds(SHAPE.pairs, count)))
    weights, frequencies = random_layer(SHAPE, seed), frequencies_of(SHAPE)
    moments = measured(weights, seed, windows=1, length=16).input

    slots = rorope_slots(weights, moments, frequencies, count, fold)

    stride = SHAPE.pairs // count
    assert torch.equal(slots.frequencies, frequencies[::stride])
    flat = slots.analysis.flatten(1)
    assert torch.allclose(flat @ flat.conj().T, torch.eye(count, dtype=torch.complex128), rtol=0, atol=1e-9)
    assert not slots.analysis.imag.any()
    for slot, pairs in enumerate(slots.mixes):
        assert slot * stride in pairs
        assert len(pairs) == fold
        second = key_moments(weights, moments, pairs)
        vector = slots.analysis[slot][list(pairs)].flatten().real
        values = torch.linalg.eigvalsh(second).flip(0)
        assert float(vector @ second @ vector) == pytest.approx(float(values[slots.component[slot]]), rel=1e-9)


def test_folds_that_do_not_fill_the_slots_evenly_are_not_legal() -> None:
    assert legal_folds(32, 16) == (1, 2, 4, 8)
    assert legal_folds(32, 32) == (1, 2, 4, 8)
    assert legal_folds(24, 8) == (1,)
    assert legal_folds(24, 4) == (1, 2)


def test_folds_of_equal_frequencies_lose_no_less_wide_than_narrow() -> None:
    """With equal frequencies a fold is no approximation, and wider folds hold more of the keys."""
    weights, still = random_layer(SHAPE, seed=2), torch.zeros(SHAPE.pairs, dtype=torch.float64)
    moments = measured(weights, windows=1).input

    kept = []
    for fold in (1, 2, 4, 8):
        slots = rorope_slots(weights, moments, still, 8, fold)
        kept.append(
            sum(
                float(vector @ key_moments(weights, moments, pairs) @ vector)
                for pairs, vector in (
                    (pairs, slots.analysis[slot][list(pairs)].flatten().real) for slot, pairs in enumerate(slots.mixes)
                )
            )
        )

    assert kept == sorted(kept)
    assert kept[0] < 0.99 * kept[-1]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["fold", "grid", "all pairs in one slot"])
def test_slots_of_any_kind_lose_nothing_where_nothing_turns(kind: str, bias: bool) -> None:
    weights = random_layer(SHAPE, seed=3, bias=bias)
    still = torch.zeros(SHAPE.pairs, dtype=torch.float64)
    statistics, inputs = measured(weights, windows=2), random_windows(SHAPE, seed=5, windows=1)[0]
    mixed = torch.randn(1, SHAPE.pairs, 3, dtype=torch.complex128, generator=generator(7))
    slots = {
        "fold": rorope_slots(weights, statistics.input, still, 4, 4),
        "grid": component_slots(rotary_components(statistics), (2, 2, 1, 0, 0, 0, 0, 0), still[:5]),
        "all pairs in one slot": RopeSlots((tuple(range(8)),), still[:1], mixed, mixed.conj() * 0.1, (0,)),
    }[kind]
    rank = SHAPE.useful_rank(2 * len(slots.mixes))
    plan = LayerPlan(slots, SHAPE.head_dim, rank, "joint", None, "weight", False, True, 0.0)

    converted, _ = convert_layer(weights, None, plan)

    found = mla_attention(converted, inputs[None]).output[0]
    assert torch.allclose(found, source_attention(weights, inputs, still), rtol=0, atol=1e-9)


def test_a_constant_before_a_slot_multiplies_what_it_adds_to_the_score() -> None:
    weights = random_layer(ONE_HEAD, seed=4)
    frequencies = frequencies_of(ONE_HEAD)
    slots = head_slots(ONE_HEAD, ((0,),) * 8, frequencies)
    factor = torch.polar(torch.full((2, 8), 0.5, dtype=torch.float64), normal(2, 8, seed=6))
    inputs = random_windows(ONE_HEAD, seed=5, windows=1)
    plan = LayerPlan(replace(slots, query_factor=factor), 8, 16, "joint", None, "weight", False, True, 0.0)

    # q e^{iα} of the source is what a slot with the constant e^{-iα} must be undone by.
    turned = torch.complex(weights.q[:, :8], weights.q[:, 8:]) / factor.conj()[:, :, None]
    undone = replace(weights, q=torch.cat([turned.real, turned.imag], dim=1))
    converted, _ = convert_layer(undone, None, plan)

    found = mla_attention(converted, inputs).output[0]
    assert torch.allclose(found, source_attention(weights, inputs[0], frequencies), rtol=0, atol=1e-9)


@SEEDED
@given(seed=st.integers(0, 99), bias=st.booleans())
def test_greedy_errors_are_those_of_its_picks_and_end_at_nothing(seed: int, bias: bool) -> None:
    weights, frequencies = random_layer(ONE_HEAD, seed, bias=bias), frequencies_of(ONE_HEAD)
    inputs = random_windows(ONE_HEAD, seed, windows=2, length=10)

    order = greedy_order(pair_differences(weights, 0, inputs, frequencies))

    assert sorted(order.pairs) == list(range(8))
    for count in range(1, 9):
        kept = tuple((0,) if pair in order.pairs[:count] else () for pair in range(8))
        slots = head_slots(ONE_HEAD, kept, frequencies)
        found = score_error(weights, slots, inputs, frequencies)
        assert float(order.errors[count]) == pytest.approx(found, rel=1e-9, abs=FLOAT64_ALGEBRA)
    assert float(order.errors[-1]) <= FLOAT64_ALGEBRA
    scores = greedy_scores(weights, inputs, frequencies)
    assert tuple(scores[0].argsort(descending=True).tolist()) == order.pairs
    assert float(scores.min()) > 0


@SEEDED
@given(seed=st.integers(0, 99))
def test_no_first_pick_does_better(seed: int) -> None:
    differences = normal(6, 50, seed=seed)

    order = greedy_order(differences)

    rest = [float((differences.sum(0) - differences[pair]).abs().mean()) for pair in range(6)]
    assert float(order.errors[1]) == pytest.approx(min(rest))
    assert order.pairs[0] == rest.index(min(rest))


def test_of_equal_pairs_the_fastest_comes_first() -> None:
    row = normal(1, 20, seed=3)

    assert greedy_order(row.repeat(4, 1)).pairs == (0, 1, 2, 3)


@pytest.mark.parametrize(("windows", "length", "heads"), [(1, 4, 1), (4, 512, 3), (2, 2048, 32), (1, 16384, 64)])
def test_the_sample_of_queries_is_bounded_and_even(windows: int, length: int, heads: int) -> None:
    at = sampled_positions(windows, length, heads)

    assert int(at[-1]) == length - 1
    assert len(set((at[1:] - at[:-1]).tolist())) <= 1
    # The last query of all has to be looked at, however long it is.
    assert windows * heads * int((at + 1).sum()) <= SCORES_PER_KEY_HEAD + windows * heads * length
    assert windows * heads * length > 20 or len(at) == length


def test_a_detuned_slot_is_constant_where_it_is_in_tune() -> None:
    weights, frequencies = random_layer(SHAPE, seed=8, bias=True), frequencies_of(SHAPE)
    inputs = random_windows(SHAPE, seed=0, windows=2)
    statistics = measured(weights, windows=2)
    every = tuple(range(SHAPE.pairs))

    in_tune = detuning_factor(weights, inputs, frequencies, every, frequencies)
    still = detuning_factor(weights, inputs, frequencies, every, torch.zeros(SHAPE.pairs, dtype=torch.float64))

    assert torch.allclose(in_tune, torch.ones_like(in_tune), rtol=0, atol=FLOAT64_ALGEBRA)
    # A slot that does not turn at all is a pair that is not rotated.
    assert torch.allclose(still, statistics.gamma, rtol=0, atol=FLOAT64_ALGEBRA)


def test_the_measured_constant_of_a_detuned_slot_loses_least() -> None:
    """Every other constant raises `E|e^{-iθΔ} - γ e^{-iϑΔ}|²`; the weights are those of the statistics."""
    weights, frequencies = random_layer(ONE_HEAD, seed=9), frequencies_of(ONE_HEAD)
    inputs = random_windows(ONE_HEAD, seed=1, windows=1, length=40)
    grid = geometric_grid(THETA, ONE_HEAD.head_dim, 4, 0.5)
    factor = detuning_factor(weights, inputs, frequencies, grid.pairs, grid.frequencies)

    assert grid.pairs == (0, 0, 1, 1)
    assert torch.allclose(factor[:, ::2], torch.ones(2, 2, dtype=torch.complex128), rtol=0, atol=1e-9)
    # Between the pairs' frequencies the constant is closer to one than for a pair that stands still.
    still = measured(weights, 1, windows=1, length=40).gamma[:, [0, 1]]
    assert bool((factor[:, 1::2].abs() > still.abs()).all())
    assert bool((factor.abs() <= 1 + 1e-12).all())


def test_the_mean_is_the_same_for_every_head() -> None:
    slots = mean_slots(SHAPE, 3, frequencies_of(SHAPE))

    assert slots.mixes == ((5,), (6,), (7,))
    assert torch.equal(slots.analysis.sum((1, 2)), torch.ones(3, dtype=torch.complex128))
    assert torch.equal(slots.synthesis.sum((1, 2)), torch.full((3,), 3, dtype=torch.complex128))
