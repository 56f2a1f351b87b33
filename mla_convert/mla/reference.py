"""Plain float64 forward of a decoder with MLA attention: the oracle that written checkpoints are held to.

Nothing here knows of files, tensor names or the stock DeepSeek layout; it is written from the equations
(DeepSeek-V2, section 2.1, without the latent norm) and shares no code with the writer it checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.mla.rope import rotation
from mla_convert.mla.weights import MLALayerWeights


@dataclass(frozen=True)
class BlockWeights:
    """What surrounds attention in one decoder layer: two RMSNorm weights and a gated MLP.

    In any dtype; each is made float64 where it is used, so that one matrix is a copy at a time.
    """

    input_norm: Tensor  # (D,)
    post_attention_norm: Tensor  # (D,)
    gate: Tensor  # (F, D)
    up: Tensor  # (F, D)
    down: Tensor  # (D, F)
    norm_eps: float
    activation: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class AttentionTrace:
    """Every stage of one attention call, so that a differing checkpoint can be blamed on one tensor."""

    query_content: Tensor  # (B, T, H, d_N)
    query_rope: Tensor  # (B, T, H, m) complex, before rotation
    latent: Tensor  # (B, T, r)
    key_rope: Tensor  # (B, T, m) complex, before rotation
    key_content: Tensor  # (B, T, H, d_N)
    value: Tensor  # (B, T, H, d_V)
    heads: Tensor  # (B, T, H, d_V), attention-averaged values
    output: Tensor  # (B, T, D)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich, 2019): (..., D) -> (..., D)."""
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps) * weight


def _with_bias(rows: Tensor, bias: Tensor | None) -> Tensor:
    return rows if bias is None else rows + bias


def mla_attention(weights: MLALayerWeights, inputs: Tensor, first_position: int = 0) -> AttentionTrace:
    """Causal MLA attention in its expanded form.

    Args:
        weights: One layer, float64.
        inputs: (B, T, D) float64, after the layer's input norm.
        first_position: Position of the first token.

    Returns:
        All stages; `.output` is (B, T, D).
    """
    length = inputs.shape[1]
    positions = torch.arange(first_position, first_position + length, device=inputs.device)
    turn = rotation(positions, weights.frequencies)  # (T, m)
    complex_inputs = inputs.to(torch.complex128)
    q_nope = _with_bias(torch.einsum("btD,hnD->bthn", inputs, weights.q_nope), weights.q_nope_bias)
    q_rope = _with_bias(torch.einsum("btD,hmD->bthm", complex_inputs, weights.q_rope), weights.q_rope_bias)
    k_rope = _with_bias(torch.einsum("btD,mD->btm", complex_inputs, weights.k_rope), weights.k_rope_bias)
    latent = inputs @ weights.latent.T  # (B, T, r)
    rep = weights.heads_per_group
    k_nope = torch.einsum("btr,gnr->btgn", latent, weights.k_up).repeat_interleave(rep, dim=2)  # (B, T, H, d_N)
    value = torch.einsum("btr,gvr->btgv", latent, weights.v_up).repeat_interleave(rep, dim=2)  # (B, T, H, d_V)

    scores = torch.einsum("bthn,bjhn->bhtj", q_nope, k_nope)  # (B, H, T, T)
    turned_q, turned_k = q_rope * turn[None, :, None, :], k_rope * turn[None]
    scores = scores + torch.einsum("bthm,bjm->bhtj", turned_q.conj(), turned_k).real
    hidden_future = torch.ones(length, length, dtype=torch.bool, device=inputs.device).triu(1)
    scores = (scores * weights.softmax_scale).masked_fill(hidden_future, float("-inf"))
    heads = torch.einsum("bhtj,bjhv->bthv", scores.softmax(-1), value)  # (B, T, H, d_V)
    output = _with_bias(torch.einsum("bthv,hDv->btD", heads, weights.output), weights.output_bias)
    return AttentionTrace(q_nope, q_rope, latent, k_rope, k_nope, value, heads, output)


def decoder_layer(block: BlockWeights, attention: MLALayerWeights, hidden: Tensor) -> tuple[Tensor, AttentionTrace]:
    """One pre-norm decoder layer: (B, T, D) float64 -> (B, T, D), with the attention's stages."""
    trace = mla_attention(attention, rms_norm(hidden, block.input_norm.double(), block.norm_eps))
    hidden = hidden + trace.output
    inner = rms_norm(hidden, block.post_attention_norm.double(), block.norm_eps)
    gated = block.activation(inner @ block.gate.double().T) * (inner @ block.up.double().T)  # (B, T, F)
    return hidden + gated @ block.down.double().T, trace
