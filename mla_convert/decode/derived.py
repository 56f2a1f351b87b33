"""Absorbed products, each with the key of everything that makes it stale (seed 1, 0x0C).

A product is never rebuilt behind the caller's back: one whose sources have changed is an error until it is derived
anew.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor, nn

from mla_convert.decode.adapters import (
    ProjectionState,
    content_digest,
    effective_weight,
    projection_state,
    require_absorbable,
)
from mla_convert.errors import CheckFailed
from mla_convert.mla.attention import value_output_product
from mla_convert.mla.stock_factors import split_kv_up, split_output

ValueSide = Literal["factors", "product"]


@dataclass(frozen=True)
class DerivedSources:
    """The projections of one layer that products are derived from.

    Attributes:
        kv_up: `kv_b_proj`.
        output: `o_proj`.
        heads: H of this shard.
        nope_width: d_N.
        value_side: "product" contracts `W_O W_UV`; "factors" keeps them apart.
        shard: Of the heads, as "rank/ranks".
        where: Name of the layer, for errors.
    """

    kv_up: nn.Module
    output: nn.Module
    heads: int
    nope_width: int
    value_side: ValueSide
    shard: str
    where: str

    @property
    def projections(self) -> tuple[tuple[str, nn.Module], ...]:
        """Those that the products are made of."""
        used = (("kv_b_proj", self.kv_up), ("o_proj", self.output))
        return used if self.value_side == "product" else used[:1]


@dataclass(frozen=True)
class DerivedKey:
    """What a product was derived from; another key, another product.

    Attributes:
        adapters: Of each projection its adapters, active or merged, with their versions.
        dtype: Of the product.
        quantisation: Of the sources: their classes and dtypes.
        shard: Layout over ranks.
        source_versions: Of the base weights.
        layout: What a backend is handed.
        base_digest: Of the numbers of base weights and adapters, `content_digest` of each projection. Last, so that an
            error names a more telling field where there is one.
    """

    adapters: tuple[object, ...]
    dtype: str
    quantisation: tuple[str, ...]
    shard: str
    source_versions: tuple[object, ...]
    layout: str
    base_digest: tuple[str, ...]


@dataclass(frozen=True)
class DerivedWeights:
    """Products of one layer and their key.

    Attributes:
        key: What they were derived from.
        w_uk: (H, d_N, d_c), key side.
        w_uv: (H, d_V, d_c), value side.
        w_vo: (H, D, d_c), `W_O W_UV`, or None.
        where: Name of the layer, for errors.
    """

    key: DerivedKey
    w_uk: Tensor
    w_uv: Tensor
    w_vo: Tensor | None
    where: str

    def require_current(self, sources: DerivedSources, *, content: bool = False) -> None:
        """Refuse to be used once a source has changed.

        Args:
            sources: As they are now.
            content: Also compare a sample of the numbers; finds writes through `tensor.data`.

        Raises:
            CheckFailed: Naming the first field of the key that differs.
            InputRefused: A source can no longer be absorbed, see `require_absorbable`.
        """
        digest = _digest(sources) if content else self.key.base_digest
        now = _key(sources, digest, self.key.dtype)
        for part in fields(DerivedKey):
            expected, found = getattr(self.key, part.name), getattr(now, part.name)
            if expected != found:
                raise CheckFailed(
                    "an absorbed product is stale: what it was derived from has changed",
                    expected=f"{part.name} {expected}",
                    found=str(found),
                    where=self.where,
                    remedy="Call refresh() of the handle that use_absorbed returned.",
                )


def derive(sources: DerivedSources) -> DerivedWeights:
    """Products of the sources as they are now.

    Raises:
        InputRefused: See `require_absorbable`.
    """
    for name, module in sources.projections:
        require_absorbable(module, f"{sources.where}.{name}")
    with torch.no_grad():
        kv_up = effective_weight(sources.kv_up)  # (H (d_N + d_V), d_c)
        w_uk, w_uv = split_kv_up(kv_up, sources.heads, sources.nope_width)
        w_vo = None
        if sources.value_side == "product":
            # Contracted above the storage dtype: one rounding, as for a factor.
            w_o = split_output(effective_weight(sources.output), sources.heads).to(_wide(kv_up.dtype))
            w_vo = value_output_product(w_o, w_uv.to(w_o.dtype)).to(kv_up.dtype)
    key = _key(sources, _digest(sources), str(kv_up.dtype))
    return DerivedWeights(key, w_uk, w_uv, w_vo, sources.where)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _digest(sources: DerivedSources) -> tuple[str, ...]:
    return tuple(content_digest(module) for _, module in sources.projections)


def _key(sources: DerivedSources, digest: tuple[str, ...], dtype: str) -> DerivedKey:
    states: list[ProjectionState] = []
    for name, module in sources.projections:
        require_absorbable(module, f"{sources.where}.{name}")
        states.append(projection_state(module, name))
    return DerivedKey(
        base_digest=digest,
        adapters=tuple(state.adapters for state in states),
        dtype=dtype,
        quantisation=tuple(f"{state.module} {state.base.dtype}" for state in states),
        shard=sources.shard,
        source_versions=tuple(state.base for state in states),
        layout=f"H{sources.heads} d_N{sources.nope_width} {sources.value_side}",
    )
