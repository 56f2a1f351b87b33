"""What calibration measures: sums recomputed token by token, derivatives by autograd, and properties of the rest."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from mla_convert.convert import statistics as module
from mla_convert.convert.source_reading import source_attention
from mla_convert.convert.statistics import (
    LayerStatistics,
    Moments,
    attention_probabilities,
    combine,
    measure_layer,
    project,
    score_error_weights,
)
from mla_convert.convert.weights import AttentionShape, LayerWeights
from mla_convert.mla.rope import to_pairs
from tests.convert.support import (
    frequencies_of,
    measured,
    normal,
    permute_groups,
    permute_query_heads,
    random_layer,
    random_windows,
    tensors_of,
)
from tests.tolerances import FLOAT64_ALGEBRA

SHAPE = AttentionShape(hidden_size=12, num_heads=4, num_kv_heads=2, head_dim=6)
LENGTH = 9
# What grows with the text; everything else is a mean.
SUMS = ("tokens", "weight", "gamma_weight")


@pytest.fixture(scope="module")
def layer() -> LayerWeights:
    return random_layer(SHAPE, seed=1, bias=True)


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return random_windows(SHAPE, seed=2, windows=3, length=LENGTH)


@pytest.fixture(scope="module")
def statistics(layer: LayerWeights, windows: Tensor) -> LayerStatistics:
    return measure_layer(layer, windows, frequencies_of(SHAPE))


def close(found: Tensor, expected: Tensor, tolerance: float = FLOAT64_ALGEBRA) -> bool:
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_moments_of_the_inputs(statistics: LayerStatistics, windows: Tensor) -> None:
    tokens = windows.flatten(0, 1).numpy()

    assert int(statistics.tokens) == 3 * LENGTH
    assert close(statistics.input.mean, torch.from_numpy(tokens.mean(0)))
    assert close(statistics.input.covariance(centred=False), torch.from_numpy(tokens.T @ tokens / len(tokens)))
    deviation = tokens - tokens.mean(0)
    assert close(statistics.input.covariance(centred=True), torch.from_numpy(deviation.T @ deviation / len(tokens)))


@pytest.mark.parametrize("name", ["input", "key_input", "value_input"])
def test_moments_are_means_under_some_weights(statistics: LayerStatistics, windows: Tensor, name: str) -> None:
    """Whatever a token counts for: the weights are positive and add up to one."""
    moments: Moments = getattr(statistics, name)
    tokens = windows.flatten(0, 1)

    assert bool((moments.mean >= tokens.amin(0)).all())
    assert bool((moments.mean <= tokens.amax(0)).all())
    centred = moments.covariance(centred=True)
    assert close(centred + torch.outer(moments.mean, moments.mean), moments.covariance(centred=False))
    assert torch.allclose(centred, centred.T)
    assert float(torch.linalg.eigvalsh(centred)[0]) > -1e-9
    # A mean of |x - c|² lies between the least and the largest.
    distances = (tokens - moments.mean).square().sum(-1)
    assert float(distances.min()) <= float(centred.trace()) <= float(distances.max())


def test_lengths_of_keys_and_queries_pair_by_pair(
    statistics: LayerStatistics, layer: LayerWeights, windows: Tensor
) -> None:
    assert layer.q_bias is not None
    assert layer.k_bias is not None
    tokens = windows.flatten(0, 1)

    def mean_length(rows: Tensor, bias: Tensor, pair: int) -> float:
        total = 0.0
        for token in tokens:
            x, y = (float(rows[i] @ token + bias[i]) for i in (pair, pair + SHAPE.pairs))
            total += abs(complex(x, y))
        return total / len(tokens)

    for pair in range(SHAPE.pairs):
        for group in range(2):
            expected = mean_length(layer.k[group], layer.k_bias[group], pair)
            assert float(statistics.key_norm[group, pair]) == pytest.approx(expected, rel=FLOAT64_ALGEBRA)
        for head in range(4):
            expected = mean_length(layer.q[head], layer.q_bias[head], pair)
            assert float(statistics.query_norm[head, pair]) == pytest.approx(expected, rel=FLOAT64_ALGEBRA)


def test_keys_have_the_moments_of_their_inputs(
    statistics: LayerStatistics, layer: LayerWeights, windows: Tensor
) -> None:
    """`E[k kᴴ]` under some weighting of the tokens, bias included, is `A E[x xᵀ] Aᴴ` plus what the bias adds."""
    assert layer.k_bias is not None
    moments = statistics.key_input
    for pair in range(SHAPE.pairs):
        rows = torch.complex(layer.k[:, pair], layer.k[:, pair + SHAPE.pairs])  # (G, D)
        bias = torch.complex(layer.k_bias[:, pair], layer.k_bias[:, pair + SHAPE.pairs])
        mean = rows @ moments.mean.to(rows.dtype)
        expected = rows @ moments.second.to(rows.dtype) @ rows.conj().T
        expected += torch.outer(mean, bias.conj()) + torch.outer(bias, mean.conj()) + torch.outer(bias, bias.conj())
        assert close(statistics.key_second[pair], expected, 1e-9)


def test_probabilities_are_causal_attention(layer: LayerWeights, windows: Tensor) -> None:
    queries, keys = project(layer.q, layer.q_bias, windows[0]), project(layer.k, layer.k_bias, windows[0])
    pairs = [to_pairs(part.transpose(1, 2)).transpose(1, 2) for part in (queries, keys)]
    frequencies = frequencies_of(SHAPE).tolist()

    found = attention_probabilities(pairs[0][2:], pairs[1][1], frequencies_of(SHAPE), 0.3)

    for head in range(2):
        for t in range(LENGTH):
            scores = []
            for j in range(t + 1):
                score = 0.0
                for pair, theta in enumerate(frequencies):
                    q, k = complex(pairs[0][2 + head, t, pair]), complex(pairs[1][1, j, pair])
                    score += (q.conjugate() * k * cmath.exp(-1j * theta * (t - j))).real
                scores.append(math.exp(0.3 * score))
            expected = [score / sum(scores) for score in scores] + [0.0] * (LENGTH - t - 1)
            assert found[head, t].tolist() == pytest.approx(expected, rel=1e-9)


def test_our_reading_of_a_layer_is_the_source_class() -> None:
    shape = replace(SHAPE, head_dim=8)
    layer = random_layer(shape, seed=3, bias=True)
    config = LlamaConfig(hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=8, attention_bias=True)
    config._attn_implementation = "sdpa"
    attention = LlamaAttention(config, 0).double().eval()
    assert layer.q_bias is not None
    assert layer.k_bias is not None
    assert layer.v_bias is not None
    assert layer.o_bias is not None
    attention.load_state_dict(
        {
            "q_proj.weight": layer.q.flatten(0, 1),
            "k_proj.weight": layer.k.flatten(0, 1),
            "v_proj.weight": layer.v.flatten(0, 1),
            "o_proj.weight": torch.cat(list(layer.o), dim=1),
            "q_proj.bias": layer.q_bias.flatten(),
            "k_proj.bias": layer.k_bias.flatten(),
            "v_proj.bias": layer.v_bias.flatten(),
            "o_proj.bias": layer.o_bias,
        },
        strict=True,
    )
    inputs = random_windows(shape, seed=4, windows=1, length=LENGTH)
    angle = torch.arange(LENGTH, dtype=torch.float64)[:, None] * frequencies_of(shape)
    full = torch.cat([angle, angle], dim=-1)[None]
    with torch.no_grad():
        expected, _ = attention(inputs, (full.cos(), full.sin()), None)

    assert close(source_attention(layer, inputs[0], frequencies_of(shape)), expected[0])


def test_score_weights_are_squared_derivatives_of_the_output(layer: LayerWeights, windows: Tensor) -> None:
    values = project(layer.v, layer.v_bias, windows[0])[1]  # (T, d)
    scores = normal(2, LENGTH, LENGTH, seed=5).masked_fill(
        torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), float("-inf")
    )

    found = score_error_weights(scores.softmax(-1), values, layer.o[2:])

    for head in range(2):
        for t in range(LENGTH):

            def output(row: Tensor, head: int = head, t: int = t) -> Tensor:
                return layer.o[2 + head] @ (row.softmax(-1) @ values[: t + 1])

            derivative = torch.autograd.functional.jacobian(output, scores[head, t, : t + 1])  # (D, t + 1)
            expected = derivative.square().sum(0)
            assert torch.allclose(found[head, t, : t + 1], expected, rtol=1e-8, atol=1e-12)
            assert not found[head, t, t + 1 :].any()
    assert float(found[:, -1].min()) > 1e-6


def test_means_over_windows_are_means(layer: LayerWeights, windows: Tensor, statistics: LayerStatistics) -> None:
    singles = [measure_layer(layer, window[None], frequencies_of(SHAPE)) for window in windows]

    for name in ("query_metric", "value_weight", "query_norm", "key_norm"):
        mean = torch.stack([getattr(single, name) for single in singles]).mean(0)
        assert close(getattr(statistics, name), mean), name


def test_windows_seen_twice_change_nothing(layer: LayerWeights, windows: Tensor, statistics: LayerStatistics) -> None:
    twice = measure_layer(layer, torch.cat([windows, windows]), frequencies_of(SHAPE))

    assert int(twice.tokens) == 2 * int(statistics.tokens)
    for name, value in tensors_of(twice).items():
        factor = 2 if name in SUMS else 1
        assert close(value, factor * tensors_of(statistics)[name], 1e-9), name


def test_parts_are_combined_into_what_all_windows_give(
    layer: LayerWeights, windows: Tensor, statistics: LayerStatistics
) -> None:
    parts = [measure_layer(layer, part, frequencies_of(SHAPE)) for part in (windows[:1], windows[1:])]

    for name, value in tensors_of(combine(parts)).items():
        assert close(value, tensors_of(statistics)[name]), name


def test_a_weight_of_two_is_the_same_text_twice(layer: LayerWeights, windows: Tensor) -> None:
    parts = [measure_layer(layer, part, frequencies_of(SHAPE)) for part in (windows[:1], windows[1:])]

    weighted = tensors_of(combine(parts, [2.0, 1.0]))

    for name, value in tensors_of(combine([parts[0], *parts])).items():
        assert name == "tokens" or close(weighted[name], value), name
    assert int(weighted["tokens"]) == 3 * LENGTH
    with pytest.raises(ValueError, match="one weight for each"):
        combine(parts, [1.0])


def test_a_silent_part_adds_nothing(layer: LayerWeights, windows: Tensor, statistics: LayerStatistics) -> None:
    silent = replace(statistics, weight=torch.zeros(3).double(), gamma_weight=torch.zeros_like(statistics.gamma_weight))
    alone = measure_layer(layer, windows[:1], frequencies_of(SHAPE))

    for name, value in tensors_of(combine([alone, silent])).items():
        assert name == "tokens" or close(value, tensors_of(alone)[name]), name
    assert not combine([silent, silent]).gamma.any()


@pytest.mark.parametrize("scores", [1, 2 * LENGTH, 5 * LENGTH, 7 * LENGTH])
def test_rows_in_blocks_give_the_same(
    layer: LayerWeights, windows: Tensor, statistics: LayerStatistics, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heads a group: 1, 1, 2 and 3 rows at once of nine, so that the last block is shorter too."""
    whole = source_attention(layer, windows[0], frequencies_of(SHAPE))
    monkeypatch.setattr(module, "SCORES_AT_ONCE", scores)

    for name, value in tensors_of(measure_layer(layer, windows, frequencies_of(SHAPE))).items():
        assert close(value, tensors_of(statistics)[name]), name
    assert close(source_attention(layer, windows[0], frequencies_of(SHAPE)), whole)


