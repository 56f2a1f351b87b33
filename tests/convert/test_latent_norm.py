"""Both routes through float32 norms as stock transformers computes them."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from mla_convert.convert.latent_norm import (
    CONSTANT_CHANNEL,
    FLOAT16_LARGEST,
    FLOAT16_WEIGHT,
    LATENT_NORM_EPS,
    NeutralNorm,
    neutralise,
    norm_bound,
    power_of_two,
)
from tests.convert.support import SEEDED, normal
from tests.tolerances import FLOAT64_ALGEBRA, NEUTRAL_NORM_CONSTANT, NEUTRAL_NORM_FLOAT32

Route = Literal["epsilon", "constant"]
BOUND = {"epsilon": NEUTRAL_NORM_FLOAT32, "constant": NEUTRAL_NORM_CONSTANT}
widths = st.integers(1, 600)
lengths = st.floats(1e-3, 1e4)


def useful(norm: NeutralNorm) -> int:
    return norm.width - (norm.channel is not None)


def through(norm: NeutralNorm, latent: Tensor, module: nn.Module) -> Tensor:
    """What a stock layer caches for a latent (tokens, useful width), in the module's dtype."""
    scaled = (latent * norm.input_scale).to(module.weight.dtype)
    if norm.channel is not None:
        scaled = torch.cat([scaled, torch.full((len(scaled), 1), norm.channel, dtype=scaled.dtype)], dim=1)
    with torch.no_grad():
        module.weight.fill_(norm.weight)
        cached: Tensor = module(scaled)
    return cached[:, : latent.shape[1]]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@SEEDED
@given(width=widths, bound=lengths, share=st.floats(1e-3, 1.0), route=st.sampled_from(["epsilon", "constant"]))
@example(width=600, bound=1e4, share=1.0, route="constant")
@example(width=1, bound=1e4, share=1.0, route="epsilon")
def test_the_norm_becomes_a_fixed_factor(width: int, bound: float, share: float, route: Route) -> None:
    norm = neutralise(route, width + (route == "constant"), bound)
    latent = normal(3, useful(norm), seed=width)
    latent *= bound * share / latent.norm(dim=1, keepdim=True)
    up = normal(5, useful(norm), seed=width + 1)

    for module in (DeepseekV3RMSNorm(norm.width, eps=LATENT_NORM_EPS), nn.RMSNorm(norm.width, eps=LATENT_NORM_EPS)):
        cached = through(norm, latent, module)
        values = cached @ (up * norm.output_factor).float().T

        assert relative_error(cached * norm.output_factor, latent) <= BOUND[route]
        scale = float((latent.norm(dim=1, keepdim=True) * up.norm(dim=1)).max())
        assert float((values.double() - latent @ up.T).abs().max()) <= BOUND[route] * scale


@SEEDED
@given(width=widths, bound=lengths, route=st.sampled_from(["epsilon", "constant"]))
def test_scales_are_powers_of_two_and_the_cache_keeps_its_size(width: int, bound: float, route: Route) -> None:
    norm = neutralise(route, width, bound)

    # A power of two moves no bit of a mantissa, so bf16 weights lose nothing by it.
    assert math.frexp(norm.input_scale)[0] == 0.5
    assert math.frexp(norm.weight)[0] == 0.5
    if norm.weight in (FLOAT16_WEIGHT, 1 / FLOAT16_WEIGHT):
        assert route == "constant"  # float16 holds no more; the next matrix takes the rest
    else:
        assert 2**-0.5 <= norm.output_factor <= 2**0.5
    assert norm.relative_error <= (2.0**-25 if route == "epsilon" else 2.0**-18)


@SEEDED
@given(width=widths, per_channel=st.floats(1e-3, 1e4))
def test_the_constant_channel_fits_float16(width: int, per_channel: float) -> None:
    bound = per_channel * math.sqrt(width)
    norm = neutralise("constant", width, bound)

    assert norm.channel is not None
    assert norm.channel_value is not None
    assert 0 < norm.channel <= FLOAT16_LARGEST
    assert float(torch.tensor(norm.channel).to(torch.float16)) == norm.channel
    assert norm.input_scale * bound <= FLOAT16_LARGEST
    assert norm.weight <= FLOAT16_LARGEST
    expected = norm.channel / math.sqrt(norm.channel**2 / width + LATENT_NORM_EPS)
    assert norm.channel_value == pytest.approx(expected, rel=FLOAT64_ALGEBRA)


