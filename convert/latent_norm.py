"""Two exact ways round the RMSNorm that the stock architecture puts on its latent (design.md, "Output profiles").

A low-rank factor has no norm there. Either the norm is drowned in its own epsilon, or in a constant channel;
in both cases it becomes a fixed factor that the weights around it undo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

# transformers builds the latent norms of DeepseekV3Attention with this epsilon whatever the configuration says.
LATENT_NORM_EPS = 1e-6
# A relative change of the norm below half a unit in the last place of float32 cannot be seen.
NEGLIGIBLE = 2.0**-25
# 2⁻³² keeps mean(c²) up to 5e5 negligible against the epsilon, and its products far from float32's smallest numbers.
EPSILON_SCALE = 2.0**-32
# Largest power of two whose products with √n stay inside fp16 for n up to 1,000 or so; clipped below for larger n.
CONSTANT_CHANNEL = 2.0**13
FLOAT16_LARGEST = 65504.0
# Largest norm weight, a power of two well inside float16; what is beyond goes into the next matrix.
FLOAT16_WEIGHT = 2.0**14
# Longest latent as a share of the channel: its square, halved, is the relative error, 2⁻¹⁸.
CONSTANT_ROUTE_SHARE = 2.0**-8.5
# A latent of nothing still needs a finite scale.
SMALLEST_BOUND = 1e-6

LatentNormRoute = Literal["epsilon", "constant"]


@dataclass(frozen=True)
class NeutralNorm:
    """Constants that make `RMSNorm` a fixed factor.

    With stored rows `input_scale·A`, norm weight `weight` and stored rows `output_factor·B`, the stock path
    `B·norm(A·x)` equals `B·A·x` to rounding, and what the cache holds is `A·x` times a number near one.

    Attributes:
        route: `epsilon` or `constant`.
        width: Stored width, the constant channel and padding included.
        input_scale: Power of two on the rows that feed the norm.
        weight: Norm weight on every useful channel; a power of two in float32.
        output_factor: Remaining factor, put into the matrix that reads the normed latent.
        channel: Bias of the constant channel (the last one), None for `epsilon`.
        channel_value: What that channel holds after the norm with weight one, None for `epsilon`.
        relative_error: Bound on the relative error of the neutralised norm.
    """

    route: LatentNormRoute
    width: int
    input_scale: float
    weight: float
    output_factor: float
    channel: float | None
    channel_value: float | None
    relative_error: float


def norm_bound(rows: Tensor, input_norm_weight: Tensor, bias: Tensor | None = None) -> float:
    """Largest possible `‖A·x + b‖` where `x` comes out of an RMSNorm: `‖A·diag(w)‖₂·√D + ‖b‖`.

    Args:
        rows: (r, D) float64.
        input_norm_weight: (D,) weight of the norm that makes `x`; a normed vector has `‖x/w‖ ≤ √D`.
        bias: (r,) or None.
    """
    weighted = rows * input_norm_weight.double()[None, :]
    bound = float(torch.linalg.matrix_norm(weighted, ord=2)) * math.sqrt(rows.shape[1])
    return bound if bias is None else bound + float(bias.norm())


def power_of_two(value: float) -> float:
    """The power of two nearest to `value` on a logarithmic scale."""
    return 2.0 ** round(math.log2(value))


def neutralise(route: LatentNormRoute, width: int, bound: float, digits: int | None = None) -> NeutralNorm:
    """Constants for a latent whose length never exceeds `bound`.

    Args:
        route: Which way.
        width: Stored width of the normed vector, constant channel included.
        bound: Largest `‖c‖`, from `norm_bound`.
        digits: Significant bits of the dtype that holds weight and factor; None for float32 and better.

    Returns:
        Constants whose error is negligible in float32 (`epsilon`) or below 1e-5 (`constant`).
    """
    norm = _by_epsilon(width, bound) if route == "epsilon" else _by_constant(width, bound)
    if digits is None:
        return norm
    weight, factor = two_short_factors(norm.weight, norm.output_factor, digits)
    return replace(norm, weight=weight, output_factor=factor)


def two_short_factors(weight: float, factor: float, digits: int) -> tuple[float, float]:
    """Two numbers of few bits whose product is nearest to `weight·factor`.

    One number of 8 bits misses it by up to 2⁻⁹, the best pair by about its square. A matrix of short numbers times
    the second one is then no worse off than by its own rounding, and an identity is exact.

    Args:
        weight: A power of two; the first number is at most twice as large.
        factor: What is left.
        digits: Significant bits.
    """
    steps = 2 ** (digits - 1)
    candidates = [weight * (steps + step) / steps for step in range(steps)]
    pairs = [(first, _shorten(weight * factor / first, digits)) for first in candidates]
    return min(pairs, key=lambda pair: abs(pair[0] * pair[1] - weight * factor))


def _shorten(value: float, digits: int) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 2**digits), exponent - digits)


def _by_epsilon(width: int, bound: float) -> NeutralNorm:
    # norm(s·c) = s·c/√(s²·mean(c²) + ε) = (s/√ε)·c·(1 - ½·s²·mean(c²)/ε + …)
    mean_square = bound**2 / width
    scale = EPSILON_SCALE
    while 0.5 * scale**2 * mean_square / LATENT_NORM_EPS > NEGLIGIBLE:
        scale /= 2
    fixed = scale / math.sqrt(LATENT_NORM_EPS)
    weight = power_of_two(1 / fixed)
    return NeutralNorm(
        route="epsilon",
        width=width,
        input_scale=scale,
        weight=weight,
        output_factor=1 / (fixed * weight),
        channel=None,
        channel_value=None,
        relative_error=0.5 * scale**2 * mean_square / LATENT_NORM_EPS,
    )


def _by_constant(width: int, bound: float) -> NeutralNorm:
    # norm([s·c, K]) = [s·c, K]·√n/K·(1 - ½(s‖c‖/K)² + …); K = 2^k·√n makes √n/K a power of two.
    channel = CONSTANT_CHANNEL * math.sqrt(width)
    while channel > FLOAT16_LARGEST / 2:
        channel /= 2
    stored = float(torch.tensor(channel).to(torch.float16))
    fixed = 1 / math.sqrt(stored**2 / width + LATENT_NORM_EPS)
    # As large as the error allows: float16 has few bits left for small numbers beside a large constant.
    scale = 2.0 ** math.floor(math.log2(stored * CONSTANT_ROUTE_SHARE / max(bound, SMALLEST_BOUND)))
    weight = min(max(power_of_two(1 / (fixed * scale)), 1 / FLOAT16_WEIGHT), FLOAT16_WEIGHT)
    return NeutralNorm(
        route="constant",
        width=width,
        input_scale=scale,
        weight=weight,
        output_factor=1 / (fixed * scale * weight),
        channel=stored,
        channel_value=stored * fixed,
        relative_error=0.5 * (scale * bound / stored) ** 2,
    )
