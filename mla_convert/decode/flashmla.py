"""Adapter to DeepSeek's FlashMLA, used where it is installed and its limits hold.

The limits are those of the source: `flash_mla/flash_mla_interface.py`, `csrc/api/dense_decode.h` and
`csrc/api/sparse_decode.h` of github.com/deepseek-ai/FlashMLA.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from mla_convert.decode.abi import DecodeCall, DecodeOutput, SparseSelection
from mla_convert.decode.foreign import (
    LATENT,
    ROPE,
    ForeignBackend,
    Padding,
    blank_unseen,
    pad_parts,
    padding_of,
    seen_rows,
)

PAGE = 64
SPARSE_ROW_BYTES, SPARSE_GROUP, SPARSE_HEADS, SPARSE_STEP = 656, 128, (64, 128), 64
DENSE_ARCH, SPARSE_ARCHS = (9, 0), ((9, 0), (10, 0))


class FlashMLA(Protocol):
    """The two functions of the package that the adapter calls."""

    def get_mla_metadata(self) -> tuple[Any, None]:
        """An empty scheduler object, filled by the first call that gets it."""
        ...

    def flash_mla_with_kvcache(self, **arguments: Any) -> tuple[Tensor, Tensor]:
        """Output (B, s_q, H, 512) and natural-log LSE (B, H, s_q)."""
        ...


@dataclass(frozen=True)
class FlashMLABackend(ForeignBackend):
    """Dense decoding on sm_90 with 64-row pages, sparse decoding of 656-byte rows on sm_90 and sm_100.

    Rows narrower than 512+64 are padded with zeros, which add nothing to a score: right, and a copy of the pool at
    every call, so `auto` should prefer another backend there; `padding` says how much.
    """

    package: ClassVar[str] = "flash_mla"

    @property
    def name(self) -> str:
        """As the user asks for it."""
        return "flashmla"

    def limits(self, call: DecodeCall, capability: tuple[int, int]) -> str | None:
        """See the base class."""
        return _unfit_dense(call, capability) if call.sparse is None else _unfit_sparse(call, call.sparse, capability)

    def padding(self, call: DecodeCall) -> Padding:
        """Zeros and heads that a run of `call` adds."""
        heads = call.q.shape[2]
        if call.sparse is not None:
            return Padding(heads=min(known for known in SPARSE_HEADS if known >= heads) - heads)
        return padding_of(call)

    def run(self, call: DecodeCall) -> DecodeOutput:
        """Compute `call`, which `unfit` has passed.

        The scheduler object is made for this call and dropped: kept, it would have to be keyed by the lengths, which
        change with every token (scheduling.py).
        """
        module: FlashMLA = self.module or importlib.import_module("flash_mla")
        if call.sparse is None:
            return self._run_dense(call, module)
        return self._run_sparse(call, call.sparse, module)

    def _run_dense(self, call: DecodeCall, module: FlashMLA) -> DecodeOutput:
        padding, width = self.padding(call), call.format.latent_width
        out, lse = module.flash_mla_with_kvcache(
            q=pad_parts(call.q, width, padding),
            k_cache=pad_parts(call.pool, width, padding).unsqueeze(2),
            block_table=call.block_table.to(torch.int32),
            cache_seqlens=call.seq_lens.to(torch.int32).contiguous(),
            head_dim_v=LATENT,
            tile_scheduler_metadata=module.get_mla_metadata()[0],
            softmax_scale=call.scale,
            causal=call.causal,
        )
        return blank_unseen(out[..., :width], lse.transpose(1, 2), seen_rows(call))

    def _run_sparse(self, call: DecodeCall, sparse: SparseSelection, module: FlashMLA) -> DecodeOutput:
        """Each query becomes a sequence of its own, because FlashMLA has one length a sequence (`topk_length`)."""
        batch, tokens, heads, _ = call.q.shape
        q = functional.pad(call.q, (0, 0, 0, self.padding(call).heads)).flatten(0, 1).unsqueeze(1)
        sinks = None if call.sinks is None else functional.pad(call.sinks, (0, q.shape[2] - heads))
        extra: dict[str, Any] = {}
        if sparse.extra_pool is not None and sparse.extra_indices is not None and sparse.extra_lengths is not None:
            extra = {
                "extra_k_cache": sparse.extra_pool.unsqueeze(2),
                "extra_indices_in_kvcache": _valid_indices(sparse.extra_indices, sparse.extra_lengths),
                "extra_topk_length": sparse.extra_lengths.flatten(),
            }
        out, lse = module.flash_mla_with_kvcache(
            q=q,
            k_cache=call.pool.unsqueeze(2),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=LATENT,
            tile_scheduler_metadata=module.get_mla_metadata()[0],
            softmax_scale=call.scale,
            causal=False,
            is_fp8_kvcache=True,
            indices=_valid_indices(sparse.indices, sparse.lengths),
            topk_length=sparse.lengths.flatten(),
            attn_sink=sinks,
            **extra,
        )
        out = out[:, 0, :heads].view(batch, tokens, heads, LATENT)
        lse = lse[:, :heads, 0].view(batch, tokens, heads)
        return blank_unseen(out, lse, seen_rows(call))


def _unfit_dense(call: DecodeCall, capability: tuple[int, int]) -> str | None:
    form = call.format
    if capability != DENSE_ARCH:
        return f"dense decoding needs sm_90, the device is sm_{capability[0]}{capability[1]}"
    if call.q.dtype not in (torch.bfloat16, torch.float16):
        return f"a {call.q.dtype} query; it takes bfloat16 and float16"
    if call.pool.dtype != call.q.dtype:
        return f"rows of {form.name} beside a {call.q.dtype} query"
    if call.page_size != PAGE:
        return f"pages of {call.page_size} rows; it takes {PAGE}"
    if form.latent_width > LATENT or form.rope_width > ROPE:
        return f"{form.latent_width}+{form.rope_width} is wider than {LATENT}+{ROPE}"
    return "dense decoding has no sinks" if call.sinks is not None else None


def _unfit_sparse(call: DecodeCall, sparse: SparseSelection, capability: tuple[int, int]) -> str | None:
    form = call.format
    if capability not in SPARSE_ARCHS:
        return f"sparse decoding needs sm_90 or sm_100, the device is sm_{capability[0]}{capability[1]}"
    if call.q.dtype != torch.bfloat16:
        return f"a {call.q.dtype} query; sparse decoding takes bfloat16"
    layout = (form.latent_width, form.rope_width, form.scale_group, form.row_bytes, form.rope_dtype)
    if layout != (LATENT, ROPE, SPARSE_GROUP, SPARSE_ROW_BYTES, "bfloat16"):
        return f"rows of {form.name}; sparse decoding takes the {SPARSE_ROW_BYTES}-byte row"
    if call.q.shape[2] > max(SPARSE_HEADS):
        return f"{call.q.shape[2]} heads are more than {max(SPARSE_HEADS)}"
    widths = [sparse.indices.shape[2]] + ([] if sparse.extra_indices is None else [sparse.extra_indices.shape[2]])
    if any(width == 0 or width % SPARSE_STEP for width in widths):
        return f"a selection of {widths} rows; it takes multiples of {SPARSE_STEP}"
    pools = [call.pool] + ([] if sparse.extra_pool is None else [sparse.extra_pool])
    if any(pool.stride(1) != SPARSE_ROW_BYTES for pool in pools):
        return "rows of a page that do not follow each other"
    rows = max(pool.shape[0] * pool.shape[1] for pool in pools)
    return f"a pool of {rows} rows has indices beyond int32" if rows > 2**31 - 1 else None


def _valid_indices(indices: Tensor, lengths: Tensor) -> Tensor:
    """(B · s_q, 1, k) int32; past a row's length the index 0 instead of anything, which int32 might not hold."""
    place = torch.arange(indices.shape[-1], device=indices.device)
    kept = indices.masked_fill(place >= lengths[..., None], 0)
    return kept.flatten(0, 1).unsqueeze(1).to(torch.int32)
