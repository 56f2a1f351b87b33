"""What a row format costs: attention over its rows beside the same attention over bf16 rows (seed 1, 0x0B).

The visible set is the same for both, so that nothing of a selection enters: Δ_numeric alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.decode.abi import DecodeCall, DecodeOutput
from mla_convert.decode.reference import ReferenceBackend
from mla_convert.decode.rows import RowFormat, decode, encode


@dataclass(frozen=True)
class FormatError:
    """Errors of one format beside bf16 rows.

    Attributes:
        row_bytes: Bytes of a row over those of a bf16 row.
        latent: ‖latent − bf16 latent‖ / ‖bf16 latent‖ over all rows.
        output: ‖out − bf16 out‖ / ‖bf16 out‖ over all queries and heads.
        lse: Largest |LSE − bf16 LSE|, nats.
    """

    row_bytes: float
    latent: float
    output: float
    lse: float


def format_error(form: RowFormat, c_kv: Tensor, k_rope: Tensor, q: Tensor, scale: float) -> FormatError:
    """Errors of `form` for queries that all see all rows, attention in float64.

    Args:
        form: To be judged.
        c_kv: (T, d_c) latents.
        k_rope: (T, d_R) rotated keys.
        q: (s_q, H, d_c + d_R) absorbed queries.
        scale: Of the scores.
    """
    plain = RowFormat.plain(form.latent_width, form.rope_width, "bfloat16")
    rows, expected_rows = encode(form, c_kv, k_rope), encode(plain, c_kv, k_rope)  # (T, row)
    out, expected = _attend(form, rows, q, scale), _attend(plain, expected_rows, q, scale)
    latent = decode(form, rows, torch.float64)[:, : form.latent_width]  # (T, d_c)
    expected_latent = decode(plain, expected_rows, torch.float64)[:, : form.latent_width]  # (T, d_c)
    return FormatError(
        row_bytes=form.row_bytes / plain.row_bytes,
        latent=_relative(latent, expected_latent),
        output=_relative(out.out, expected.out),
        lse=float((out.lse - expected.lse).abs().max()),
    )


def _attend(form: RowFormat, rows: Tensor, q: Tensor, scale: float) -> DecodeOutput:
    call = DecodeCall(
        q=q[None].double(),
        pool=rows[None],  # one page of T rows
        format=form,
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=q.device),
        seq_lens=torch.tensor([rows.shape[0]], dtype=torch.int32, device=q.device),
        scale=scale,
        causal=False,
    )
    return ReferenceBackend().run(call)


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
