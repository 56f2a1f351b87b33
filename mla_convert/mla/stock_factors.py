"""The factors of one layer out of the tensors of a stock `DeepseekV3Attention`, by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mla_convert.errors import InputRefused
from mla_convert.mla.attention import MLAFactors, Norm, Rope, softmax_scale


def split_kv_up(weight: Tensor, heads: int, nope_width: int) -> tuple[Tensor, Tensor]:
    """`kv_b_proj` by head, content keys first: (H (d_N + d_V), d_c) -> W_UK (H, d_N, d_c), W_UV (H, d_V, d_c).

    Both are views of `weight`.
    """
    by_head = weight.view(heads, -1, weight.shape[-1])  # (H, d_N + d_V, d_c)
    return by_head[:, :nope_width], by_head[:, nope_width:]


def split_output(weight: Tensor, heads: int) -> Tensor:
    """`o_proj` by head: (D, H d_V) -> W_O (H, D, d_V), a view."""
    return weight.view(weight.shape[0], heads, -1).transpose(0, 1)


@dataclass(frozen=True)
class StockShape:
    """What the names of a stock attention module's tensors do not say.

    Attributes:
        heads: H.
        nope_width: d_N.
        rope: Of the rotary parts.
        norm_eps: Of both norms.
        mscale: YaRN's factor for query and for key.
    """

    heads: int
    nope_width: int
    rope: Rope
    norm_eps: float
    mscale: float = 1.0


def stock_factors(state: Mapping[str, Tensor], shape: StockShape) -> MLAFactors:
    """The factors in the state of a stock `DeepseekV3Attention`, as views where that is possible.

    Args:
        state: Its tensors by their names in the checkpoint, without the layer's prefix.
        shape: See `StockShape`.

    Raises:
        InputRefused: If a tensor is missing, is one too many, or has the wrong size.
    """
    bottleneck = "q_a_proj.weight" in state
    query = {"q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"} if bottleneck else {"q_proj.weight"}
    needed = query | {"kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight", "o_proj.weight"}
    biases = {"kv_a_proj_with_mqa.bias", "o_proj.bias"} | ({"q_a_proj.bias"} if bottleneck else set())
    if not needed <= set(state) <= needed | biases:
        raise InputRefused(
            "the tensors of an MLA layer", expected=", ".join(sorted(needed)), found=", ".join(sorted(state))
        )
    q_up = state["q_b_proj.weight" if bottleneck else "q_proj.weight"]  # (H (d_N + d_R), r_q or D)
    w_uk, w_uv = split_kv_up(state["kv_b_proj.weight"], shape.heads, shape.nope_width)
    return MLAFactors(
        q_down=state.get("q_a_proj.weight"),
        q_down_bias=state.get("q_a_proj.bias"),
        q_norm=Norm(state["q_a_layernorm.weight"], shape.norm_eps) if bottleneck else None,
        q_up=q_up.view(shape.heads, -1, q_up.shape[-1]),
        kv_down=state["kv_a_proj_with_mqa.weight"],
        kv_down_bias=state.get("kv_a_proj_with_mqa.bias"),
        latent_norm=Norm(state["kv_a_layernorm.weight"], shape.norm_eps),
        w_uk=w_uk,
        w_uv=w_uv,
        w_o=split_output(state["o_proj.weight"], shape.heads),
        output_bias=state.get("o_proj.bias"),
        rope=shape.rope,
        scale=softmax_scale(shape.nope_width, 2 * shape.rope.frequencies.shape[0], shape.mscale),
    )
