"""Does our reading of a source layer compute what the source's own class computes?"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.convert.source_model import BatchPass
from mla_convert.convert.statistics import attention_probabilities, project, row_blocks
from mla_convert.convert.weights import LayerWeights
from mla_convert.errors import CheckFailed
from mla_convert.mla.rope import to_pairs
from mla_convert.tolerances import SOURCE_READING


def source_attention(weights: LayerWeights, inputs: Tensor, frequencies: Tensor) -> Tensor:
    """The source's attention in float64: one window (T, D) -> (T, D)."""
    shape = weights.shape
    queries = to_pairs(project(weights.q, weights.q_bias, inputs).transpose(1, 2)).transpose(1, 2)  # (H, T, P)
    keys = to_pairs(project(weights.k, weights.k_bias, inputs).transpose(1, 2)).transpose(1, 2)  # (G, T, P)
    values = project(weights.v, weights.v_bias, inputs)  # (G, T, d)
    out = torch.zeros_like(inputs) if weights.o_bias is None else weights.o_bias.expand_as(inputs).clone()
    for group in range(shape.num_kv_heads):
        heads = slice(group * shape.heads_per_group, (group + 1) * shape.heads_per_group)
        for rows in row_blocks(shape.heads_per_group, len(inputs)):
            seen = slice(0, rows.stop)
            own, keys_seen = queries[heads, rows], keys[group, seen]
            p = attention_probabilities(own, keys_seen, frequencies, weights.softmax_scale, rows.start)
            out[rows] += torch.einsum("atd,aDd->tD", p @ values[group, seen], weights.o[heads])
    return out


def check_reading(weights: LayerWeights, frequencies: Tensor, done: BatchPass, windows: int) -> None:
    """Compare our float64 reading of a layer with what its own class computed.

    Args:
        weights: Our reading.
        frequencies: (P,).
        done: The layer's own forward over the windows.
        windows: How many sequences to compare.

    Raises:
        CheckFailed: Naming the layer, if they differ: the family's row does not describe this checkpoint.
    """
    for inputs, output in zip(done.attention_input[:windows], done.attention_output[:windows], strict=True):
        ours = source_attention(weights, inputs.double(), frequencies)
        error = float((ours - output).norm() / output.double().norm().clamp(min=1e-30))
        if not error <= SOURCE_READING:
            raise CheckFailed(
                "our reading of the source's attention differs from its own transformers class",
                expected=f"relative error at most {SOURCE_READING:g}",
                found=f"{error:.3g}",
                where=f"layer {done.layer}",
                remedy="The checkpoint has a feature that the family table does not know; nothing was written.",
            )
