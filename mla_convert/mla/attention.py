"""One MLA layer as the stock DeepSeek-V3 architecture has it, in its expanded and its absorbed form.

Written from the equations (DeepSeek-V2, section 2.1; seed 1, 0x01–0x05; seed 2, section 2), in the dtype of the
tensors given. Both forms read the same cache, rows `[normalised c_kv | rotated k_rope]`, and are what the paged
backends are held to. Einsum letters: b batch, q queries, k keys, h heads, n content key, v value, c latent, r rotary,
D hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.errors import InputRefused
from mla_convert.mla.reference import rms_norm


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: weight (width,) and epsilon."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Rope:
    """Rotation of the rotary parts of queries and of the one shared key.

    Attributes:
        frequencies: (d_R / 2,) radians per position.
        interleaved: Whether the weights' rows come as pairs `x_0 y_0 x_1 y_1 …`; otherwise `x_0 x_1 … | y_0 y_1 …`.
        amplitude: Factor on cosine and sine (YaRN's; 1 without it).
    """

    frequencies: Tensor
    interleaved: bool
    amplitude: float = 1.0

    def turn(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rotated rows in the order `x … | y …`, whatever the order of the weights, as stock caches them.

        Args:
            rows: (B, T, ..., d_R).
            positions: (B, T).

        Returns:
            Of the same shape.
        """
        angle = positions.to(self.frequencies.dtype)[..., None] * self.frequencies  # (B, T, d_R / 2)
        angle = angle.reshape(*angle.shape[:2], *[1] * (rows.dim() - 3), angle.shape[-1])
        cos, sin = (angle.cos() * self.amplitude).to(rows.dtype), (angle.sin() * self.amplitude).to(rows.dtype)
        if self.interleaved:
            x, y = rows[..., 0::2], rows[..., 1::2]
        else:
            x, y = rows.chunk(2, dim=-1)
        return torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1)


@dataclass(frozen=True)
class MLAFactors:
    """The trainable factors of one layer, in one dtype.

    Attributes:
        q_down: (r_q, D) of the query bottleneck, or None.
        q_down_bias: (r_q,) or None.
        q_norm: Of the bottleneck, or None.
        q_up: (H, d_N + d_R, r_q), or (H, d_N + d_R, D) without a bottleneck; content rows first.
        kv_down: (d_c + d_R, D); latent rows first.
        kv_down_bias: (d_c + d_R,) or None.
        latent_norm: Of the latent, or None.
        w_uk: (H, d_N, d_c) content keys from the latent.
        w_uv: (H, d_V, d_c) values from the latent.
        w_o: (H, D, d_V).
        output_bias: (D,) or None.
        rope: Of the rotary parts.
        scale: Factor on `q·k` before the softmax.
    """

    q_down: Tensor | None
    q_down_bias: Tensor | None
    q_norm: Norm | None
    q_up: Tensor
    kv_down: Tensor
    kv_down_bias: Tensor | None
    latent_norm: Norm | None
    w_uk: Tensor
    w_uv: Tensor
    w_o: Tensor
    output_bias: Tensor | None
    rope: Rope
    scale: float

    def __post_init__(self) -> None:
        heads, nope, latent = self.w_uk.shape
        hidden, value = self.w_o.shape[1:]
        rope = 2 * self.rope.frequencies.shape[0]
        query_input = hidden if self.q_down is None else self.q_down.shape[0]
        _same("q_up", self.q_up, (heads, nope + rope, query_input))
        _same("kv_down", self.kv_down, (latent + rope, hidden))
        _same("w_uv", self.w_uv, (heads, value, latent))
        _same("w_o", self.w_o, (heads, hidden, value))
        if not 0 < self.scale < math.inf:
            raise InputRefused("a softmax scale", expected="a positive number", found=str(self.scale), where="scale")

    @property
    def latent_width(self) -> int:
        """`d_c`."""
        return self.w_uk.shape[2]

    @property
    def nope_width(self) -> int:
        """`d_N`."""
        return self.w_uk.shape[1]


@dataclass(frozen=True)
class LatentRows:
    """What the cache of one layer holds: `d_c + d_R` numbers a token, whatever the number of heads.

    Attributes:
        latent: (B, T, d_c), after the norm.
        rope: (B, T, d_R), after the rotation.
    """

    latent: Tensor
    rope: Tensor

    @property
    def length(self) -> int:
        """T."""
        return self.latent.shape[1]

    def append(self, new: LatentRows) -> LatentRows:
        """These rows, then the new ones; neither is changed."""
        if new.latent.shape[1] != new.rope.shape[1]:
            raise InputRefused(
                "latent and rotary rows of one chunk",
                expected=f"{new.latent.shape[1]} tokens each",
                found=f"{new.rope.shape[1]} rotary rows",
                where="cache",
            )
        return LatentRows(torch.cat([self.latent, new.latent], dim=1), torch.cat([self.rope, new.rope], dim=1))


