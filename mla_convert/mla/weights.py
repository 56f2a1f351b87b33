"""The weights of one Multi-head Latent Attention layer, free of any checkpoint format."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MLALayerWeights:
    """One MLA layer in float64, before a profile lays it out.

    `H` query heads, `G` key/value heads, `D` hidden size, `r` latent width, `m` rotary slots,
    `d_N` content key width, `d_V` value width. Rotary rows are complex: slot `s` is `x + iy`.

    Attributes:
        q_nope: (H, d_N, D) content query rows.
        q_nope_bias: (H, d_N) or None.
        q_rope: (H, m, D) complex rotary query rows.
        q_rope_bias: (H, m) complex or None.
        k_rope: (m, D) complex rows of the one shared rotary key.
        k_rope_bias: (m,) complex or None.
        latent: (r, D) rows that make the cached latent; no norm follows them.
        k_up: (G, d_N, r) content keys from the latent.
        v_up: (G, d_V, r) values from the latent.
        output: (H, D, d_V) output projection by query head.
        output_bias: (D,) or None; carries the source's output and value biases and the values' mean.
        frequencies: (m,) radians per position of each slot.
        softmax_scale: Factor on `q·k` before the softmax (the source's).
    """

    q_nope: Tensor
    q_nope_bias: Tensor | None
    q_rope: Tensor
    q_rope_bias: Tensor | None
    k_rope: Tensor
    k_rope_bias: Tensor | None
    latent: Tensor
    k_up: Tensor
    v_up: Tensor
    output: Tensor
    output_bias: Tensor | None
    frequencies: Tensor
    softmax_scale: float

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.q_nope.shape[0] // self.k_up.shape[0]

    @property
    def useful_rank(self) -> int:
        """Width of the latent before padding."""
        return self.latent.shape[0]
