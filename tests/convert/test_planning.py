from __future__ import annotations

from dataclasses import replace

import pytest

from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.planning import make_plan
from mla_convert.errors import InputRefused
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