def test_what_must_be_positive_is(statistics: LayerStatistics) -> None:
    for metric in statistics.query_metric:
        assert torch.allclose(metric, metric.T)
        assert float(torch.linalg.eigvalsh(metric)[0]) > 0
    for second in statistics.key_second:
        assert torch.allclose(second, second.conj().T)
    assert bool((statistics.value_weight > 0).all())
    # Each token's probabilities have a sum of squares between 1 / T and 1.
    assert bool((statistics.value_weight <= 1).all())
    assert float(statistics.gamma.abs().max()) <= 1


def test_a_pair_that_hardly_turns_keeps_its_phase(layer: LayerWeights, windows: Tensor) -> None:
    still = torch.tensor([1.0, 1e-9, 0.0], dtype=torch.float64)

    gamma = measure_layer(layer, windows, still).gamma

    assert torch.allclose(gamma[:, 1:], torch.ones(4, 2, dtype=torch.complex128), rtol=0, atol=1e-6)
    assert float(gamma[:, 0].abs().max()) < 0.99


def test_a_head_that_looks_one_token_back_has_the_phase_of_that_distance() -> None:
    """Only distances 0 and 1 exist in windows of two tokens; the score at both moves the output alike."""
    shape = AttentionShape(hidden_size=6, num_heads=1, num_kv_heads=1, head_dim=6)
    layer, frequencies = random_layer(shape, seed=8), frequencies_of(shape)

    gamma = measure_layer(layer, random_windows(shape, seed=9, windows=5, length=2), frequencies).gamma[0]

    expected = [(1 + cmath.exp(-1j * theta)) / 2 for theta in frequencies.tolist()]
    assert torch.allclose(gamma, torch.tensor(expected, dtype=torch.complex128), rtol=0, atol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
def test_the_order_of_heads_does_not_matter(bias: bool) -> None:
    layer = random_layer(SHAPE, seed=10, bias=bias)
    plain = measured(layer)
    heads, groups = [1, 0, 3, 2], [1, 0]

    in_group, across = measured(permute_query_heads(layer, heads)), measured(permute_groups(layer, groups))

    for name in ("query_metric", "value_weight", "gamma", "query_norm"):
        assert close(getattr(in_group, name), getattr(plain, name)[heads]), name
        assert close(getattr(across, name), getattr(plain, name)[[2, 3, 0, 1]]), name
    assert close(in_group.key_second, plain.key_second)
    assert close(across.key_second, plain.key_second[:, groups][:, :, groups])
    assert close(across.key_norm, plain.key_norm[groups])


def test_single_precision_inputs_are_measured_in_double(layer: LayerWeights, windows: Tensor) -> None:
    single = measure_layer(layer, windows.float(), frequencies_of(SHAPE))

    double = measure_layer(layer, windows, frequencies_of(SHAPE))
    assert {value.dtype for value in tensors_of(single).values()} == {torch.float64, torch.complex128, torch.int64}
    assert all(close(value, tensors_of(double)[name], 1e-4) for name, value in tensors_of(single).items())


def test_no_windows_are_refused(layer: LayerWeights) -> None:
    with pytest.raises(ValueError, match="at least one window"):
        measure_layer(layer, torch.empty(0, 4, 12), frequencies_of(SHAPE))
