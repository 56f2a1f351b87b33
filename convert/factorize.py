"""Low-rank factors of the content keys and values: joint and split, in the metric of the output error.

`min_{rank r} ‖M^{1/2} (W - up·down) C^{1/2}‖_F` with `C` the input covariance and `M` block-diagonal over the
key/value heads (math.md 3; with `M = I` this is SVD-LLM's and CARE's whitening, with both `I` the weight SVD of
MHA2MLA and X-EcoMLA). Where keys and values need different `C` (values whose mean the profile cannot store
elsewhere), the single SVD is the start of an alternating least-squares refinement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALTERNATIONS = 12
DAMPING, SCARCE_DAMPING = 1e-6, 1e-3


@dataclass(frozen=True)
class ContentMap:
    """Rows to be factorised and the metric they are judged in.

    Attributes:
        rows: (n, D) map from the attention input to keys or values of all heads.
        metric: (n, n) symmetric positive definite `M`.
        covariance: (D, D) symmetric positive definite `C`.
    """

    rows: Tensor
    metric: Tensor
    covariance: Tensor

    def error(self, approximation: Tensor) -> float:
        """`tr(M E C Eᵀ)` of `E = rows - approximation`: the expected squared output error."""
        difference = self.rows - approximation
        return float(torch.einsum("ij,jk,ik->", self.metric @ difference, self.covariance, difference))


@dataclass(frozen=True)
class Factors:
    """`keys ≈ key_up · down`, `values ≈ value_up · down`.

    Attributes:
        down: (r, D).
        key_up: (n_k, r).
        value_up: (n_v, r).
        singular_values: Spectrum of the weighted map(s), descending; keys then values for `split`.
        energy_kept: Share of the squared spectrum within the rank, 1 where nothing is cut.
    """

    down: Tensor
    key_up: Tensor
    value_up: Tensor
    singular_values: Tensor
    energy_kept: float


def psd_sqrt(matrix: Tensor, floor: float = 1e-12) -> tuple[Tensor, Tensor]:
    """Square root and inverse square root of a symmetric positive semi-definite matrix.

    Args:
        matrix: (n, n).
        floor: Eigenvalues are raised to this share of the largest.
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    if float(values[-1]) <= 0:
        # Nothing costs anything, so every direction is as good as another.
        identity = torch.eye(matrix.shape[0], dtype=matrix.dtype)
        return identity, identity
    root = values.clamp(min=floor * values[-1]).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def damping_for(tokens: int, dimensions: int) -> float:
    """How much of `damped` a covariance of so many tokens needs.

    With twice as many tokens as dimensions it stands alone; below, directions never seen get a price.
    """
    return DAMPING if tokens >= 2 * dimensions else SCARCE_DAMPING


def damped(covariance: Tensor, damping: float) -> Tensor:
    """`C + λ·tr(C)/D·I`: keeps directions that calibration never saw from being free of charge."""
    size = covariance.shape[0]
    return covariance + damping * covariance.trace() / size * torch.eye(size, dtype=covariance.dtype)


