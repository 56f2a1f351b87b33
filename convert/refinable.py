"""One MLA attention layer as float32 parameters that can be fitted, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mla_convert.mla.rope import rotation
from mla_convert.mla.weights import MLALayerWeights


class RefinableAttention(nn.Module):
    """MLA attention in its expanded form, causal, float32: what `mla.reference.mla_attention` computes.

    Stock checkpoints hold `kv_b_proj` by query head, so keys and values are rebuilt from the latent by query head
    here: the freedom costs no cache.

    Args:
        weights: The layer to start from.

    Attributes:
        queries: (H·(d_N + 2m), D) content rows, then rotary rows `x_0 … x_{m-1} y_0 … y_{m-1}`, of each head.
        rope: (2m, D) rows of the shared rotary key, in the same order.
        latent: (r, D).
        key_up: (H·d_N, r).
        value_up: (H·d_V, r).
        output: (D, H·d_V), not fitted: the source's own projection loses nothing, and fitting it learned the
            calibration text at the cost of other text (docs/fidelity.md).
        query_bias: (H·(d_N + 2m),) where the layer has one.
        rope_bias: (2m,) where the layer has one.
        output_bias: (D,) where the layer has one.
    """

    def __init__(self, weights: MLALayerWeights) -> None:
        super().__init__()
        rep = weights.heads_per_group
        self.heads, self.nope, _ = weights.q_nope.shape
        self.slots = weights.k_rope.shape[0]
        self.softmax_scale = weights.softmax_scale
        self.frequencies = weights.frequencies
        self.queries = _parameter(torch.cat([weights.q_nope, _real(weights.q_rope, 1)], dim=1).flatten(0, 1))
        self.rope = _parameter(_real(weights.k_rope, 0))
        self.latent = _parameter(weights.latent)
        self.key_up = _parameter(weights.k_up.repeat_interleave(rep, dim=0).flatten(0, 1))
        self.value_up = _parameter(weights.v_up.repeat_interleave(rep, dim=0).flatten(0, 1))
        self.output = _parameter(weights.output.permute(1, 0, 2).flatten(1)).requires_grad_(False)
        self.query_bias = self.rope_bias = self.output_bias = None
        if weights.q_nope_bias is not None and weights.q_rope_bias is not None:
            bias = torch.cat([weights.q_nope_bias, _real(weights.q_rope_bias, 1)], dim=1)
            self.query_bias = _parameter(bias.flatten())
        if weights.k_rope_bias is not None:
            self.rope_bias = _parameter(_real(weights.k_rope_bias, 0))
        if weights.output_bias is not None:
            self.output_bias = _parameter(weights.output_bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, T, D) float32, after the layer's input norm -> (B, T, D), before the residual is added."""
        batch, length, _ = inputs.shape
        turn = rotation(torch.arange(length), self.frequencies)  # (T, m)
        cosine, sine = turn.real.float(), turn.imag.float()
        queries = nn.functional.linear(inputs, self.queries, self.query_bias)
        queries = queries.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, d_N + 2m)
        content, rotary = queries.split([self.nope, 2 * self.slots], dim=-1)
        shared = _turned(nn.functional.linear(inputs, self.rope, self.rope_bias), cosine, sine)  # (B, T, 2m)
        latent = inputs @ self.latent.T  # (B, T, r)
        keys = (latent @ self.key_up.T).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, d_N)
        values = (latent @ self.value_up.T).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, d_V)
        rotary = _turned(rotary, cosine, sine)
        scores = content @ keys.transpose(-1, -2) + rotary @ shared[:, None].transpose(-1, -2)  # (B, H, T, T)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = (scores * self.softmax_scale).masked_fill(future, float("-inf")).softmax(-1)
        heads = (weights @ values).transpose(1, 2).reshape(batch, length, -1)  # (B, T, H·d_V)
        return nn.functional.linear(heads, self.output, self.output_bias)

    def to_weights(self) -> MLALayerWeights:
        """The parameters as float64 weights, keys and values by query head."""
        queries = self.queries.detach().double().unflatten(0, (self.heads, -1))  # (H, d_N + 2m, D)
        bias = None if self.query_bias is None else self.query_bias.detach().double().unflatten(0, (self.heads, -1))
        return MLALayerWeights(
            q_nope=queries[:, : self.nope].clone(),
            q_nope_bias=None if bias is None else bias[:, : self.nope].clone(),
            q_rope=_complex(queries[:, self.nope :], 1),
            q_rope_bias=None if bias is None else _complex(bias[:, self.nope :], 1),
            k_rope=_complex(self.rope.detach().double(), 0),
            k_rope_bias=None if self.rope_bias is None else _complex(self.rope_bias.detach().double(), 0),
            latent=self.latent.detach().double(),
            k_up=self.key_up.detach().double().unflatten(0, (self.heads, -1)),
            v_up=self.value_up.detach().double().unflatten(0, (self.heads, -1)),
            output=self.output.detach().double().unflatten(1, (self.heads, -1)).permute(1, 0, 2).contiguous(),
            output_bias=None if self.output_bias is None else self.output_bias.detach().double(),
            frequencies=self.frequencies,
            softmax_scale=self.softmax_scale,
        )


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.float().contiguous())


def _real(pairs: Tensor, dim: int) -> Tensor:
    """Complex (…, m, …) -> real (…, 2m, …), real parts before imaginary ones."""
    return torch.cat([pairs.real, pairs.imag], dim=dim)


def _complex(rows: Tensor, dim: int) -> Tensor:
    """Inverse of `_real`."""
    real, imaginary = rows.chunk(2, dim=dim)
    return torch.complex(real.contiguous(), imaginary.contiguous())


def _turned(rows: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate (…, T, 2m) rows, real parts before imaginary ones, by (T, m)."""
    real, imaginary = rows.chunk(2, dim=-1)
    return torch.cat([real * cosine - imaginary * sine, real * sine + imaginary * cosine], dim=-1)
