"""Bytes per token of the KV cache, counted in the live cache object of stock transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_convert.decode.latent_batch import LatentBatch
from mla_convert.decode.latent_cache import LatentLayer
from mla_convert.errors import CheckFailed

DEFAULT_TOKENS = 40


@dataclass(frozen=True)
class CacheMeasurement:
    """What a cache held after `tokens` tokens of one sequence.

    Attributes:
        tokens: Tokens in the cache.
        numbers_per_token_per_layer: For each layer, numbers held per token.
        bytes_per_token: Memory held per token in all layers, in the dtype of the run.
        dtype: The dtype of the run.
        stored_dtype: The dtype of the checkpoint's attention weights.
        stored_dtype_bytes_per_token: The same numbers in that dtype.
        shapes: Shapes of the tensors that the first layer holds.
        pool_bytes: Of the pages of a paged cache, whole ones; None for a cache without pages.
    """

    tokens: int
    numbers_per_token_per_layer: tuple[int, ...]
    bytes_per_token: int
    dtype: str
    stored_dtype: str
    stored_dtype_bytes_per_token: int
    shapes: tuple[tuple[int, ...], ...]
    pool_bytes: int | None = None

    @property
    def layers(self) -> int:
        """Number of layers that cache."""
        return len(self.numbers_per_token_per_layer)

    @property
    def numbers_per_token(self) -> int:
        """Numbers held per token in all layers."""
        return sum(self.numbers_per_token_per_layer)

    @property
    def bytes_per_token_per_layer(self) -> float:
        """Mean over the layers, in the dtype of the run."""
        return self.bytes_per_token / self.layers

    def to_json(self) -> dict[str, object]:
        """All fields as JSON types."""
        return {
            "tokens": self.tokens,
            "layers": self.layers,
            "numbers_per_token": self.numbers_per_token,
            "numbers_per_token_per_layer": list(self.numbers_per_token_per_layer),
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_token_per_layer": self.bytes_per_token_per_layer,
            "dtype": self.dtype,
            "stored_dtype": self.stored_dtype,
            "stored_dtype_bytes_per_token": self.stored_dtype_bytes_per_token,
            "shapes": [list(shape) for shape in self.shapes],
            "pool_bytes": self.pool_bytes,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CacheMeasurement:
        """The measurement that `to_json` wrote."""
        return cls(
            tokens=fields["tokens"],
            numbers_per_token_per_layer=tuple(fields["numbers_per_token_per_layer"]),
            bytes_per_token=fields["bytes_per_token"],
            dtype=fields["dtype"],
            stored_dtype=fields["stored_dtype"],
            stored_dtype_bytes_per_token=fields["stored_dtype_bytes_per_token"],
            shapes=tuple(tuple(shape) for shape in fields["shapes"]),
            pool_bytes=fields.get("pool_bytes"),
        )


@torch.inference_mode()
def measure_cache(model: Any, stored_dtype: torch.dtype, tokens: int = DEFAULT_TOKENS) -> CacheMeasurement:
    """Run `tokens` tokens through a model and count what its cache holds.

    Args:
        model: A loaded causal language model.
        stored_dtype: Dtype of the checkpoint's attention weights.
        tokens: Length of the sequence.

    Raises:
        CheckFailed: See `count_cache`.
    """
    ids = torch.arange(tokens)[None] % model.config.vocab_size
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return count_cache(find_cache(output), stored_dtype)


def find_cache(output: Mapping[str, Any]) -> Any:
    """The cache among the fields of a model's output, whatever the version of transformers calls it.

    Raises:
        CheckFailed: If there is none.
    """
    from transformers import Cache

    caches = [value for value in output.values() if isinstance(value, Cache)]
    if len(caches) != 1:
        raise CheckFailed(
            "the model's output holds no cache", expected="one transformers Cache", found=str(len(caches))
        )
    return caches[0]


def count_cache(cache: Any, stored_dtype: torch.dtype) -> CacheMeasurement:
    """Count every tensor that a cache of one sequence holds, under whatever attribute; of a paged one, its rows.

    Memory is that of the tensors' storages, so a view of something larger counts in full.

    Raises:
        CheckFailed: If nothing is held, or something that is no whole number per token.
    """
    tokens = int(cache.get_seq_length())
    if tokens and isinstance(cache.layers[0], LatentLayer):
        return _count_pages(cache.layers[0].batch, stored_dtype)
    held = [list(_tensors(vars(layer))) for layer in cache.layers]
    everything = [tensor for layer in held for tensor in layer]
    if not everything or tokens == 0:
        raise CheckFailed("the cache is empty after a forward pass", where=type(cache).__name__)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in everything}
    numbers = [sum(tensor.numel() for tensor in layer) for layer in held]
    memory = sum(storages.values())
    if memory % tokens or any(count % tokens for count in numbers):
        raise CheckFailed(
            "the cache does not hold the same for every token",
            expected=f"multiples of {tokens} tokens",
            found=f"{memory} bytes, {numbers} numbers",
            where=type(cache).__name__,
        )
    per_layer = tuple(count // tokens for count in numbers)
    return CacheMeasurement(
        tokens=tokens,
        numbers_per_token_per_layer=per_layer,
        bytes_per_token=memory // tokens,
        dtype=_name(everything[0].dtype),
        stored_dtype=_name(stored_dtype),
        stored_dtype_bytes_per_token=sum(per_layer) * stored_dtype.itemsize,
        shapes=tuple(tuple(tensor.shape) for tensor in held[0]),
    )


def _count_pages(batch: LatentBatch, stored_dtype: torch.dtype) -> CacheMeasurement:
    """Rows of a paged cache of one sequence, with the pages that hold them."""
    cache, form = batch.cache, batch.plan.form
    (sequence,) = batch.sequences
    tokens, held = cache.length(sequence), cache.residency()
    numbers = form.latent_width + form.rope_width
    return CacheMeasurement(
        tokens=tokens,
        numbers_per_token_per_layer=(numbers,) * cache.layers,
        bytes_per_token=(held.payload + held.scales) // tokens,
        dtype=form.latent_dtype,
        stored_dtype=_name(stored_dtype),
        stored_dtype_bytes_per_token=numbers * cache.layers * stored_dtype.itemsize,
        shapes=(tuple(cache.pool(0, form).shape),),
        pool_bytes=held.pools,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.numel():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
