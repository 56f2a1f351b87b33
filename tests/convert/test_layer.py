from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_convert.convert.layer import LayerPlan, LayerQuality, convert_layer
from mla_convert.convert.rope_rows import content_pairs
from mla_convert.convert.rope_select import (
    RopeSlots,
    best_heads,
    component_slots,
    head_slots,
    rotary_components,
    two_norm_scores,
)
from mla_convert.convert.source_reading import source_attention
from mla_convert.convert.statistics import LayerStatistics, Moments
from mla_convert.convert.weights import AttentionShape, LayerWeights
from mla_convert.mla.reference import mla_attention
from mla_convert.mla.rope import to_pairs
from mla_convert.mla.weights import MLALayerWeights
from tests.convert.support import (
    frequencies_of,
    key_map,
    measured,
    permute_groups,
    permute_query_heads,
    random_layer,
    random_windows,
    value_map,
)
from tests.tolerances import FLOAT64_ALGEBRA

SHAPE = AttentionShape(hidden_size=40, num_heads=6, num_kv_heads=3, head_dim=8)
KINDS = ("high", "low", "uniform", "2-norm", "optimal")
KEPT = {"high": (0, 1), "low": (2, 3), "uniform": (0, 2)}
COUNTS = (3, 2, 1, 0)  # slots per pair of the policies that measure
COUNT_PAIRS = (0, 0, 0, 1, 1, 2)


def slots_of(kind: str, statistics: LayerStatistics, frequencies: Tensor | None = None) -> RopeSlots:
    frequencies = frequencies_of(SHAPE) if frequencies is None else frequencies
    if kind == "optimal":
        return component_slots(rotary_components(statistics), COUNTS, frequencies[list(COUNT_PAIRS)])
    if kind == "2-norm":
        return head_slots(SHAPE, best_heads(two_norm_scores(statistics), COUNTS), frequencies)
    return head_slots(SHAPE, tuple((0, 1, 2) if pair in KEPT[kind] else () for pair in range(4)), frequencies)


def every_pair() -> RopeSlots:
    return head_slots(SHAPE, ((0, 1, 2),) * 4, frequencies_of(SHAPE))


def plan_of(slots: RopeSlots, **changes: Any) -> LayerPlan:
    fields: dict[str, Any] = {
        "slots": slots,
        "qk_nope_head_dim": SHAPE.head_dim,
        "kv_lora_rank": SHAPE.useful_rank(2 * len(slots.mixes)),
        "factorization": "joint",
        "key_rank": None,
        "weighting": "weight",
        "measured_gamma": True,
        "output_constant": True,
        "damping": 1e-6,
    }
    return LayerPlan(**{**fields, **changes})


def convert(
    layer: LayerWeights, slots: RopeSlots, statistics: LayerStatistics | None = None, **changes: Any
) -> tuple[MLALayerWeights, LayerQuality]:
    return convert_layer(layer, statistics, plan_of(slots, **changes))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "biased"])
def layer(request: pytest.FixtureRequest) -> LayerWeights:
    return random_layer(SHAPE, seed=1, bias=request.param)


@pytest.fixture(scope="module")
def statistics(layer: LayerWeights) -> LayerStatistics:
    return measured(layer)


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    return random_windows(SHAPE, seed=5, windows=1)[0]


