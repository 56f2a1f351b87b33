"""A converted model decoding from its pages, watched: what each layer was given, what it gave, and what it cached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_convert.decode.latent_batch import LatentBatch
from mla_convert.decode.latent_cache import LatentCache
from mla_convert.eval.serving import Served
from mla_convert.progress import track


@dataclass(frozen=True)
class LayerRecord:
    """One layer over all tokens of a run.

    Attributes:
        inputs: (T, D) what its attention was given.
        outputs: (T, D) what its attention gave.
        rows: (T, row) the cache's rows at the end, as a reader decodes them; None without pages.
    """

    inputs: Tensor
    outputs: Tensor
    rows: Tensor | None


@dataclass(frozen=True)
class LiveRun:
    """A prefill and appends, token by token.

    Attributes:
        ids: (T,).
        prefill: Tokens of the first pass.
        layers: Of the model.
        states: (T, D) float32, what the output head reads.
        row_dtype: Of the cached latents.
        row_width: Numbers of a cached row.
    """

    ids: Tensor
    prefill: int
    layers: tuple[LayerRecord, ...]
    states: Tensor
    row_dtype: str
    row_width: int


@torch.inference_mode()
def run_live(served: Served, ids: Tensor, prefill: int) -> LiveRun:
    """Feed the first tokens at once and the others one by one.

    Args:
        served: The model as it is run.
        ids: (T,) int64.
        prefill: Tokens of the first pass, at least one.
    """
    model, handle = served.model, served.handle
    cache: Any = None if handle is None else handle.new_cache(len(ids))
    states: list[Tensor] = []
    with _watched(model) as seen:
        chunks = [ids[:prefill], *ids[prefill:].split(1)]
        for chunk in track(chunks, "decoding step by step", unit="step"):
            done = model.base_model(input_ids=chunk[None], cache=cache, use_cache=True)
            cache = next(value for value in done.values() if hasattr(value, "get_seq_length"))
            states.append(done.last_hidden_state[0].float())
    paged = isinstance(cache, LatentCache)
    layers = tuple(
        LayerRecord(torch.cat(inputs), torch.cat(outputs), _rows(cache, index) if paged else None)
        for index, (inputs, outputs) in enumerate(seen)
    )
    form = cache.layers[0].batch.plan.form if paged else None
    config = model.config
    stored = config.kv_lora_rank + config.qk_rope_head_dim
    return LiveRun(
        ids=ids,
        prefill=prefill,
        layers=layers,
        states=torch.cat(states),
        row_dtype=str(model.dtype).removeprefix("torch.") if form is None else form.latent_dtype,
        row_width=stored if form is None else form.latent_width + form.rope_width,
    )


def _rows(cache: Any, layer: int) -> Tensor:
    """(T, row) float32 of the one sequence."""
    batch: LatentBatch = cache.layers[layer].batch
    (sequence,) = batch.sequences
    return batch.cache.read(sequence, layer, torch.float32)


@contextmanager
def _watched(model: Any) -> Iterator[list[tuple[list[Tensor], list[Tensor]]]]:
    """Inputs and outputs of every attention module while the block lasts."""
    modules = [layer.self_attn for layer in model.base_model.layers]
    seen: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in modules]

    def record(index: int) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            given = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            seen[index][0].append(given[0].float())
            seen[index][1].append(result[0][0].float())

        return hook

    handles = [module.register_forward_hook(record(index), with_kwargs=True) for index, module in enumerate(modules)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
