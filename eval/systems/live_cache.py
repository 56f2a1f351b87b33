"""Bytes of the live cache of either model beside what their dimensions come to."""

from __future__ import annotations

from typing import Any

import torch

from mla_convert.decode.latent_cache import LatentCache
from mla_convert.errors import CheckFailed
from mla_convert.eval.cache_bytes import count_cache
from mla_convert.eval.systems.goodput import Subject
from mla_convert.manifests.evaluation.systems import CacheFigures


def cache_figures(subject: Subject, cache: Any, numbers: int, layers: int, stored: torch.dtype) -> CacheFigures:
    """Count a cache of one sequence.

    Args:
        subject: Whose it is.
        cache: After a run.
        numbers: Per token and layer by the dimensions: `2·G·d` of the source, `d_c + d_R` of the target.
        layers: L.
        stored: Dtype of the checkpoint's attention weights.

    Raises:
        CheckFailed: If rows take more or less than `numbers · layers` numbers of the run's dtype.
    """
    counted = count_cache(cache, stored)
    itemsize = getattr(torch, counted.dtype).itemsize
    formula = numbers * layers * itemsize
    scales = metadata = 0
    pages = None
    payload = resident = counted.bytes_per_token * counted.tokens
    if isinstance(cache, LatentCache):
        held = cache.batch.cache.residency()
        payload, scales, metadata, pages = held.payload, held.scales, held.metadata, held.pools
        resident = held.pools + held.metadata
    if payload != formula * counted.tokens:
        raise CheckFailed(
            f"the {subject}'s cache does not hold what its dimensions say",
            expected=f"{formula:,} bytes per token ({numbers} numbers of {counted.dtype} in {layers} layers)",
            found=f"{payload / counted.tokens:,.1f} ({counted.numbers_per_token_per_layer[0]} numbers in layer 0)",
            where=f"cache of {counted.tokens} tokens",
        )
    return CacheFigures(
        subject=subject,
        tokens=counted.tokens,
        dtype=counted.dtype,
        numbers_per_token=counted.numbers_per_token,
        formula_bytes_per_token=float(formula),
        payload_bytes_per_token=payload / counted.tokens,
        scale_bytes=scales,
        metadata_bytes=metadata,
        page_bytes=pages,
        resident_bytes=resident,
    )