@dataclass(frozen=True)
class Step:
    """One chunk of tokens through the layer.

    Attributes:
        output: (B, T_q, D).
        held: All rows, those of the chunk included.
        weights: (B, H, T_q, T_k) attention weights; 0 in a row that sees nothing.
    """

    output: Tensor
    held: LatentRows
    weights: Tensor


def softmax_scale(nope_width: int, rope_width: int, mscale: float = 1.0) -> float:
    """`(d_N + d_R)^-1/2` (DeepSeek-V2, equation 17), times YaRN's `mscale` for query and for key."""
    return mscale * mscale / math.sqrt(nope_width + rope_width)


def yarn_mscale(factor: float, mscale_all_dim: float) -> float:
    """`0.1 m ln(factor) + 1` above a factor of 1 (YaRN, Peng et al., 2023, equation 22, with DeepSeek's `m`)."""
    return 0.1 * mscale_all_dim * math.log(factor) + 1.0 if factor > 1 else 1.0


def project_query(factors: MLAFactors, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of a chunk: content (B, T_q, H, d_N) and rotated (B, T_q, H, d_R)."""
    if factors.q_down is not None:
        inputs = _with_bias(inputs @ factors.q_down.T, factors.q_down_bias)  # (B, T_q, r_q)
    if factors.q_norm is not None:
        inputs = rms_norm(inputs, factors.q_norm.weight, factors.q_norm.eps)
    query = torch.einsum("bqD,hnD->bqhn", inputs, factors.q_up)  # (B, T_q, H, d_N + d_R)
    nope, rope = query[..., : factors.nope_width], query[..., factors.nope_width :]
    return nope, factors.rope.turn(rope, positions)


def project_rows(factors: MLAFactors, inputs: Tensor, positions: Tensor) -> LatentRows:
    """What a chunk puts into the cache."""
    raw = _with_bias(inputs @ factors.kv_down.T, factors.kv_down_bias)  # (B, T_q, d_c + d_R)
    latent, rope = raw[..., : factors.latent_width], raw[..., factors.latent_width :]
    if factors.latent_norm is not None:
        latent = rms_norm(latent, factors.latent_norm.weight, factors.latent_norm.eps)
    return LatentRows(latent, factors.rope.turn(rope, positions))


def visibility(queries: int, keys: int, keep: Tensor | None, device: torch.device | None = None) -> Tensor:
    """Which key each query of the newest chunk sees: query `i` stands at key `keys − queries + i`.

    Args:
        queries: T_q.
        keys: T_k.
        keep: (B, T_k) bool, False for padding; None for none.
        device: Of the result without `keep`.

    Returns:
        (B or 1, T_q, T_k) bool.

    Raises:
        InputRefused: If there are more queries than keys, or the mask has another length.
    """
    if queries > keys:
        raise InputRefused("queries without keys", expected=f"at most {keys}", found=str(queries), where="visibility")
    if keep is None:
        return torch.ones(1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if keep.dim() != 2 or keep.shape[1] != keys or keep.dtype != torch.bool:
        raise InputRefused(
            "a padding mask", expected=f"(B, {keys}) bool", found=f"{tuple(keep.shape)} {keep.dtype}", where="keep"
        )
    causal = torch.ones(queries, keys, dtype=torch.bool, device=keep.device).tril(keys - queries)
    return causal[None] & keep[:, None, :]


def attention_weights(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible keys; a row that sees none is 0.

    Args:
        scores: (B, H, T_q, T_k), scaled.
        visible: (B or 1, T_q, T_k) bool.
    """
    hidden = ~visible[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return weights.masked_fill(hidden, 0.0)


def expanded(
    factors: MLAFactors, inputs: Tensor, positions: Tensor, held: LatentRows | None = None, keep: Tensor | None = None
) -> Step:
    """The naive form: keys and values of every head are built for every cached token. Autograd reaches all factors.

    Args:
        factors: Of the layer.
        inputs: (B, T_q, D).
        positions: (B, T_q).
        held: Rows of the earlier chunks, or None.
        keep: (B, T_k) bool over all rows, False for padding.

    Raises:
        InputRefused: If positions or mask do not fit the inputs.
    """
    nope, rope = _queries(factors, inputs, positions)
    rows = project_rows(factors, inputs, positions)
    held = rows if held is None else held.append(rows)
    keys = torch.einsum("bkc,hnc->bkhn", held.latent, factors.w_uk)  # (B, T_k, H, d_N)
    values = torch.einsum("bkc,hvc->bkhv", held.latent, factors.w_uv)  # (B, T_k, H, d_V)
    scores = torch.einsum("bqhn,bkhn->bhqk", nope, keys) + torch.einsum("bqhr,bkr->bhqk", rope, held.rope)
    weights = attention_weights(scores * factors.scale, visibility(inputs.shape[1], held.length, keep, inputs.device))
    heads = torch.einsum("bhqk,bkhv->bqhv", weights, values)  # (B, T_q, H, d_V)
    output = torch.einsum("bqhv,hDv->bqD", heads, factors.w_o)  # (B, T_q, D)
    return Step(_with_bias(output, factors.output_bias), held, weights)


def absorbed(
    factors: MLAFactors,
    inputs: Tensor,
    positions: Tensor,
    held: LatentRows | None = None,
    keep: Tensor | None = None,
    w_vo: Tensor | None = None,
) -> Step:
    """The absorbed form: no key or value of a head is built for a cached token (seed 1, 0x04).

    Args:
        factors: Of the layer.
        inputs: (B, T_q, D).
        positions: (B, T_q).
        held: Rows of the earlier chunks, or None.
        keep: (B, T_k) bool over all rows, False for padding.
        w_vo: `value_output_product`, used instead of `W_UV` and `W_O` where given.

    Raises:
        InputRefused: If positions or mask do not fit the inputs.
    """
    nope, rope = _queries(factors, inputs, positions)
    rows = project_rows(factors, inputs, positions)
    held = rows if held is None else held.append(rows)
    query = absorb_query(nope, factors.w_uk)  # (B, T_q, H, d_c)
    scores = torch.einsum("bqhc,bkc->bhqk", query, held.latent) + torch.einsum("bqhr,bkr->bhqk", rope, held.rope)
    weights = attention_weights(scores * factors.scale, visibility(inputs.shape[1], held.length, keep, inputs.device))
    latent = torch.einsum("bhqk,bkc->bqhc", weights, held.latent)  # (B, T_q, H, d_c)
    if w_vo is None:
        output = torch.einsum("bqhv,hDv->bqD", expand_value(latent, factors.w_uv), factors.w_o)
    else:
        output = torch.einsum("bqhc,hDc->bqD", latent, w_vo)
    return Step(_with_bias(output, factors.output_bias), held, weights)


def absorb_query(nope: Tensor, w_uk: Tensor) -> Tensor:
    """`W_UK^T q` of each head: (B, T_q, H, d_N), (H, d_N, d_c) -> (B, T_q, H, d_c) (seed 1, 0x04)."""
    return torch.einsum("bqhn,hnc->bqhc", nope, w_uk)


def expand_value(latent: Tensor, w_uv: Tensor) -> Tensor:
    """`W_UV` of each head on its weighted latent: (B, T_q, H, d_c), (H, d_V, d_c) -> (B, T_q, H, d_V)."""
    return torch.einsum("bqhc,hvc->bqhv", latent, w_uv)


def value_output_product(w_o: Tensor, w_uv: Tensor) -> Tensor:
    """`W_VO = W_O W_UV` of each head: (H, D, d_V), (H, d_V, d_c) -> (H, D, d_c) (seed 1, 0x04)."""
    return torch.einsum("hDv,hvc->hDc", w_o, w_uv)


def product_gradients(d_vo: Tensor, w_o: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both factors from that of their product: `dW_VO W_UV^T` and `W_O^T dW_VO` (seed 1, 0x04).

    Returns:
        dW_O (H, D, d_V) and dW_UV (H, d_V, d_c).
    """
    return torch.einsum("hDc,hvc->hDv", d_vo, w_uv), torch.einsum("hDv,hDc->hvc", w_o, d_vo)


def _queries(factors: MLAFactors, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    _same("positions", positions, tuple(inputs.shape[:2]))
    return project_query(factors, inputs, positions)


def _with_bias(rows: Tensor, bias: Tensor | None) -> Tensor:
    return rows if bias is None else rows + bias


def _same(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise InputRefused("a tensor of another size", expected=str(shape), found=str(tuple(tensor.shape)), where=name)
