"""The `reference` backend: float64, plain indexing, one query at a time. What every other backend is held to."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.decode.abi import DecodeCall, DecodeOutput, LaunchFigures, SparseSelection
from mla_convert.decode.rows import decode
from mla_convert.decode.values import check_values


class ReferenceBackend:
    """Absorbed attention as its equation: softmax(q·k / …) over the visible rows, whose latent is the value."""

    name = "reference"
    automatic = False

    def absent(self, device: torch.device) -> str | None:  # noqa: ARG002  the protocol's
        """Nothing."""
        return None

    def unfit(self, call: DecodeCall) -> str | None:  # noqa: ARG002  the protocol's
        """It runs everything that `check_call` accepts, on any device."""
        return None

    def launch(self, call: DecodeCall) -> LaunchFigures:  # noqa: ARG002  the protocol's
        """Plain tensor operations."""
        return LaunchFigures()

    def run(self, call: DecodeCall) -> DecodeOutput:
        """Compute in float64; `out` is rounded once to the dtype of `q`."""
        check_values(call)
        batch, queries, heads, _ = call.q.shape
        width = call.format.latent_width
        out = torch.zeros(batch, queries, heads, width, dtype=torch.float64, device=call.q.device)
        lse = torch.full((batch, queries, heads), float("-inf"), dtype=torch.float64, device=call.q.device)
        for sequence in range(batch):
            for query in range(queries):
                rows = _visible_rows(call, sequence, query)  # (n, d_c + d_R)
                if rows.shape[0] == 0:
                    continue
                scores = call.q[sequence, query].double() @ rows.T * call.scale  # (H, n)
                lse[sequence, query] = torch.logsumexp(scores, dim=-1)
                denominator = lse[sequence, query]  # (H,)
                if call.sinks is not None:
                    denominator = torch.logaddexp(denominator, call.sinks.double())
                weights = torch.exp(scores - denominator[:, None])  # (H, n)
                out[sequence, query] = weights @ rows[:, :width]
        lse_dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        return DecodeOutput(out.to(call.q.dtype), lse.to(lse_dtype))


def _visible_rows(call: DecodeCall, sequence: int, query: int) -> Tensor:
    """(n, d_c + d_R) float64: what one query sees."""
    if call.sparse is not None:
        return _selected_rows(call, call.sparse, sequence, query)
    visible = int(call.seq_lens[sequence])
    if call.causal:
        visible = max(0, visible - call.q.shape[1] + query + 1)
    tokens = torch.arange(visible, device=call.q.device)  # (n,)
    pages = call.block_table[sequence, tokens // call.page_size].to(torch.int64)  # (n,)
    return decode(call.format, call.pool[pages, tokens % call.page_size], torch.float64)


def _selected_rows(call: DecodeCall, sparse: SparseSelection, sequence: int, query: int) -> Tensor:
    """(k + k', d_c + d_R) float64: the valid left part of each segment."""
    segments = [(call.pool, sparse.indices, sparse.lengths)]
    if sparse.extra_pool is not None and sparse.extra_indices is not None and sparse.extra_lengths is not None:
        segments.append((sparse.extra_pool, sparse.extra_indices, sparse.extra_lengths))
    parts = []
    for pool, indices, lengths in segments:
        slots = indices[sequence, query, : int(lengths[sequence, query])]  # (k,)
        pages, offsets = slots // pool.shape[1], slots % pool.shape[1]  # (k,), (k,)
        parts.append(decode(call.format, pool[pages, offsets], torch.float64))
    return torch.cat(parts)