def outputs(layer: LayerWeights, converted: MLALayerWeights, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """(source's, converted's) attention output over one window."""
    return source_attention(layer, inputs, frequencies_of(SHAPE)), mla_attention(converted, inputs[None]).output[0]


def test_all_pairs_and_full_rank_are_exact(layer: LayerWeights, inputs: Tensor) -> None:
    converted, quality = convert(layer, every_pair())

    expected, found = outputs(layer, converted, inputs)

    assert torch.allclose(found, expected, rtol=0, atol=1e-9)
    assert quality.key_map_error <= 1e-12
    assert quality.value_map_error <= 1e-12
    assert converted.useful_rank == 24  # 2·3·8 cached numbers less 2·12 rotated ones


@pytest.mark.parametrize("weighting", ["weight", "activation", "output"])
@pytest.mark.parametrize("factorization", ["joint", "split"])
@pytest.mark.parametrize("kind", KINDS)
def test_at_full_rank_every_policy_keeps_keys_and_values_exactly(
    layer: LayerWeights, statistics: LayerStatistics, kind: str, factorization: str, weighting: str
) -> None:
    """Partial rope approximates; the maps to keys and values must not."""
    slots = slots_of(kind, statistics)

    converted, quality = convert(layer, slots, statistics, factorization=factorization, weighting=weighting)

    assert torch.allclose(value_map(converted), layer.v, rtol=0, atol=1e-8)
    keys = to_pairs(layer.k)  # (G, P, D)
    rebuilt = torch.zeros_like(keys)
    for slot, (pair,) in enumerate(slots.mixes):
        rebuilt[:, pair] += slots.synthesis[slot, pair][:, None] * converted.k_rope[slot]
    for group, pairs in enumerate(content_pairs(slots)):
        content, size = key_map(converted)[group], len(pairs)
        rebuilt[group, list(pairs)] += torch.complex(content[:size], content[size : 2 * size])
        assert torch.allclose(content[2 * size :], torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-8)
    assert torch.allclose(rebuilt, keys, rtol=0, atol=1e-8)
    assert max(quality.key_map_error, quality.value_map_error) <= 1e-8


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_that_does_not_turn_loses_nothing_by_not_turning(kind: str, inputs: Tensor) -> None:
    """With all frequencies zero partial rope is no approximation, so full rank is exact for every policy."""
    layer = random_layer(SHAPE, seed=3, bias=True)
    still = torch.zeros(SHAPE.pairs, dtype=torch.float64)
    slots = slots_of(kind, measured(layer), still)

    converted, _ = convert_layer(layer, None, plan_of(slots, measured_gamma=False))

    found = mla_attention(converted, inputs[None]).output[0]
    # Bias of unrotated keys is dropped: it moves all scores of a query alike.
    assert torch.allclose(found, source_attention(layer, inputs, still), rtol=0, atol=1e-9)


def test_gamma_is_folded_into_the_queries_that_are_not_rotated() -> None:
    layer = random_layer(SHAPE, seed=4, bias=True)
    statistics = measured(layer)
    converted, _ = convert(layer, slots_of("high", statistics), statistics)
    assert layer.q_bias is not None
    assert converted.q_nope_bias is not None

    for head in range(6):
        for column, pair in enumerate((2, 3)):
            factor = statistics.gamma[head, pair].conj()
            query = factor * torch.complex(layer.q[head, pair], layer.q[head, pair + 4])
            bias = complex(factor) * complex(layer.q_bias[head, pair], layer.q_bias[head, pair + 4])
            assert torch.allclose(converted.q_nope[head, column], query.real)
            assert torch.allclose(converted.q_nope[head, column + 2], query.imag)
            assert float(converted.q_nope_bias[head, column]) == pytest.approx(bias.real)
            assert float(converted.q_nope_bias[head, column + 2]) == pytest.approx(bias.imag)


def test_gamma_one_is_the_query_as_it_is() -> None:
    layer = random_layer(SHAPE, seed=4)
    statistics = measured(layer)

    measured_one, _ = convert(layer, slots_of("high", statistics), statistics)
    plain, _ = convert(layer, slots_of("high", statistics), statistics, measured_gamma=False)

    assert torch.equal(plain.q_nope[:, :2], layer.q[:, 2:4])
    assert torch.equal(plain.q_nope[:, 2:4], layer.q[:, 6:8])
    assert not torch.allclose(plain.q_nope, measured_one.q_nope)


def test_rotated_rows_sit_in_the_slots_of_their_key_head() -> None:
    layer = random_layer(SHAPE, seed=6, bias=True)
    statistics = measured(layer)
    slots = slots_of("2-norm", statistics)
    converted, _ = convert(layer, slots, statistics)
    assert converted.k_rope_bias is not None
    assert layer.k_bias is not None

    for slot, ((pair,), group) in enumerate(zip(slots.mixes, slots.component, strict=True)):
        assert torch.equal(converted.k_rope[slot], to_pairs(layer.k)[group, pair])
        assert complex(converted.k_rope_bias[slot]) == complex(layer.k_bias[group, pair], layer.k_bias[group, pair + 4])
        for head in range(6):
            expected = to_pairs(layer.q)[head, pair] * (head // 2 == group)
            assert torch.equal(converted.q_rope[head, slot], expected)
    assert torch.equal(converted.frequencies, frequencies_of(SHAPE)[[pair for (pair,) in slots.mixes]])


@pytest.mark.parametrize("kind", ["high", "2-norm", "optimal"])
@pytest.mark.parametrize("factorization", ["joint", "split"])
def test_the_order_of_query_heads_in_a_group_permutes_the_result_only(
    layer: LayerWeights, inputs: Tensor, kind: str, factorization: str
) -> None:
    heads = [1, 0, 3, 2, 5, 4]
    moved = permute_query_heads(layer, heads)

    results = []
    for one in (layer, moved):
        statistics = measured(one)
        options = {"kv_lora_rank": 10, "factorization": factorization, "weighting": "output"}
        results.append(convert(one, slots_of(kind, statistics), statistics, **options)[0])
    plain, permuted = results

    assert torch.allclose(key_map(permuted), key_map(plain), rtol=0, atol=1e-8)
    assert torch.allclose(value_map(permuted), value_map(plain), rtol=0, atol=1e-8)
    assert torch.allclose(permuted.q_nope, plain.q_nope[heads], rtol=0, atol=1e-8)
    found, expected = (mla_attention(one, inputs[None]).output for one in (permuted, plain))
    assert torch.allclose(found, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("output_constant", [False, True])
def test_the_order_of_key_heads_does_not_matter(
    layer: LayerWeights, inputs: Tensor, kind: str, output_constant: bool
) -> None:
    results = []
    for one in (layer, permute_groups(layer, [2, 0, 1])):
        statistics = measured(one)
        options = {"kv_lora_rank": 10, "weighting": "output", "output_constant": output_constant}
        results.append(convert(one, slots_of(kind, statistics), statistics, **options)[0])
    plain, permuted = results

    assert torch.allclose(value_map(permuted), value_map(plain)[[2, 0, 1]], rtol=0, atol=1e-7)
    found, expected = (mla_attention(one, inputs[None]).output for one in (permuted, plain))
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


def test_the_output_bias_carries_value_bias_and_output_bias() -> None:
    layer = random_layer(SHAPE, seed=7, bias=True)
    assert layer.v_bias is not None
    assert layer.o_bias is not None

    converted, _ = convert(layer, every_pair())

    expected = layer.o_bias.clone()
    for head in range(6):
        expected += layer.o[head] @ layer.v_bias[head // 2]
    assert converted.output_bias is not None
    assert torch.allclose(converted.output_bias, expected, rtol=0, atol=FLOAT64_ALGEBRA)


def test_the_output_bias_carries_the_mean_of_what_the_latent_does_not() -> None:
    layer = random_layer(SHAPE, seed=8)
    statistics = measured(layer)
    slots = slots_of("optimal", statistics)

    converted, _ = convert(layer, slots, statistics, kv_lora_rank=6, weighting="output")

    lost = layer.v - value_map(converted)  # (G, d, D)
    expected = torch.zeros(SHAPE.hidden_size, dtype=torch.float64)
    for head in range(6):
        expected += layer.o[head] @ (lost[head // 2] @ statistics.value_input.mean)
    assert converted.output_bias is not None
    assert float(expected.norm()) > 0.1
    assert torch.allclose(converted.output_bias, expected, rtol=0, atol=FLOAT64_ALGEBRA)


def test_without_a_place_for_it_there_is_no_constant() -> None:
    layer = random_layer(SHAPE, seed=8)
    statistics = measured(layer)
    slots = slots_of("optimal", statistics)

    options = {"kv_lora_rank": 6, "weighting": "output"}
    free, _ = convert(layer, slots, statistics, **options)
    bound, _ = convert(layer, slots, statistics, output_constant=False, **options)

    assert bound.output_bias is None
    mean = statistics.value_input.mean

    def loss_at_mean(one: MLALayerWeights) -> float:
        return float(((layer.v - value_map(one)) @ mean).norm())

    # There the latent spends rank on the mean.
    assert loss_at_mean(bound) < 0.5 * loss_at_mean(free)


@pytest.mark.parametrize("output_constant", [False, True])
def test_a_constant_channel_of_the_input_is_free_in_the_content_keys(output_constant: bool) -> None:
    """Keys are judged about their mean: a constant moves all scores of a query alike."""
    layer = random_layer(SHAPE, seed=9)
    statistics = measured(layer)
    centred = Moments(statistics.input.mean * 0, statistics.input.covariance(centred=True))
    shifted = replace(statistics, input=centred)
    slots = slots_of("high", statistics)
    options = {"weighting": "activation", "factorization": "split", "key_rank": 4, "kv_lora_rank": 10}
    options["output_constant"] = output_constant

    maps = [key_map(convert(layer, slots, one, **options)[0]) for one in (statistics, shifted)]

    # Damping is a share of the variance, which is the same about the mean.
    assert torch.allclose(maps[0], maps[1], rtol=0, atol=1e-7)


def test_output_weighting_predicts_and_lowers_the_change_of_the_output(inputs: Tensor) -> None:
    layer = random_layer(SHAPE, seed=10, std=0.15)
    statistics = measured(layer, windows=16)
    # Every pair in content with γ = 1 and no rotation: what is left is the factorisation's own error.
    still = torch.zeros(SHAPE.pairs, dtype=torch.float64)
    slots = head_slots(SHAPE, ((0, 1, 2), (), (), ()), still)
    tokens = random_windows(SHAPE, seed=0, windows=16)

    def error(weighting: str) -> float:
        plan = plan_of(slots, weighting=weighting, kv_lora_rank=24, measured_gamma=False)
        converted, _ = convert_layer(layer, statistics, plan)
        found = mla_attention(converted, tokens).output
        return sum(
            float((found[n] - source_attention(layer, tokens[n], still)).square().sum()) for n in range(len(tokens))
        )

    assert error("output") < error("activation") < error("weight")


@pytest.mark.parametrize("factorization", ["joint", "split"])
def test_quality_counts_what_is_lost(factorization: str) -> None:
    layer = random_layer(SHAPE, seed=11)
    statistics = measured(layer)
    slots = slots_of("optimal", statistics)

    errors = []
    for rank in (4, 12, 24, SHAPE.useful_rank(2 * len(slots.mixes))):
        options = {"kv_lora_rank": rank, "factorization": factorization, "weighting": "output"}
        converted, quality = convert(layer, slots, statistics, **options)
        expected = float((layer.v - value_map(converted)).norm() / layer.v.norm())
        assert quality.value_map_error == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert quality.predicted_output_error is not None
        errors.append(quality.predicted_output_error)
        if factorization == "split":
            assert quality.split_ranks is not None
            assert sum(quality.split_ranks) == rank
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] <= 1e-10 * errors[0]


def test_a_given_key_rank_is_taken() -> None:
    layer = random_layer(SHAPE, seed=12)
    slots = every_pair()

    _, quality = convert(layer, slots, kv_lora_rank=10, factorization="split", key_rank=0)

    assert quality.split_ranks == (0, 10)


def test_statistics_are_needed_where_they_are_used() -> None:
    with pytest.raises(ValueError, match="calibration statistics"):
        convert(random_layer(SHAPE, seed=1), every_pair(), weighting="output")


def test_content_that_does_not_fit_its_width_is_an_error() -> None:
    layer = random_layer(SHAPE, seed=1)
    slots = head_slots(SHAPE, ((0, 1, 2), (), (), ()), frequencies_of(SHAPE))

    with pytest.raises(ValueError, match="do not fit"):
        convert(layer, slots, qk_nope_head_dim=4)


def test_the_source_is_not_changed(layer: LayerWeights, statistics: LayerStatistics) -> None:
    before = [part.clone() for part in (layer.q, layer.k, layer.v, layer.o)]

    convert(layer, slots_of("optimal", statistics), statistics, weighting="output", kv_lora_rank=7)

    assert all(torch.equal(a, b) for a, b in zip(before, (layer.q, layer.k, layer.v, layer.o), strict=True))
