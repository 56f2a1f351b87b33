from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_convert.convert.rope_select import (
    RotaryComponents,
    allocate_components,
    allocate_heads,
    best_heads,
    component_slots,
    head_slots,
    high_pairs,
    low_pairs,
    rotary_components,
    rotation_weights,
    two_norm_scores,
    uniform_pairs,
)
from mla_convert.convert.statistics import LayerStatistics
from mla_convert.convert.weights import AttentionShape, LayerWeights
from tests.convert.support import (
    SEEDED,
    complex_normal,
    frequencies_of,
    generator,
    measured,
    random_layer,
    random_windows,
)
from tests.tolerances import FLOAT64_ALGEBRA

SHAPE = AttentionShape(hidden_size=20, num_heads=6, num_kv_heads=3, head_dim=8)


@pytest.fixture(scope="module")
def layer() -> LayerWeights:
    return random_layer(SHAPE, seed=1, bias=True)


@pytest.fixture(scope="module")
def statistics(layer: LayerWeights) -> LayerStatistics:
    return measured(layer)


@pytest.fixture(scope="module")
def components(statistics: LayerStatistics) -> RotaryComponents:
    return rotary_components(statistics)


def test_policies_that_look_at_nothing_give_these_lists() -> None:
    assert high_pairs(8, 3) == (0, 1, 2)
    assert low_pairs(8, 3) == (5, 6, 7)
    assert uniform_pairs(8, 3) == (0, 2, 5)
    assert uniform_pairs(8, 2) == (0, 4)
    assert uniform_pairs(32, 8) == (0, 4, 8, 12, 16, 20, 24, 28)
    assert high_pairs(8, 8) == low_pairs(8, 8) == uniform_pairs(8, 8) == tuple(range(8))


@pytest.mark.parametrize("policy", [high_pairs, low_pairs, uniform_pairs])
@pytest.mark.parametrize("count", [0, -1, 9])
def test_a_count_out_of_range_is_refused(policy: object, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} of 8"):
        policy(8, count)  # type: ignore[operator]


@SEEDED
@given(pairs=st.integers(1, 64), data=st.data())
def test_uniform_pairs_are_distinct_and_spread(pairs: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, pairs))

    chosen = uniform_pairs(pairs, count)

    assert len(set(chosen)) == count
    assert chosen[0] == 0
    gaps = {b - a for a, b in itertools.pairwise((*chosen, pairs))}
    assert max(gaps) - min(gaps) <= 1


def test_two_norm_is_the_published_score_token_by_token(layer: LayerWeights, statistics: LayerStatistics) -> None:
    tokens = random_windows(SHAPE, seed=0).flatten(0, 1)  # (tokens, D)
    assert layer.q_bias is not None
    assert layer.k_bias is not None

    def mean_length(rows: Tensor, bias: Tensor, pair: int) -> float:
        lengths = []
        for token in tokens:
            x, y = (float(rows[i] @ token + bias[i]) for i in (pair, pair + SHAPE.pairs))
            lengths.append((x * x + y * y) ** 0.5)
        return sum(lengths) / len(lengths)

    found = two_norm_scores(statistics)

    assert found.shape == (3, 4)
    for group, pair in ((0, 0), (1, 2), (2, 3)):
        queries = sum(mean_length(layer.q[head], layer.q_bias[head], pair) for head in (2 * group, 2 * group + 1))
        expected = queries * mean_length(layer.k[group], layer.k_bias[group], pair)
        assert float(found[group, pair]) == pytest.approx(expected, rel=FLOAT64_ALGEBRA)


def weighted_loss(statistics: LayerStatistics, pair: int, rebuilt: Tensor) -> float:
    """`E Σ_g Λ_g |k_g - (R k)_g|²` of one pair, from its second moment: what not rotating the rest costs."""
    weight = rotation_weights(statistics)[pair]
    left = torch.eye(SHAPE.num_kv_heads, dtype=torch.complex128) - rebuilt
    error = left @ statistics.key_second[pair] @ left.conj().T
    return float((weight * error.diagonal().real).sum())


def projection(components: RotaryComponents, pair: int, kept: tuple[int, ...]) -> Tensor:
    groups = SHAPE.num_kv_heads
    total = torch.zeros(groups, groups, dtype=torch.complex128)
    for component in kept:
        total += torch.outer(components.synthesis[pair, component], components.analysis[pair, component])
    return total


def test_dropping_components_costs_their_eigenvalues(statistics: LayerStatistics, components: RotaryComponents) -> None:
    assert components.loss.shape == (4, 3)
    for pair in range(SHAPE.pairs):
        for count in range(4):
            for kept in itertools.combinations(range(3), count):
                dropped = sum(float(components.loss[pair, c]) for c in range(3) if c not in kept)
                found = weighted_loss(statistics, pair, projection(components, pair, kept))
                assert found == pytest.approx(dropped, rel=1e-9, abs=1e-12 * float(components.loss[pair].sum()))


def test_losses_descend_and_the_weights_are_no_accident(
    statistics: LayerStatistics, components: RotaryComponents
) -> None:
    assert bool((components.loss[:, :-1] >= components.loss[:, 1:]).all())
    assert float(components.loss.min()) >= 0
    # A degenerate example would make the tests around this one empty.
    assert float(components.loss[:, 1:].amax(1).min()) > 0
    assert float(rotation_weights(statistics).min()) > 0


