from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mla_convert.mla.rope import default_frequencies, from_pairs, llama3_frequencies, rotation, to_pairs
from tests.convert.support import SEEDED, complex_normal, normal
from tests.tolerances import FLOAT64_ALGEBRA, ROTARY_FLOAT32


def turned(x: float, y: float, angle: float) -> tuple[float, float]:
    """A 2 × 2 rotation matrix times (x, y)."""
    return x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)


def rotated_rows(rows: Tensor, position: int, frequencies: Tensor) -> Tensor:
    """(heads, d) half-split rows at a position, pair by pair with explicit matrices."""
    out, half = rows.clone(), rows.shape[1] // 2
    for head in range(rows.shape[0]):
        for pair in range(half):
            angle = position * float(frequencies[pair])
            out[head, pair], out[head, half + pair] = turned(
                float(rows[head, pair]), float(rows[head, half + pair]), angle
            )
    return out


@SEEDED
@given(theta=st.sampled_from([2.0, 100.0, 10_000.0, 500_000.0, 1e6]), pairs=st.integers(1, 64))
def test_frequencies_are_the_geometric_set(theta: float, pairs: int) -> None:
    found = default_frequencies(theta, 2 * pairs)

    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([1 / theta ** (i / pairs) for i in range(pairs)], rel=FLOAT64_ALGEBRA)


@pytest.mark.parametrize(("theta", "dim"), [(10_000.0, 64), (1e6, 128), (500_000.0, 16)])
def test_frequencies_are_those_of_transformers(theta: float, dim: int) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, rope_parameters=rope)

    expected = LlamaRotaryEmbedding(config).inv_freq.double()

    assert torch.allclose(default_frequencies(theta, dim), expected, rtol=ROTARY_FLOAT32, atol=0)


def test_llama3_scaling_has_three_zones() -> None:
    """Llama-3.1's numbers, recomputed pair by pair from the paper's description."""
    plain = default_frequencies(500_000.0, 128)
    scaled = llama3_frequencies(plain, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)

    zones = {"fast": 0, "blended": 0, "slow": 0}
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        turns = 8192 * before / (2 * math.pi)  # full turns within the original context
        if turns > 4.0:
            zones["fast"] += 1
            assert after == before
        elif turns < 1.0:
            zones["slow"] += 1
            assert after == pytest.approx(before / 8, rel=FLOAT64_ALGEBRA)
        else:
            zones["blended"] += 1
            share = (turns - 1) / 3
            assert after == pytest.approx(before * (share + (1 - share) / 8), rel=FLOAT64_ALGEBRA)
    assert zones == {"fast": 29, "blended": 6, "slow": 29}


@SEEDED
@given(heads=st.integers(1, 4), pairs=st.integers(1, 9), columns=st.integers(1, 5))
def test_pairs_join_the_two_halves_of_a_head(heads: int, pairs: int, columns: int) -> None:
    rows = normal(heads, 2 * pairs, columns, seed=pairs)

    joined = to_pairs(rows)

    assert joined.shape == (heads, pairs, columns)
    for head in range(heads):
        for pair in range(pairs):
            assert torch.equal(joined[head, pair].real, rows[head, pair])
            assert torch.equal(joined[head, pair].imag, rows[head, pairs + pair])
    assert torch.equal(from_pairs(joined), rows)


def test_pairs_of_half_precision_are_taken_in_float64() -> None:
    assert to_pairs(torch.ones(1, 4, 2, dtype=torch.bfloat16)).dtype == torch.complex128


@pytest.mark.parametrize("position", [0, 1, 17, 4096])
def test_rotation_is_the_explicit_matrix(position: int) -> None:
    frequencies, rows = default_frequencies(100.0, 12), normal(3, 12, seed=1)

    turn = rotation(torch.tensor([position]), frequencies)[0]  # (P,)
    found = from_pairs(to_pairs(rows) * turn)

    assert torch.allclose(found, rotated_rows(rows, position, frequencies), rtol=0, atol=FLOAT64_ALGEBRA)


def test_rotation_is_that_of_transformers() -> None:
    frequencies, rows = default_frequencies(100.0, 12), normal(2, 3, 5, 12, seed=2)  # (B, heads, T, d)
    angle = torch.arange(5)[:, None] * frequencies  # (T, P)
    full = torch.cat([angle, angle], dim=-1)[None]

    expected, _ = apply_rotary_pos_emb(rows, rows, full.cos(), full.sin())

    turn = rotation(torch.arange(5), frequencies)
    for batch in range(2):
        for token in range(5):
            found = from_pairs(to_pairs(rows[batch, :, token]) * turn[token])
            assert torch.allclose(found, expected[batch, :, token], rtol=0, atol=FLOAT64_ALGEBRA)


@SEEDED
@given(query_at=st.integers(0, 300), key_at=st.integers(0, 300), shift=st.integers(0, 1000))
def test_scores_are_the_real_part_and_see_distances_only(query_at: int, key_at: int, shift: int) -> None:
    frequencies = default_frequencies(100.0, 10)
    query, key = normal(1, 10, seed=3), normal(1, 10, seed=4)

    scores = [
        float(rotated_rows(query, query_at + by, frequencies)[0] @ rotated_rows(key, key_at + by, frequencies)[0])
        for by in (0, shift)
    ]

    distance = torch.tensor([query_at - key_at])
    turn = rotation(-distance, frequencies)[0]
    complex_score = (to_pairs(query)[0].conj() * turn * to_pairs(key)[0]).sum().real
    assert scores[0] == pytest.approx(float(complex_score), abs=1e-9)
    assert scores[1] == pytest.approx(scores[0], abs=1e-9)


def real_form(matrix: Tensor) -> Tensor:
    """A complex (m, G) matrix as the real (2m, 2G) matrix on coordinates (x_0, y_0, x_1, y_1, …)."""
    rows = []
    for row in matrix.tolist():
        rows.append([number for a in row for number in (a.real, -a.imag)])
        rows.append([number for a in row for number in (a.imag, a.real)])
    return torch.tensor(rows, dtype=torch.float64)


def block_rotation(angle: float, count: int) -> Tensor:
    rows = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    return torch.block_diag(*[torch.tensor(rows, dtype=torch.float64)] * count)


@SEEDED
@given(heads=st.integers(1, 5), slots=st.integers(1, 5), angle=st.floats(-10, 10), seed=st.integers(0, 99))
def test_complex_maps_over_heads_commute_with_rotation(heads: int, slots: int, angle: float, seed: int) -> None:
    mixing = real_form(complex_normal(slots, heads, seed=seed))

    first = mixing @ block_rotation(angle, heads)
    last = block_rotation(angle, slots) @ mixing

    assert torch.allclose(first, last, rtol=0, atol=FLOAT64_ALGEBRA)


def test_a_map_that_is_only_real_linear_does_not_commute() -> None:
    """The property above can fail: conjugation, and mixing pairs of two frequencies, both break it."""
    conjugation = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    turn = block_rotation(0.7, 1)
    assert (conjugation @ turn - turn @ conjugation).abs().max() > 0.5

    two_speeds = torch.block_diag(block_rotation(0.7, 1), block_rotation(0.1, 1))
    mixing = real_form(complex_normal(2, 2, seed=1))
    assert (mixing @ two_speeds - two_speeds @ mixing).abs().max() > 0.1
