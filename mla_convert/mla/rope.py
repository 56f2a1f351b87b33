"""Rotary position embedding in float64: frequencies, row layouts and rotation of complex pairs.

A rotary pair `(x, y)` is held as one complex number `x + iy`; position `p` multiplies it by `e^{iθp}`.
The score of query `q` at `t` with key `k` at `j` is then `Re Σ_i conj(q_i) e^{-iθ_i(t-j)} k_i` (math.md 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def default_frequencies(theta: float, rotary_dim: int) -> Tensor:
    """The geometric set `θ^(-2i/rotary_dim)` of the RoFormer paper (Su et al., 2021, equation 15).

    Returns:
        (rotary_dim / 2,) float64, radians per position.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return torch.pow(torch.tensor(theta, dtype=torch.float64), -exponent)


def llama3_frequencies(
    frequencies: Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_length: int
) -> Tensor:
    """Llama-3.1's scaling: slow pairs divided by `factor`, fast pairs kept, a linear blend between.

    Args:
        frequencies: (P,) unscaled, radians per position.
        factor: Divisor of every pair whose wavelength exceeds `original_length / low_freq_factor`.
        low_freq_factor: See `factor`.
        high_freq_factor: Pairs with wavelength below `original_length / high_freq_factor` are kept.
        original_length: Context length of pre-training, tokens.

    Returns:
        (P,) float64.
    """
    wavelength = 2 * math.pi / frequencies  # (P,)
    blend = (original_length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelength > original_length / low_freq_factor, frequencies / factor, smooth)
    return torch.where(wavelength < original_length / high_freq_factor, frequencies, scaled)


def to_pairs(rows: Tensor) -> Tensor:
    """Half-split rows `[x_0..x_{P-1} | y_0..y_{P-1}]` of each head as complex pairs.

    Args:
        rows: (heads, d, ...) real.

    Returns:
        (heads, d/2, ...) complex128.
    """
    half = rows.shape[1] // 2
    return torch.complex(rows[:, :half].double(), rows[:, half:].double())


def from_pairs(pairs: Tensor) -> Tensor:
    """Inverse of `to_pairs`: (heads, P, ...) complex -> (heads, 2P, ...) half-split real."""
    return torch.cat([pairs.real, pairs.imag], dim=1)


def rotation(positions: Tensor, frequencies: Tensor) -> Tensor:
    """`e^{iθp}` for each position and pair.

    Args:
        positions: (T,) token positions.
        frequencies: (P,) radians per position.

    Returns:
        (T, P) complex128.
    """
    angle = positions.double()[:, None] * frequencies.double()[None, :]  # (T, P)
    return torch.polar(torch.ones_like(angle), angle)
