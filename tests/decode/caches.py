"""Small paged caches whose unwritten memory is NaN, and random rows for them."""

from __future__ import annotations

import torch

from mla_convert.decode.pages import PagedLatentCache
from mla_convert.decode.publication import rope_digest
from mla_convert.decode.rows import RowFormat

FORM = RowFormat.plain(8, 4, "float32")
ROPE = rope_digest(4, "interleaved", {"theta": 10000.0})
LAYERS = 3

Rows = list[tuple[torch.Tensor, torch.Tensor]]


def make_cache(pages: int = 12, page_size: int = 4, form: RowFormat = FORM, layers: int = LAYERS) -> PagedLatentCache:
    """Pools full of NaN, so that a row that was not written shows."""
    cache = PagedLatentCache(form, layers=layers, pages=pages, page_size=page_size, rope=ROPE, identity="test")
    for layer in range(layers):
        pool = cache.pool(layer, form)
        pool.copy_(torch.full_like(pool, 0xFF if pool.dtype == torch.uint8 else float("nan")))
    return cache


def rows_for(tokens: int, form: RowFormat = FORM, layers: int = LAYERS) -> Rows:
    return [(torch.randn(tokens, form.latent_width), torch.randn(tokens, form.rope_width)) for _ in range(layers)]


def append(cache: PagedLatentCache, sequence: int, rows: Rows) -> None:
    start = cache.length(sequence)
    with cache.begin({sequence: range(start, start + rows[0][0].shape[0])}) as transaction:
        for layer, (c_kv, k_rope) in enumerate(rows):
            transaction.write(layer, c_kv, k_rope)
        transaction.commit()
