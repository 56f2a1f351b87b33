"""The published recipes against the papers' equations, written out number by number without the code under test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_convert.convert.factorize import ContentMap, care_ranks
from mla_convert.convert.greedy_pairs import greedy_scores
from mla_convert.convert.layer import LayerPlan, convert_layer
from mla_convert.convert.rope_rows import content_pairs
from mla_convert.convert.rope_select import RopeSlots, best_heads, head_slots, mean_slots, two_norm_scores
from mla_convert.convert.rorope import rorope_slots
from mla_convert.convert.selection import key_value_balance
from mla_convert.convert.statistics import LayerStatistics, measure_layer
from mla_convert.convert.weights import AttentionShape, LayerWeights
from mla_convert.mla.weights import MLALayerWeights
from tests.convert.support import frequencies_of, key_map, random_layer, random_windows, value_map
from tests.convert.transcriptions import care, transmla, weight_svd
from tests.convert.transcriptions.layers import Layer
from tests.tolerances import TRANSCRIPTION

SHAPE = AttentionShape(hidden_size=40, num_heads=6, num_kv_heads=3, head_dim=8)
RANK = 11
PAIRS, GROUPS = SHAPE.pairs, SHAPE.num_kv_heads


@pytest.fixture(scope="module")
def weights() -> LayerWeights:
    return random_layer(SHAPE, seed=21)


@pytest.fixture(scope="module")
def windows() -> Tensor:
    # Few enough to be looped over, many enough that the covariance has full rank.
    return random_windows(SHAPE, seed=22, windows=5, length=12)


@pytest.fixture(scope="module")
def statistics(weights: LayerWeights, windows: Tensor) -> LayerStatistics:
    return measure_layer(weights, windows, frequencies_of(SHAPE))


@pytest.fixture(scope="module")
def plain(weights: LayerWeights) -> Layer:
    parts = (weights.q, weights.k, weights.v, frequencies_of(SHAPE))
    return Layer(*(np.array(part.tolist()) for part in parts), scale=weights.softmax_scale)


@pytest.fixture(scope="module")
def tokens(windows: Tensor) -> Any:
    return np.array(windows.flatten(0, 1).tolist())


def converted(weights: LayerWeights, statistics: LayerStatistics, slots: RopeSlots, **changes: Any) -> MLALayerWeights:
    fields: dict[str, Any] = {
        "qk_nope_head_dim": SHAPE.head_dim,
        "kv_lora_rank": RANK,
        "factorization": "joint",
        "key_rank": None,
        "weighting": "weight",
        "measured_gamma": False,
        "output_constant": False,
        "damping": 0.0,
        "centred": False,
    }
    return convert_layer(weights, statistics, LayerPlan(slots=slots, **{**fields, **changes}))[0]


def content_of(layer: MLALayerWeights, slots: RopeSlots) -> Tensor:
    """(G, d, D): the content key map, each kept row at its place in the head, zeros elsewhere."""
    full = torch.zeros(GROUPS, SHAPE.head_dim, SHAPE.hidden_size, dtype=torch.float64)
    for group, pairs in enumerate(content_pairs(slots)):
        rows = [*pairs, *(pair + PAIRS for pair in pairs)]
        full[group, rows] = key_map(layer)[group, : len(rows)]
    return full


def assert_close(found: Tensor, expected: Any) -> None:
    target = torch.tensor(np.asarray(expected))
    assert found.shape == target.shape
    assert float((found - target).abs().max()) <= TRANSCRIPTION * float(target.abs().max())


@pytest.mark.parametrize(("slots", "fold"), [(4, 1), (4, 2), (4, 4), (2, 2), (2, 4), (2, 1), (1, 4)])
def test_transmla(
    weights: LayerWeights,
    statistics: LayerStatistics,
    windows: Tensor,
    plain: Layer,
    tokens: Any,
    slots: int,
    fold: int,
) -> None:
    chosen = rorope_slots(weights, statistics.input, frequencies_of(SHAPE), slots, fold)
    rows, rest = transmla.rotary_and_rest(plain, tokens, slots, fold)
    alpha = key_value_balance(weights, chosen, windows)

    found = converted(weights, statistics, chosen, weighting="activation", balance=alpha)

    flat = plain.keys.reshape(-1, SHAPE.hidden_size)
    assert alpha == pytest.approx(
        transmla.balance(rest @ flat, plain.values.reshape(-1, SHAPE.hidden_size), tokens), rel=TRANSCRIPTION
    )
    for slot, (real, imaginary) in enumerate(rows):
        row = torch.view_as_real(found.k_rope[slot]).T
        # An eigenvector's sign is anyone's choice.
        sign = torch.sign((row[0] * torch.tensor(real)).sum())
        assert_close(row * sign, np.stack([real, imaginary]))
    keys, values = transmla.compressed(plain, tokens, rest, RANK)
    assert_close(content_of(found, chosen).flatten(0, 1), keys)
    assert_close(value_map(found).flatten(0, 1), values)
    stride = PAIRS // slots
    assert torch.equal(found.frequencies, frequencies_of(SHAPE)[::stride])


def rotated_by_head(slots: RopeSlots) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(GROUPS)]
    for (pair,), head in zip(slots.mixes, slots.component, strict=True):
        found[head].add(pair)
    return found


def compare_content(found: MLALayerWeights, expected_keys: Any, expected_values: Any, kept: list[set[int]]) -> None:
    """Both sides hold the rows of pairs that are not rotated, head by head."""
    rows = torch.cat([key_map(found)[head, : 2 * (PAIRS - len(kept[head]))] for head in range(GROUPS)])
    assert_close(rows, expected_keys)
    assert_close(value_map(found).flatten(0, 1), expected_values)


@pytest.mark.parametrize("counts", [(3, 2, 1, 0), (1, 1, 1, 3)])
def test_mha2mla(
    weights: LayerWeights, statistics: LayerStatistics, plain: Layer, tokens: Any, counts: tuple[int, ...]
) -> None:
    scores = two_norm_scores(statistics)
    expected = [[weight_svd.contribution(plain, tokens, g, pair) for pair in range(PAIRS)] for g in range(GROUPS)]
    assert_close(scores, expected)
    slots = head_slots(SHAPE, best_heads(scores, counts), frequencies_of(SHAPE))
    kept = rotated_by_head(slots)

    together = converted(weights, statistics, slots)
    apart = converted(weights, statistics, slots, factorization="split", key_rank=4)

    compare_content(together, *weight_svd.joint_svd(plain, kept, RANK), kept)
    compare_content(apart, *weight_svd.split_svd(plain, kept, 4, RANK - 4), kept)


def test_elitekv(weights: LayerWeights, statistics: LayerStatistics, windows: Tensor, plain: Layer) -> None:
    few = windows[:2]
    scores = greedy_scores(weights, few, frequencies_of(SHAPE))
    for group in range(GROUPS):
        order = scores[group].argsort(descending=True).tolist()
        # The last pick has no other pair to be compared with.
        assert order == weight_svd.ropelite(plain, np.array(few.tolist()), group, PAIRS)
    slots = head_slots(SHAPE, best_heads(scores, (2, 1, 2, 1)), frequencies_of(SHAPE))
    kept = rotated_by_head(slots)

    compare_content(converted(weights, statistics, slots), *weight_svd.joint_svd(plain, kept, RANK), kept)


@pytest.mark.parametrize("cholesky", [False, True], ids=["CARE", "SVD-LLM"])
def test_care(weights: LayerWeights, statistics: LayerStatistics, plain: Layer, tokens: Any, cholesky: bool) -> None:
    slots = rorope_slots(weights, statistics.input, frequencies_of(SHAPE), 2, 2)
    _, rest = transmla.rotary_and_rest(plain, tokens, 2, 2)
    c = care.covariance(tokens)
    content, values = rest @ plain.keys.reshape(-1, SHAPE.hidden_size), plain.values.reshape(-1, SHAPE.hidden_size)

    found = converted(weights, statistics, slots, weighting="activation", factorization="split", rank_rule="care")

    roots = np.linalg.cholesky(c)
    spectra = [list(np.linalg.svd(part @ roots)[1]) for part in (content, values)]
    ranks = care.shared_ranks(*spectra, RANK)
    assert min(ranks) > 0
    assert_close(content_of(found, slots).flatten(0, 1), care.whitened(content, c, ranks[0], cholesky=cholesky))
    assert_close(value_map(found).flatten(0, 1), care.whitened(values, c, ranks[1], cholesky=cholesky))


@pytest.mark.parametrize("spectra", [([3.0, 2.0, 0.5], [5.0, 0.1]), ([1.0], [1.0, 1.0, 1.0]), ([2.0, 1.0], [2.0, 1.0])])
def test_the_ranks_of_care(spectra: tuple[list[float], list[float]]) -> None:
    keys, values = (torch.diag(torch.tensor(part, dtype=torch.float64)) for part in spectra)
    size = max(len(part) for part in spectra)
    maps = []
    for part in (keys, values):
        rows = torch.zeros(len(part), size, dtype=torch.float64)
        rows[:, : len(part)] = part
        maps.append(ContentMap(rows, torch.eye(len(part), dtype=torch.float64), torch.eye(size, dtype=torch.float64)))
    for rank in range(1, sum(map(len, spectra)) + 1):
        assert care_ranks(maps[0], maps[1], rank) == care.shared_ranks(*spectra, rank)


@pytest.mark.parametrize("count", [1, 3])
def test_x_ecomla(weights: LayerWeights, statistics: LayerStatistics, plain: Layer, count: int) -> None:
    slots = mean_slots(SHAPE, count, frequencies_of(SHAPE))
    width = SHAPE.head_dim - 2 * count

    found = converted(weights, statistics, slots, whole_keys=True, qk_nope_head_dim=width)

    rope, keys, values = weight_svd.x_ecomla(plain, count, RANK)
    assert_close(torch.view_as_real(found.k_rope).transpose(1, 2).flatten(0, 1), rope)
    ours = key_map(found)  # (G, width, D), real parts first
    ordered = torch.stack([ours[:, : width // 2], ours[:, width // 2 :]], dim=2).flatten(1, 2)
    assert_close(ordered, keys)
    assert_close(value_map(found).flatten(0, 1), values)
    assert torch.equal(found.frequencies, frequencies_of(SHAPE)[PAIRS - count :])
    # Every head's query meets the one rotary key as it is.
    assert torch.equal(found.q_rope.real, weights.q[:, PAIRS - count : PAIRS])
    assert torch.equal(found.q_nope[:, : width // 2], weights.q[:, : PAIRS - count])
