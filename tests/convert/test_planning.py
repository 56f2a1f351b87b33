from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.planning import make_plan
from mla_convert.errors import InputRefused, UsageFault
from tests.conftest import PicoFactory


def test_auto_takes_the_profile_that_carries_the_norm_route(pico: PicoFactory) -> None:
    plan = make_plan(open_source(str(pico())), ConvertOptions(lossless=True, latent_norm="constant"))

    assert (plan.profile, plan.latent_norm) == ("hf", "constant")


def test_padding_that_stock_rope_cannot_hold_is_refused_before_work(pico: PicoFactory) -> None:
    """`θ' = θ^(d_R/d)` leaves float32: 10,000 to the power of 10."""
    source = open_source(str(pico(kv_heads=2)))
    options = ConvertOptions(
        kv_lora_rank=8, qk_rope_head_dim=6, profile="engine", pad_cache=(8, 160), calibration=("text",)
    )

    with pytest.raises(InputRefused, match="beyond float32"):
        make_plan(source, options)
    assert make_plan(source, replace(options, pad_cache=(8, 64))).qk_rope_head_dim == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_lossless_plan_leaves_the_query_rows_their_bits_in_half_types(pico: PicoFactory, dtype: str) -> None:
    source = open_source(str(pico(kv_heads=2, dtype=dtype)))
    plan = make_plan(source, ConvertOptions(lossless=True))

    ratio = ((plan.qk_nope_head_dim + plan.qk_rope_head_dim) / source.shape.head_dim) ** 0.5
    assert math.frexp(ratio)[0] == 0.5
    assert make_plan(source, ConvertOptions(lossless=True, dtype="float32")).qk_nope_head_dim == 8


def test_calibration_windows_fit_the_positions(pico: PicoFactory) -> None:
    source = open_source(str(pico(max_position_embeddings=64)))
    options = ConvertOptions(kv_lora_rank=8, qk_rope_head_dim=8, calibration=("text",), calibration_window=65)

    with pytest.raises(UsageFault, match="at most 64"):
        make_plan(source, options)
