"""Adapter to FlashInfer's paged MLA kernels, used where it is installed and its limits hold.

Of `BatchMLAPagedAttentionWrapper` (flashinfer/mla.py of github.com/flashinfer-ai/flashinfer): `plan` takes CSR page
tables, `run` separate views of latent and rotary part. Its LSE is in base 2 unless told otherwise, which older
versions cannot be; the adapter converts.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mla_convert.decode.abi import DecodeCall, DecodeOutput
from mla_convert.decode.foreign import (
    LATENT,
    ROPE,
    ForeignBackend,
    blank_unseen,
    pad_parts,
    seen_rows,
)

WORKSPACE_BYTES = 128 * 1024 * 1024
"""What FlashInfer recommends for its partial results."""

MIN_ARCH = (8, 0)


class FlashInferMLA(Protocol):
    """The part of `flashinfer.mla` that the adapter calls."""

    def BatchMLAPagedAttentionWrapper(self, workspace: Tensor, *, backend: str) -> Any:
        """A wrapper with `plan` and `run`."""
        ...


@dataclass(frozen=True)
class FlashInferBackend(ForeignBackend):
    """FlashInfer's FA2 and FA3 kernels, built for 512+64; narrower rows are padded, and `padding` says how much.

    `plan` reads lengths and tables on the host, so `run` waits for the device and no graph can capture it; `planned`
    parts the two.
    """

    package: ClassVar[str] = "flashinfer"

    @property
    def name(self) -> str:
        """As the user asks for it."""
        return "flashinfer"

    def limits(self, call: DecodeCall, capability: tuple[int, int]) -> str | None:
        """See the base class."""
        form = call.format
        if capability < MIN_ARCH:
            return f"it needs sm_80, the device is sm_{capability[0]}{capability[1]}"
        if call.sparse is not None or call.sinks is not None:
            return "its paged MLA wrapper has neither row selections nor sinks"
        if call.q.dtype not in (torch.bfloat16, torch.float16):
            return f"a {call.q.dtype} query; it takes bfloat16 and float16"
        if call.pool.dtype != call.q.dtype:
            return f"rows of {form.name} beside a {call.q.dtype} query"
        if form.latent_width > LATENT or form.rope_width > ROPE:
            return f"{form.latent_width}+{form.rope_width} is wider than {LATENT}+{ROPE}"
        return None

    def run(self, call: DecodeCall) -> DecodeOutput:
        """Compute `call`, which `unfit` has passed."""
        return self.planned(call)()

    def planned(self, call: DecodeCall) -> Callable[[], DecodeOutput]:
        """Plan on the host once; what comes back computes `call` as often as wanted, in a captured graph too."""
        module: FlashInferMLA = self.module or importlib.import_module("flashinfer.mla")
        batch, tokens, heads, _ = call.q.shape
        width, padding = call.format.latent_width, self.padding(call)
        q = pad_parts(call.q, width, padding).flatten(0, 1)  # (B · s_q, H, 576)
        pool = pad_parts(call.pool, width, padding)  # (pages, P, 576)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        wrapper = module.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
        pages = page_lists(call.block_table, call.seq_lens, call.page_size)
        wrapper.plan(
            qo_indptr=torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=q.device),
            kv_indptr=pages.starts,
            kv_indices=pages.indices,
            kv_len_arr=call.seq_lens.to(torch.int32),
            num_heads=heads,
            head_dim_ckv=LATENT,
            head_dim_kpe=ROPE,
            page_size=call.page_size,
            causal=call.causal,
            sm_scale=call.scale,
            q_data_type=q.dtype,
            kv_data_type=pool.dtype,
        )

        def compute() -> DecodeOutput:
            out, lse = wrapper.run(
                q_nope=q[..., :LATENT],
                q_pe=q[..., LATENT:],
                ckv_cache=pool[..., :LATENT],
                kpe_cache=pool[..., LATENT:],
                return_lse=True,
            )
            out = out.view(batch, tokens, heads, LATENT)[..., :width]
            return blank_unseen(out, (lse * math.log(2.0)).view(batch, tokens, heads), seen_rows(call))

        return compute


@dataclass(frozen=True)
class PageLists:
    """Block tables as CSR.

    Attributes:
        starts: (B + 1,) int32, where each sequence's pages begin in `indices`.
        indices: int32, the pages of all sequences.
    """

    starts: Tensor
    indices: Tensor


def page_lists(block_table: Tensor, seq_lens: Tensor, page_size: int) -> PageLists:
    """The pages that sequences use, without the entries of the table past them."""
    counts = (seq_lens.long() + page_size - 1) // page_size  # (B,)
    used = torch.arange(block_table.shape[1], device=block_table.device)[None, :] < counts[:, None]
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    return PageLists(starts, block_table[used].to(torch.int32))
