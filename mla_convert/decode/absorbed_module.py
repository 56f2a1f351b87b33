"""`use_absorbed`: run a stock DeepSeek-V3 model from a paged latent cache, and put it back as it was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, get_args

from torch import nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from mla_convert.decode.abi import Backend
from mla_convert.decode.absorbed_attention import AbsorbedAttention, Decoder, Serving
from mla_convert.decode.backends import dispatcher
from mla_convert.decode.derived import ValueSide
from mla_convert.decode.dispatch import Dispatcher
from mla_convert.decode.latent_batch import CachePlan
from mla_convert.decode.latent_cache import LatentCache
from mla_convert.decode.publication import rope_digest
from mla_convert.decode.receipt import ReceiptBook
from mla_convert.decode.rows import FLOAT_NAMES, RowFormat, float_name
from mla_convert.errors import InputRefused

EXPAND_FROM = 9
"""Queries of a chunk from which keys and values are expanded: kernels are held to eight queries (verification)."""
PAGE_SIZE = 64


@dataclass(frozen=True)
class AbsorbedOptions:
    """How an absorbed model works.

    Attributes:
        page_size: P.
        row_format: Of the cache; rows in the model's dtype where None.
        expand_from: Queries of a chunk from which its keys and values are expanded (prefill).
        value_side: "factors" multiplies by `W_UV`, then by `W_O`; "product" keeps `W_O W_UV`, which for DeepSeek-V2's
            sizes is 640 MiB a layer.
    """

    page_size: int = PAGE_SIZE
    row_format: RowFormat | None = None
    expand_from: int = EXPAND_FROM
    value_side: ValueSide = "factors"

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.expand_from < 1:
            raise InputRefused(
                "options of absorbed attention",
                expected="page_size and expand_from of at least 1",
                found=f"{self.page_size} and {self.expand_from}",
            )
        if self.value_side not in get_args(ValueSide):
            raise InputRefused("no such value side", expected=" or ".join(get_args(ValueSide)), found=self.value_side)


@dataclass(frozen=True)
class _Place:
    """One replaced module: its parent, its name there, what stood there and what stands there now."""

    parent: nn.Module
    name: str
    stock: DeepseekV3Attention
    ours: AbsorbedAttention


class AbsorbedHandle:
    """Of one model whose attention is absorbed. As a context manager it restores the model at the end."""

    def __init__(self, places: tuple[_Place, ...], serving: Serving) -> None:
        self.plan = serving.plan
        self._serving = serving
        self._places = places
        for place in places:
            setattr(place.parent, place.name, place.ours)

    @property
    def is_active(self) -> bool:
        """Whether the model is absorbed."""
        return bool(self._places)

    @property
    def expanded_calls(self) -> int:
        """Calls of a layer that a prefill computed with the keys and values of all heads, without a decode backend."""
        return self._serving.expanded[0]

    def new_cache(self, tokens: int = 0) -> LatentCache:
        """An empty cache for `generate(cache=…)` or `forward(cache=…)`; without one the model makes its own.

        Args:
            tokens: Rows to reserve pages for, of all sequences together.
        """
        return LatentCache(replace(self.plan, tokens=tokens))

    def refresh(self) -> None:
        """Derive the absorbed products anew, after weights or adapters have changed. Caches made before are stale.

        Raises:
            InputRefused: A projection can no longer be absorbed.
        """
        for place in self._places:
            place.ours.refresh()

    def restore(self) -> None:
        """Put the stock modules back, with the parts that the model has now (an adapter that was added stays)."""
        for place in self._places:
            for name, child in place.ours.named_children():
                setattr(place.stock, name, child)
            place.stock.training = place.ours.training
            setattr(place.parent, place.name, place.stock)
        self._places = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def use_absorbed(
    model: nn.Module, backend: str | Backend | Decoder = "auto", options: AbsorbedOptions | None = None
) -> AbsorbedHandle:
    """Replace the attention modules of a stock DeepSeek-V3 model by ones that decode from a paged latent cache.

    `generate()` then makes latent caches by itself. Names and tensors of the state dict stay as they are.

    Args:
        model: Holds a `deepseek_v3` model, bare, with a head, or under PEFT.
        backend: "auto" or a name of `backends.known_backends`, a backend, or a function from call to output, such as
            `Dispatcher.run` with a receipt book.
        options: See `AbsorbedOptions`.

    Raises:
        InputRefused: No such model or already absorbed, an unknown backend, or a projection that cannot be absorbed.
    """
    options = options or AbsorbedOptions()
    found = [(name, part) for name, part in model.named_modules() if type(part) is DeepseekV3Attention]
    inner = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if not found or inner is None:
        raise InputRefused(
            "no attention of a stock DeepSeek-V3 model to replace",
            expected="a deepseek_v3 model of transformers, not absorbed before",
            found=type(model).__name__,
        )
    layers = [part.layer_idx for _, part in found]
    if layers != list(range(len(found))):
        raise InputRefused("a model with other layers than those of one decoder", found=str(layers))
    for name, part in found:
        if "forward" in vars(part):
            raise InputRefused("a module whose forward was replaced by something else", where=name)
    plan = _plan(found[0][1], len(found), options)
    serving = Serving(_decoder(backend), plan, options.expand_from, options.value_side)
    places = []
    for path, stock in found:
        parent, _, name = path.rpartition(".")
        places.append(_Place(model.get_submodule(parent), name, stock, AbsorbedAttention(stock, serving, path)))
    return AbsorbedHandle(tuple(places), serving)


def _plan(attention: DeepseekV3Attention, layers: int, options: AbsorbedOptions) -> CachePlan:
    config = attention.config
    widths = (config.kv_lora_rank, config.qk_rope_head_dim)
    form = options.row_format
    if form is None:
        stored = attention.kv_a_layernorm.weight.dtype
        dtype = float_name(stored)
        if dtype is None:
            found = str(stored).removeprefix("torch.")
            raise InputRefused("a dtype that no row has", expected=", ".join(FLOAT_NAMES), found=found)
        form = RowFormat.plain(*widths, dtype)
    if (form.latent_width, form.rope_width) != widths:
        raise InputRefused(
            "a row format of other widths",
            expected=f"{widths[0]} + {widths[1]}",
            found=f"{form.latent_width} + {form.rope_width}",
        )
    layout = "interleaved" if config.rope_interleave else "half-split"
    rope = rope_digest(config.qk_rope_head_dim, layout, dict(config.rope_parameters or {}))
    return CachePlan(form, layers, options.page_size, rope)


def _decoder(backend: str | Backend | Decoder) -> Decoder:
    if isinstance(backend, str):
        return dispatcher(backend, ReceiptBook()).run
    return backend if callable(backend) else Dispatcher([backend], backend.name, ReceiptBook()).run
