"""What is not finite and may be read must show in the result, on every backend."""

from __future__ import annotations

import math

import pytest
import torch

from mla_convert import mla_decode
from tests.convert.support import normal

BACKENDS = ["torch", "reference", "triton-interpret"]
PAGES, PAGE, LATENT, ROPE = 9, 16, 32, 8
TOKENS = 129


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("page", "value"), [(0, math.nan), (4, math.nan), (8, math.nan), (2, math.inf)])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_visible_row_that_is_not_finite_is_not_dropped(backend: str, page: int, value: float, rows: int) -> None:
    pool = normal(PAGES, PAGE, LATENT + ROPE, seed=1).float()
    pool[page, 0, 2] = value
    query = normal(1, rows, 2, LATENT + ROPE, seed=2).float()
    table, lengths = torch.arange(PAGES)[None].int(), torch.tensor([TOKENS], dtype=torch.int32)
    if backend == "triton-interpret":
        pytest.importorskip("triton")

    out, lse = mla_decode(query, pool, table, lengths, LATENT, 0.2, causal=False, backend=backend)

    assert not bool(torch.isfinite(out).all(-1).any())
    assert math.isnan(value) <= bool(lse.isnan().all())
    assert not bool((lse == -math.inf).any())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_infinite_query_is_no_query_that_sees_nothing(backend: str) -> None:
    if backend == "triton-interpret":
        pytest.importorskip("triton")
    pool = normal(PAGES, PAGE, LATENT + ROPE, seed=1).float()
    query = normal(1, 1, 2, LATENT + ROPE, seed=2).float()
    query[..., 0] = math.inf
    table, lengths = torch.arange(PAGES)[None].int(), torch.tensor([TOKENS], dtype=torch.int32)

    out, lse = mla_decode(query, pool, table, lengths, LATENT, 0.2, backend=backend)

    assert bool(out.isnan().all())
    assert not bool((lse.isfinite() | (lse == -math.inf)).any())
