"""A transformers cache over paged latent rows, for `generate()` and for everything else that carries a cache along."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from mla_convert.decode.latent_batch import CachePlan, LatentBatch
from mla_convert.errors import InputRefused


class LatentLayer(CacheLayerMixin):
    """One layer's part of a latent cache.

    All layers share one block table, so what transformers asks of each layer in turn (reordering, cropping …) is done
    once, as the first layer is asked.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: LatentBatch, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch = batch
        self.layer = layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:  # noqa: ARG002  transformers' own
        """Refuse: there are no keys and values to make room for."""
        self._refuse()

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Refuse: only absorbed attention writes rows."""
        self._refuse()

    def get_seq_length(self) -> int:
        """Committed columns, padding included."""
        return self.batch.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a mask covers, and the first of them."""
        return self.batch.columns + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> None:
        """Forget all sequences."""
        if self.layer == 0:
            self.batch.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these sequences (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Go on with these sequences."""
        if self.layer == 0:
            places = torch.arange(len(self.batch.sequences))
            self.batch.select(places[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times."""
        if self.layer == 0:
            self.batch.select([place for place in range(len(self.batch.sequences)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last columns.

        Args:
            tokens_to_remove: Their number, negative, as transformers counts it.
        """
        if tokens_to_remove > 0:
            raise InputRefused("crop() of a cache", expected="a negative number", found=str(tokens_to_remove))
        if self.layer == 0 and tokens_to_remove:
            self.batch.crop(-tokens_to_remove)

    def _refuse(self) -> NoReturn:
        raise InputRefused(
            "a latent cache holds no keys and values of heads",
            expected="attention modules replaced by use_absorbed",
            remedy="Start a new cache after restore().",
        )


class LatentCache(Cache):
    """A cache that is latent from the start; `generate(cache=handle.new_cache())`."""

    def __init__(self, plan: CachePlan) -> None:
        self.batch = LatentBatch(plan)
        super().__init__(layers=[LatentLayer(self.batch, layer) for layer in range(plan.layers)])


def latent_layer(cache: Cache, layer: int, plan: CachePlan) -> LatentLayer:
    """A layer of `cache`; an empty dynamic cache, as `generate()` makes it, becomes a latent one first.

    Raises:
        InputRefused: The cache is of another kind, was filled by stock attention, or belongs to another model.
    """
    if type(cache) is DynamicCache and layer == 0 and not any(isinstance(part, LatentLayer) for part in cache.layers):
        _require_empty(cache)
        batch = LatentBatch(plan)
        # A cache made without a configuration would go on to append layers of its own.
        cache.layer_class_to_replicate = None
        cache.layers[:] = [LatentLayer(batch, number) for number in range(plan.layers)]
    found = cache.layers[layer] if layer < len(cache.layers) else None
    if not isinstance(found, LatentLayer):
        raise InputRefused(
            "a cache that absorbed attention cannot write to",
            expected="an empty DynamicCache, or new_cache() of the handle",
            found=f"{type(cache).__name__} with {type(found).__name__}",
        )
    held = found.batch.plan
    if (held.layers, held.rope, held.form) != (plan.layers, plan.rope, plan.form):
        raise InputRefused("a latent cache of another model or row format", expected=repr(plan), found=repr(held))
    return found


def _require_empty(cache: DynamicCache) -> None:
    plain = all(type(part) is DynamicLayer for part in cache.layers)
    if cache.offloading or not plain or cache.get_seq_length() > 0:
        raise InputRefused(
            "a cache that absorbed attention cannot take over",
            expected="an empty DynamicCache of whole histories, without offloading",
            found=f"{cache.get_seq_length()} tokens in {[type(part).__name__ for part in cache.layers[:1]]}",
            remedy="Start a new cache.",
        )