def _truncated(target: ContentMap, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Best rank-`rank` factors of one map: (down (r, D), up (n, r), singular values)."""
    rows, dimension = target.rows.shape
    metric_root, metric_inverse = psd_sqrt(target.metric)
    covariance_root, _ = psd_sqrt(target.covariance)
    left, singular, _ = torch.linalg.svd(metric_root @ target.rows @ covariance_root, full_matrices=False)
    # Enough rank for everything needs no decomposition: the rows themselves, or the input itself, are the latent.
    live = torch.nonzero(target.rows.abs().amax(1) > 0).flatten()
    if rank >= min(len(live), dimension):
        if len(live) <= dimension:
            return target.rows[live], torch.eye(rows, dtype=target.rows.dtype)[:, live], singular
        return torch.eye(dimension, dtype=target.rows.dtype), target.rows.clone(), singular
    kept = left[:, :rank]
    return kept.T @ metric_root @ target.rows, metric_inverse @ kept, singular


def joint(keys: ContentMap, values: ContentMap, rank: int) -> Factors:
    """One latent for keys and values together (MHA2MLA's joint SVD, in a weighted metric).

    Args:
        keys: Content keys of all heads.
        values: Values of all heads.
        rank: Latent width; at or above `min(D, rows)` the factors are exact.

    Returns:
        Factors with `down` of `min(rank, D, n_k + n_v)` rows.
    """
    count = keys.rows.shape[0]
    stacked = ContentMap(
        rows=torch.cat([keys.rows, values.rows]),
        metric=torch.block_diag(keys.metric, values.metric),
        covariance=values.covariance,
    )
    down, up, singular = _truncated(stacked, rank)
    key_up, value_up = up[:count], up[count:]
    exact = float((stacked.rows - up @ down).norm()) <= 1e-9 * float(stacked.rows.norm())
    if not exact and not torch.equal(keys.covariance, values.covariance):
        down, key_up, value_up = _alternate(keys, values, down)
    return Factors(down, key_up, value_up, singular, _energy(singular[: down.shape[0]], singular))


def split(keys: ContentMap, values: ContentMap, key_rank: int, value_rank: int) -> Factors:
    """Separate factors of keys and values; the latent is their concatenation (MHA2MLA's split SVD)."""
    key_down, key_up, key_singular = _truncated(keys, key_rank)
    value_down, value_up, value_singular = _truncated(values, value_rank)
    kept_keys, kept_values = key_down.shape[0], value_down.shape[0]
    singular = torch.cat([key_singular, value_singular])
    kept = torch.cat([key_singular[:kept_keys], value_singular[:kept_values]])
    return Factors(
        down=torch.cat([key_down, value_down]),
        key_up=torch.cat([key_up, key_up.new_zeros(key_up.shape[0], kept_values)], dim=1),
        value_up=torch.cat([value_up.new_zeros(value_up.shape[0], kept_keys), value_up], dim=1),
        singular_values=singular,
        energy_kept=_energy(kept, singular),
    )


def split_ranks(keys: ContentMap, values: ContentMap, rank: int) -> tuple[int, int]:
    """How to share `rank` between keys and values: the largest weighted singular values of both win."""
    spectra = [_truncated(target, 1)[2] for target in (keys, values)]
    owner = torch.cat([torch.zeros(len(spectra[0])), torch.ones(len(spectra[1]))])
    order = torch.cat(spectra).argsort(descending=True, stable=True)[:rank]
    value_rank = int(owner[order].sum())
    return rank - value_rank, value_rank


def care_ranks(keys: ContentMap, values: ContentMap, rank: int) -> tuple[int, int]:
    """How to share `rank` between keys and values by CARE's priority (arXiv 2603.17946, "rank plus one").

    Starting from nothing, one rank at a time goes to where `σ_{r+1}² / Σ_{m>r} σ_m²`, the share of what is still lost
    that the next rank would recover, is largest. The paper hands out one budget for the keys and one for the values
    over all layers; a stock checkpoint has one width, so the two compete within each layer.
    """
    squares = [_truncated(target, 1)[2].square() for target in (keys, values)]
    # (n,) each: tail[r] is what is lost at rank r.
    tails = [square.flip(0).cumsum(0).flip(0) for square in squares]
    given = [0, 0]
    for _ in range(rank):
        priority = [
            float(square[r] / tail[r]) if r < len(square) and float(tail[r]) > 0 else -1.0
            for square, tail, r in zip(squares, tails, given, strict=True)
        ]
        given[0 if priority[0] >= priority[1] else 1] += 1
    return given[0], given[1]


SPLIT_RULES = {"spectra": split_ranks, "care": care_ranks}


def _energy(kept: Tensor, singular: Tensor) -> float:
    total = float(singular.square().sum())
    return float(kept.square().sum()) / total if total > 0 else 1.0


def _best_up(target: ContentMap, down: Tensor) -> Tensor:
    """Least-squares `up` for a given `down`: `W C Aᵀ (A C Aᵀ)^{-1}`; the metric cancels."""
    seen = down @ target.covariance  # (r, D)
    # The default driver, gelsy, gives different last bits on equal input; gelsd does not, and bears rank deficiency.
    solution: Tensor = torch.linalg.lstsq(seen @ down.T, seen @ target.rows.T, driver="gelsd").solution
    return solution.T


def _pencil(keys: ContentMap, values: ContentMap) -> tuple[Tensor, Tensor]:
    """`S` and `ρ` with `Sᵀ C_v S = I` and `Sᵀ C_k S = diag(ρ)`: (D, D), (D,)."""
    _, value_inverse = psd_sqrt(values.covariance)
    ratio, basis = torch.linalg.eigh(value_inverse @ keys.covariance @ value_inverse)
    return value_inverse @ basis, ratio


def _best_down(
    keys: ContentMap, values: ContentMap, key_up: Tensor, value_up: Tensor, pencil: tuple[Tensor, Tensor]
) -> Tensor:
    """Least-squares `down` for given ups under two covariances.

    Solves `P A C_k + Q A C_v = R` with `P = B_kᵀM_kB_k`, `Q = B_vᵀM_vB_v`: diagonalising the pencils
    `(P, P + Q)` and `(C_k, C_v)` together makes it elementwise.
    """
    p = key_up.T @ keys.metric @ key_up
    q = value_up.T @ values.metric @ value_up
    right = key_up.T @ keys.metric @ keys.rows @ keys.covariance
    right = right + value_up.T @ values.metric @ values.rows @ values.covariance
    _, total_inverse = psd_sqrt(p + q)
    share, left_basis = torch.linalg.eigh(total_inverse @ p @ total_inverse)  # P -> share, Q -> 1 - share
    left = total_inverse @ left_basis  # (r, r)
    right_map, ratio = pencil
    core: Tensor = left.T @ right @ right_map
    core = core / (share[:, None] * ratio[None, :] + (1 - share)[:, None])
    down: Tensor = left @ core @ right_map.T
    return down


def _alternate(keys: ContentMap, values: ContentMap, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    pencil = _pencil(keys, values)
    key_up, value_up = _best_up(keys, down), _best_up(values, down)
    for _ in range(ALTERNATIONS):
        down = _best_down(keys, values, key_up, value_up, pencil)
        # Re-orthogonalised so that the normal equations of the next step stay well conditioned.
        down = torch.linalg.qr(down.T).Q.T
        key_up, value_up = _best_up(keys, down), _best_up(values, down)
    return down, key_up, value_up
