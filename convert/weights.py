"""One attention layer of a source model, in one shape for every family."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a source's attention: `H` query heads, `G` key/value heads, `d` head size, `D` hidden size."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def pairs(self) -> int:
        """Rotary pairs per head."""
        return self.head_dim // 2

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cached_numbers(self) -> int:
        """Numbers the source caches per token and layer, `2·G·d`."""
        return 2 * self.num_kv_heads * self.head_dim

    def useful_rank(self, qk_rope_head_dim: int) -> int:
        """Largest latent rank that can carry anything: `min(D, 2·G·d - d_R)` (math.md 1)."""
        return min(self.hidden_size, self.cached_numbers - qk_rope_head_dim)


@dataclass(frozen=True)
class LayerWeights:
    """The attention of one source layer, float64, heads on their own axis, rotary rows half-split.

    Attributes:
        shape: Sizes.
        q: (H, d, D).
        k: (G, d, D).
        v: (G, d, D).
        o: (H, D, d), the output projection by query head.
        q_bias: (H, d) or None.
        k_bias: (G, d) or None.
        v_bias: (G, d) or None.
        o_bias: (D,) or None.
        softmax_scale: Factor on `q·k`.
    """

    shape: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    o_bias: Tensor | None
    softmax_scale: float

    @property
    def has_bias(self) -> bool:
        """Whether any of the four projections carries a bias."""
        return any(bias is not None for bias in (self.q_bias, self.k_bias, self.v_bias, self.o_bias))
