"""Sequence-split attention across processes: every rank holds some rows of each history (seed 1, 0x0C).

Each rank attends to its own rows with any backend; the ranks' states are merged exactly. Sinks and the value side
(`W_UV`, `W_O`) follow the merge.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from mla_convert.decode.abi import DecodeOutput
from mla_convert.decode.merge import PartialState, rescaled


def merge_across_ranks(part: PartialState, group: dist.ProcessGroup | None = None) -> PartialState:
    """The state of all ranks' rows together, on every rank: one all-reduce of maxima and one of sums.

    m = max m_r; l = Σ exp(m_r − m) l_r; o = Σ exp(m_r − m) o_r. Averaging the ranks' outputs is something else.

    Args:
        part: This rank's, float32 or float64, of the same shape on all ranks; a rank without rows has m = −inf.
        group: Of ranks; the default group if None.
    """
    m = part.m.clone()
    dist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)
    total, numerator = rescaled(part, m)
    packed = torch.cat([numerator, total[..., None]], dim=-1)  # (..., d + 1)
    dist.all_reduce(packed, op=dist.ReduceOp.SUM, group=group)
    return PartialState(m, packed[..., -1], packed[..., :-1])


def merge_outputs_across_ranks(output: DecodeOutput, group: dist.ProcessGroup | None = None) -> DecodeOutput:
    """The same from what a backend returned for this rank's rows; computed in the dtype of its LSE.

    An output in a half type was rounded before the merge; a float32 query avoids that.

    Args:
        output: Of a call without sinks.
        group: See `merge_across_ranks`.
    """
    compute = output.lse.dtype
    merged = merge_across_ranks(PartialState.of_output(output.out.to(compute), output.lse), group)
    out, lse = merged.normalised()
    return DecodeOutput(out.to(output.out.dtype), lse)
