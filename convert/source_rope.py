"""The rotary frequencies of a source, in float64, and which of its pairs its scaling left alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from mla_convert.errors import InputRefused
from mla_convert.mla.rope import default_frequencies, llama3_frequencies


@dataclass(frozen=True)
class SourceRope:
    """Rotary position embedding of a source.

    Attributes:
        rope_type: `default`, `linear` or `llama3`.
        theta: Base.
        frequencies: (P,) float64, radians per position, after scaling.
        unscaled: (P,) float64, before scaling.
    """

    rope_type: str
    theta: float
    frequencies: Tensor
    unscaled: Tensor

    @property
    def unscaled_pairs(self) -> int:
        """How many of the fastest pairs the scaling leaves alone."""
        same = torch.isclose(self.frequencies, self.unscaled, rtol=1e-12, atol=0.0)
        return len(same) if bool(same.all()) else int(torch.nonzero(~same).min())


def read_rope(config: PretrainedConfig, head_dim: int, where: str) -> SourceRope:
    """Frequencies from an effective configuration.

    Raises:
        InputRefused: For a rope type whose frequencies are not one fixed list, or parameters out of range.
    """
    parameters: dict[str, Any] = dict(config.rope_parameters or {})
    rope_type, theta = str(parameters.get("rope_type", "default")), parameters.get("rope_theta")
    if not isinstance(theta, int | float) or theta <= 1:
        raise InputRefused("no usable rope base", expected="rope_theta > 1", found=repr(theta), where=where)
    if parameters.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise InputRefused(
            "rope on part of the head is not carried by the engine and hf profiles",
            found=f"partial_rotary_factor={parameters['partial_rotary_factor']}",
            where=where,
        )
    plain = default_frequencies(float(theta), head_dim)
    if rope_type == "default":
        return SourceRope(rope_type, float(theta), plain, plain)
    if rope_type == "linear":
        return SourceRope(rope_type, float(theta), plain / _positive(parameters, "factor", where), plain)
    if rope_type == "llama3":
        scaled = llama3_frequencies(
            plain,
            factor=_positive(parameters, "factor", where),
            low_freq_factor=_positive(parameters, "low_freq_factor", where),
            high_freq_factor=_positive(parameters, "high_freq_factor", where),
            original_length=int(_positive(parameters, "original_max_position_embeddings", where)),
        )
        return SourceRope(rope_type, float(theta), scaled, plain)
    reason = {
        "dynamic": "its frequencies change with the sequence length",
        "yarn": "its attention factor is not carried yet",
        "longrope": "it switches between two lists of frequencies",
    }.get(rope_type, "it is not known here")
    raise InputRefused(
        f"rope type {rope_type!r} is not supported: {reason}",
        expected="default, linear or llama3",
        found=rope_type,
        where=f"{where}/config.json",
    )


def _positive(parameters: dict[str, Any], name: str, where: str) -> float:
    value = parameters.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise InputRefused(
            "a rope parameter is missing or out of range",
            expected=f"{name} > 0",
            found=repr(value),
            where=f"{where}/config.json",
        )
    return float(value)
