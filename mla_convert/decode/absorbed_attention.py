"""An attention module that takes the place of stock `DeepseekV3Attention` and reads a paged latent cache.

Same weights under the same names. Short chunks (decoding, verification) are absorbed; long ones (prefill) are computed
with the keys and values of all heads, as stock does, and only their latent rows are kept (seed 1, 0x05).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
    eager_attention_forward,
)

from mla_convert.decode.abi import DecodeCall, DecodeOutput
from mla_convert.decode.adapters import base_of, is_plain, require_absorbable, require_no_bias
from mla_convert.decode.derived import DerivedSources, DerivedWeights, ValueSide, derive
from mla_convert.decode.latent_batch import CachePlan, LatentBatch
from mla_convert.decode.latent_cache import latent_layer
from mla_convert.decode.rows import decode, encode
from mla_convert.errors import InputRefused
from mla_convert.mla.attention import absorb_query, expand_value
from mla_convert.mla.stock_factors import split_kv_up

Decoder = Callable[[DecodeCall], DecodeOutput]


@dataclass(frozen=True)
class Serving:
    """How the replaced modules of one model work.

    Attributes:
        decoder: Answers each decode call.
        plan: Of the caches.
        expand_from: Queries of a chunk from which its keys and values are expanded.
        value_side: Whether `W_O W_UV` is kept as a product.
        expanded: One number: calls of a layer that were computed with the keys and values of all heads.
    """

    decoder: Decoder
    plan: CachePlan
    expand_from: int
    value_side: ValueSide
    expanded: list[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True)
class _Projected:
    """One chunk after its projections.

    Attributes:
        q_nope: (B, H, S, d_N).
        q_rope: (B, H, S, d_R), rotated.
        latent: (B, S, d_c), normalised.
        rope: (B, S, d_R), rotated.
    """

    q_nope: Tensor
    q_rope: Tensor
    latent: Tensor
    rope: Tensor


class AbsorbedAttention(DeepseekV3Attention):
    """See the module. Without a cache it is the stock module."""

    def __init__(self, stock: DeepseekV3Attention, serving: Serving, where: str) -> None:
        """Take over the parts of `stock`, which is left as it is.

        Args:
            stock: To stand in for.
            serving: Shared by all layers.
            where: Name in the model.
        """
        with torch.device("meta"):
            super().__init__(stock.config, stock.layer_idx)
        for name, child in stock.named_children():
            setattr(self, name, child)
        self.training = stock.training
        self.scaling = stock.scaling
        # Whoever watches the stock module, as transformers does for its recorded outputs, goes on watching.
        self._forward_hooks = stock._forward_hooks
        self._forward_hooks_with_kwargs = stock._forward_hooks_with_kwargs
        self._forward_hooks_always_called = stock._forward_hooks_always_called
        self._forward_pre_hooks = stock._forward_pre_hooks
        self._forward_pre_hooks_with_kwargs = stock._forward_pre_hooks_with_kwargs
        self.serving = serving
        self.where = where
        self.derived: DerivedWeights | None = None
        self.refresh()

    def refresh(self) -> None:
        """Derive the absorbed products anew, where the layer needs any.

        Raises:
            InputRefused: See `require_absorbable`.
        """
        self._require_kv_up()
        self.derived = derive(self.sources) if self._needs_products() else None

    @property
    def sources(self) -> DerivedSources:
        """What its products are derived from."""
        return DerivedSources(
            kv_up=self.kv_b_proj,
            output=self.o_proj,
            heads=self.num_heads,
            nope_width=self.qk_nope_head_dim,
            value_side=self.serving.value_side,
            shard="0/1",
            where=self.where,
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend and store the chunk's rows. (B, S, D) -> (B, S, D).

        Raises:
            InputRefused: Attention weights, gradients through the cache, or a mask or cache that is not supported.
            CheckFailed: An absorbed product is stale.
        """
        if cache is None:
            output: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, position_embeddings, attention_mask, **kwargs
            )
            return output
        if kwargs.get("output_attentions"):
            raise InputRefused("absorbed attention returns no attention weights", where=self.where)
        batch = latent_layer(cache, self.layer_idx, self.serving.plan).batch
        count, length = hidden_states.shape[:2]
        if self.layer_idx == 0:
            batch.begin(count, length, attention_mask, hidden_states.device)
        if self.derived is not None and batch.columns == 0:
            self.derived.require_current(self.sources, content=True)
        chunk = self._project(hidden_states, position_embeddings)
        batch.write(self.layer_idx, chunk.latent.detach(), chunk.rope.detach())
        if self._expands(batch, chunk, length):
            result = self._prefill(chunk, batch, attention_mask, kwargs)
        else:
            result = self._decode(chunk, batch)
        batch.finish(self.layer_idx)
        return result, None

    def _needs_products(self) -> bool:
        """A plain `kv_b_proj` is read where it is at every call, and cannot go stale."""
        return self.serving.value_side == "product" or not is_plain(self.kv_b_proj)

    def _project(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> _Projected:
        batch, length = hidden.shape[:2]
        if self.q_proj is not None:
            query = self.q_proj(hidden)
        else:
            down, norm, up = (cast(nn.Module, part) for part in (self.q_a_proj, self.q_a_layernorm, self.q_b_proj))
            query = up(norm(down(hidden)))
        query = query.view(batch, length, -1, self.qk_head_dim).transpose(1, 2)  # (B, H, S, d_N + d_R)
        nope, q_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        raw = self.kv_a_proj_with_mqa(hidden)  # (B, S, d_c + d_R)
        latent, rope = raw.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        rotate = apply_rotary_pos_emb_interleave if self.config.rope_interleave else apply_rotary_pos_emb
        q_rope, rope = rotate(q_rope, rope[:, None], *position_embeddings)
        return _Projected(nope, q_rope, self.kv_a_layernorm(latent), rope[:, 0])

    def _expands(self, batch: LatentBatch, chunk: _Projected, length: int) -> bool:
        if torch.is_grad_enabled() and (chunk.latent.requires_grad or chunk.q_nope.requires_grad or self._is_trained):
            if not self.serving.plan.form.is_plain:
                raise InputRefused(
                    "gradients do not flow through scaled rows",
                    found=self.serving.plan.form.name,
                    where=self.where,
                    remedy="Train with rows of plain numbers, or without a cache.",
                )
            if batch.columns:
                raise InputRefused(
                    "gradients do not flow through cached rows",
                    where=self.where,
                    remedy="Run decoding under torch.no_grad(), or train without a cache.",
                )
            return True
        drops = self.training and bool(self.attention_dropout)
        return length >= self.serving.expand_from or not batch.current.left_padded or drops

    @property
    def _is_trained(self) -> bool:
        """Whether a matrix that decoding reads as it is, or an adapter on it, wants a gradient."""
        read = (self.kv_b_proj, self.o_proj)
        return any(parameter.requires_grad for module in read for parameter in module.parameters())

    def _prefill(self, chunk: _Projected, batch: LatentBatch, mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
        """Keys and values of all heads for all columns, as stock computes them: (B, S, D)."""
        self.serving.expanded[0] += 1
        latent, rope = chunk.latent, chunk.rope
        form = self.serving.plan.form
        if not form.is_plain or form.pool_dtype != latent.dtype:
            # What is read here must be what later chunks will read.
            wide = torch.float64 if latent.dtype == torch.float64 else torch.float32
            stored = decode(form, encode(form, latent, rope), wide).to(latent.dtype)
            latent, rope = stored.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        if batch.columns:
            past = batch.history(self.layer_idx, latent.dtype)  # (B, columns, d_c + d_R)
            latent = torch.cat([past[..., : self.kv_lora_rank], latent], dim=1)
            rope = torch.cat([past[..., self.kv_lora_rank :], rope], dim=1)
        keys, values = self.expand_kv(latent[:, None], rope[:, None])
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        heads, _ = attend(
            self,
            torch.cat([chunk.q_nope, chunk.q_rope], dim=-1),
            keys,
            values,
            mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return cast(Tensor, self.o_proj(heads.flatten(2)))

    def _decode(self, chunk: _Projected, batch: LatentBatch) -> Tensor:
        """Absorbed attention over the pages: (B, S, D)."""
        w_uk, w_uv, w_vo = self._factors()
        query = absorb_query(chunk.q_nope.transpose(1, 2), w_uk)  # (B, S, H, d_c)
        query = torch.cat([query, chunk.q_rope.transpose(1, 2)], dim=-1)  # (B, S, H, d_c + d_R)
        form = batch.plan.form
        view = batch.current.transaction.view(self.layer_idx)
        pool = batch.cache.pool(self.layer_idx, form)
        call = DecodeCall(query, pool, form, view.block_table, view.seq_lens, self.scaling)
        latent = self.serving.decoder(call).out  # (B, S, H, d_c)
        if w_vo is None:
            return cast(Tensor, self.o_proj(expand_value(latent, w_uv).flatten(2)))
        output = torch.einsum("bqhc,hDc->bqD", latent, w_vo)  # (B, S, D)
        bias = cast("Tensor | None", base_of(self.o_proj).bias)
        return output if bias is None else output + bias

    def _require_kv_up(self) -> None:
        require_absorbable(self.kv_b_proj, f"{self.where}.kv_b_proj")
        require_no_bias(self.kv_b_proj, f"{self.where}.kv_b_proj")

    def _factors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.derived is None and self._needs_products():
            self.refresh()
        if self.derived is None:
            self._require_kv_up()
            w_uk, w_uv = split_kv_up(self.kv_b_proj.weight, self.num_heads, self.qk_nope_head_dim)
            return w_uk, w_uv, None
        self.derived.require_current(self.sources)
        return self.derived.w_uk, self.derived.w_uv, self.derived.w_vo