@SEEDED
@given(width=st.integers(2, 600), per_channel=st.floats(4.0, 64.0))
def test_the_constant_route_holds_in_float16(width: int, per_channel: float) -> None:
    bound = per_channel * math.sqrt(width)
    norm = neutralise("constant", width, bound)
    latent = normal(4, width - 1, seed=width)
    latent *= bound / latent.norm(dim=1, keepdim=True)

    cached = through(norm, latent, DeepseekV3RMSNorm(width, eps=LATENT_NORM_EPS).half())

    # Three roundings to half precision: the latent, the normed latent and its product with the weight.
    assert relative_error(cached.double() * norm.output_factor, latent) <= 3 * 2.0**-11


def test_the_scale_of_the_constant_channel_is_a_power_of_two_times_the_root_of_the_width() -> None:
    norm = neutralise("constant", 49, 1.0)

    assert norm.channel == pytest.approx(CONSTANT_CHANNEL / 2 * 7, rel=2.0**-11)


@pytest.mark.parametrize("route", ["epsilon", "constant"])
def test_a_latent_of_any_size_still_fits(route: Route) -> None:
    for bound in (1e-12, 1e6, 1e9):
        norm = neutralise(route, 32, bound)
        latent = normal(2, useful(norm), seed=1)
        latent *= bound / latent.norm(dim=1, keepdim=True)
        found = through(norm, latent, DeepseekV3RMSNorm(32, eps=LATENT_NORM_EPS))
        assert relative_error(found * norm.output_factor, latent) <= BOUND[route]


def test_a_norm_left_as_it_is_fails_these_bounds() -> None:
    latent = normal(8, 32, seed=1) * torch.linspace(0.5, 2, 8)[:, None]
    with torch.no_grad():
        normed = DeepseekV3RMSNorm(32)(latent.float())
    best = float((normed.double() * latent).sum() / normed.double().square().sum())
    assert relative_error(normed * best, latent) > 0.1


@SEEDED
@given(rank=st.integers(1, 6), hidden=st.integers(1, 8), seed=st.integers(0, 40), biased=st.booleans())
def test_no_normed_input_exceeds_the_bound(rank: int, hidden: int, seed: int, biased: bool) -> None:
    rows, weight = normal(rank, hidden, seed=seed), normal(hidden, seed=seed + 1)
    bias = normal(rank, seed=seed + 2) if biased else None

    bound = norm_bound(rows, weight, bias)

    inputs = normal(50, hidden, seed=seed + 3) * weight.abs().max() * 10
    normed = inputs / inputs.square().mean(-1, keepdim=True).sqrt() * weight
    latent = normed @ rows.T if bias is None else normed @ rows.T + bias
    assert float(latent.norm(dim=-1).max()) <= bound * (1 + FLOAT64_ALGEBRA)


def test_the_bound_is_reached_by_the_worst_input() -> None:
    rows, weight = normal(4, 6, seed=1), normal(6, seed=2)
    worst = torch.linalg.svd(rows * weight)[2][0] * math.sqrt(6)

    assert float((rows @ (worst * weight)).norm()) == pytest.approx(norm_bound(rows, weight), rel=1e-9)


@pytest.mark.parametrize(("value", "power"), [(1.0, 1.0), (3.0, 4.0), (2.8, 2.0), (0.2, 0.25), (1e-7, 2.0**-23)])
def test_the_nearest_power_of_two(value: float, power: float) -> None:
    assert power_of_two(value) == power


@pytest.mark.parametrize("width", [8, 64, 512])
@pytest.mark.parametrize("per_channel", [0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0])
def test_the_constant_route_holds_in_float16_for_latents_of_any_size(width: int, per_channel: float) -> None:
    bound = per_channel * width**0.5
    norm = neutralise("constant", width, bound)
    latent = normal(4, width - 1, seed=width)
    latent *= bound / 4 / latent.norm(dim=1, keepdim=True)

    assert norm.weight <= FLOAT16_LARGEST
    cached = through(norm, latent, DeepseekV3RMSNorm(width, eps=LATENT_NORM_EPS).half())
    assert relative_error(cached.double() * norm.output_factor, latent) <= 3 * 2.0**-11