def test_all_components_rebuild_the_heads(components: RotaryComponents) -> None:
    identity = torch.eye(3, dtype=torch.complex128)
    for pair in range(SHAPE.pairs):
        assert torch.allclose(projection(components, pair, (0, 1, 2)), identity, rtol=0, atol=1e-9)
        # Analysis and synthesis are each other's inverse, component by component.
        cross = components.analysis[pair] @ components.synthesis[pair].T
        assert torch.allclose(cross, identity, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kept", [1, 2])
def test_no_random_subspace_loses_less(statistics: LayerStatistics, components: RotaryComponents, kept: int) -> None:
    for pair in range(SHAPE.pairs):
        best = weighted_loss(statistics, pair, projection(components, pair, tuple(range(kept))))
        second = statistics.key_second[pair]
        for seed in range(40):
            analysis = complex_normal(kept, 3, seed=seed)
            # The best synthesis for that analysis: least squares on the second moment.
            mixed = analysis @ second
            synthesis = torch.linalg.solve(mixed @ analysis.conj().T, mixed).conj().T
            assert weighted_loss(statistics, pair, synthesis @ analysis) >= best * (1 - 1e-9)


def test_a_published_choice_of_heads_is_never_better(statistics: LayerStatistics, components: RotaryComponents) -> None:
    for pair in range(SHAPE.pairs):
        for head in range(3):
            single = torch.zeros(3, 3, dtype=torch.complex128)
            single[head, head] = 1
            assert float(components.loss[pair, 1:].sum()) <= weighted_loss(statistics, pair, single) * (1 + 1e-9)


def losses(layers: int, pairs: int, groups: int, seed: int) -> Tensor:
    values = torch.rand(layers, pairs, groups, dtype=torch.float64, generator=generator(seed))
    return values.sort(dim=-1, descending=True).values


def prefixes(pairs: int, groups: int, slots: int) -> list[tuple[int, ...]]:
    """Every way to hand out `slots` as prefixes of the pairs' components."""
    return [counts for counts in itertools.product(range(groups + 1), repeat=pairs) if sum(counts) == slots]


@SEEDED
@given(
    layers=st.integers(1, 3), pairs=st.integers(1, 4), groups=st.integers(1, 3), seed=st.integers(0, 9), data=st.data()
)
def test_slots_go_where_the_model_loses_most(
    layers: int, pairs: int, groups: int, seed: int, data: st.DataObject
) -> None:
    values = losses(layers, pairs, groups, seed)
    slots = data.draw(st.integers(1, pairs * groups))

    def saved(counts: tuple[int, ...]) -> float:
        return sum(float(values[:, pair, :count].sum()) for pair, count in enumerate(counts))

    found = allocate_components(values, slots)

    assert sum(found) == slots
    assert saved(found) == pytest.approx(max(map(saved, prefixes(pairs, groups, slots))), rel=FLOAT64_ALGEBRA)


def test_more_slots_than_components_are_refused() -> None:
    with pytest.raises(ValueError, match="7 slots"):
        allocate_components(losses(1, 2, 3, 0), 7)


@SEEDED
@given(layers=st.integers(1, 3), pairs=st.integers(1, 4), groups=st.integers(1, 3), seed=st.integers(0, 9))
def test_heads_are_handed_out_by_their_share_of_each_layer(layers: int, pairs: int, groups: int, seed: int) -> None:
    scores = torch.rand(layers, groups, pairs, dtype=torch.float64, generator=generator(seed)) + 0.01
    scores[0] *= 1000  # a loud layer has no more votes than the others

    def saved(counts: tuple[int, ...]) -> float:
        total = 0.0
        for layer in scores:
            for pair, count in enumerate(counts):
                total += sum(sorted(layer[:, pair].tolist(), reverse=True)[:count]) / float(layer.sum())
        return total

    for per_head in range(1, pairs + 1):
        found = allocate_heads(scores, per_head)
        choices = prefixes(pairs, groups, per_head * groups)
        assert sum(found) == per_head * groups
        assert saved(found) == pytest.approx(max(map(saved, choices)), rel=FLOAT64_ALGEBRA)


def test_each_layer_fills_the_list_with_its_best_heads() -> None:
    scores = torch.tensor([[1.0, 5.0, 3.0, 0.0], [2.0, 4.0, 9.0, 1.0], [3.0, 6.0, 8.0, 2.0]])

    assert best_heads(scores, (1, 2, 3, 0)) == ((2,), (0, 2), (0, 1, 2), ())


def test_head_slots_hold_single_heads_untouched() -> None:
    slots = head_slots(SHAPE, ((0, 2), (), (1,), ()), frequencies_of(SHAPE))

    assert slots.mixes == ((0,), (0,), (2,))
    assert slots.component == (0, 2, 1)
    assert torch.equal(slots.frequencies, frequencies_of(SHAPE)[[0, 0, 2]])
    expected = torch.zeros(3, 4, 3, dtype=torch.complex128)
    expected[[0, 1, 2], [0, 0, 2], [0, 2, 1]] = 1
    assert torch.equal(slots.analysis, expected)
    assert torch.equal(slots.synthesis, expected)


def test_component_slots_hold_the_leading_components(components: RotaryComponents) -> None:
    slots = component_slots(components, (2, 0, 3, 1), torch.arange(6).double())

    assert slots.mixes == ((0,), (0,), (2,), (2,), (2,), (3,))
    assert slots.frequencies.tolist() == [0, 1, 2, 3, 4, 5]
    assert slots.component == (0, 1, 0, 1, 2, 0)
    for slot, ((pair,), component) in enumerate(zip(slots.mixes, slots.component, strict=True)):
        assert torch.equal(slots.analysis[slot, pair], components.analysis[pair, component])
        assert torch.equal(slots.synthesis[slot, pair], components.synthesis[pair, component])
        others = [other for other in range(4) if other != pair]
        assert not slots.analysis[slot, others].abs().any()
        assert not slots.synthesis[slot, others].abs().any()
