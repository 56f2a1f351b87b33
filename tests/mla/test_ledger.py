"""The figures of seed 1, 0x02, 0x04, 0x06, 0x09 and 0x0B."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from mla_convert.errors import InputRefused, UsageFault
from mla_convert.mla.ledger import (
    DEVICES,
    PRESETS,
    MLAShape,
    Workload,
    arithmetic_intensity,
    crossover_tokens,
    fp8_row_bytes,
    make_ledger,
)

V2 = PRESETS["deepseek-v2"]
TWO = make_ledger(V2, Workload(batch=2, queries=1, history=4096, dtype="bfloat16"), "h200")
ONE = make_ledger(V2, Workload(batch=1, queries=1, history=4096, dtype="bfloat16"))
MIB, GIB = 2**20, 2**30


def test_parameters_and_projections() -> None:
    assert TWO.attention_linear_parameters == 7_864_320 + 37_748_736 + 2_949_120 + 16_777_216 + 83_886_080
    assert TWO.attention_linear_parameters == 149_225_472
    assert TWO.projection_flops == 596_901_888


def test_parameters_without_a_query_bottleneck() -> None:
    lite = MLAShape(27, 2048, 16, None, 512, 128, 64, 128)

    assert lite.query_parameters == 2048 * 16 * 192
    assert lite.linear_parameters == 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 2048 * 16 * 128


def test_cache_rows() -> None:
    assert ONE.cache_bytes_per_token_per_layer == 1152
    assert ONE.expanded_bytes_per_token_per_layer == 81_920
    assert ONE.expanded_to_latent_ratio == 40960 / 576
    assert round(ONE.expanded_to_latent_ratio, 1) == 71.1


def test_cache_of_a_request() -> None:
    assert ONE.expanded_cache_bytes == 18.75 * GIB
    assert ONE.cache_bytes == 270 * MIB
    assert TWO.cache_bytes == 540 * MIB


def test_fp8_row() -> None:
    assert ONE.fp8_row_bytes == 656
    assert ONE.fp8_to_bf16_ratio == 656 / 1152
    assert fp8_row_bytes(144, 48) == 144 + 2 * 4 + 96
    assert fp8_row_bytes(6, 0) == 8 + 4


def test_stored_product() -> None:
    assert ONE.absorbed_product_bytes == 640 * MIB == 671_088_640


def test_intensity() -> None:
    assert ONE.arithmetic_intensity == pytest.approx(128 * 1088 / 576, rel=1e-15)
    assert round(ONE.arithmetic_intensity) == 242
    assert arithmetic_intensity(V2, queries=2) == 2 * arithmetic_intensity(V2, queries=1)
    assert arithmetic_intensity(V2, queries=1, size=4) == arithmetic_intensity(V2, queries=1) / 2


def test_crossover() -> None:
    assert ONE.crossover_tokens == pytest.approx(128 * 512 / (512 * 128 + 128 - 512), rel=1e-15)
    # One query over T keys: the materialised and the absorbed order take equally many multiply-adds there.
    shape = replace(V2, kv_lora_rank=96, nope=48)
    for queries in (1, 4):
        tokens = crossover_tokens(shape, queries)
        assert tokens is not None
        materialised = tokens * 96 * 48 + queries * tokens * 48
        assert materialised == pytest.approx(queries * 48 * 96 + queries * tokens * 96, rel=1e-12)
    assert crossover_tokens(replace(V2, kv_lora_rank=512, nope=1), 2) is None


def test_ridge() -> None:
    assert TWO.ridge == pytest.approx(989.5e12 / 4.8e12)
    assert TWO.bound == "compute"
    assert make_ledger(replace(V2, heads=16), Workload(1, 1, 0, "bfloat16"), "h200").bound == "memory"
    assert (ONE.device, ONE.ridge, ONE.bound) == (None, None, None)
    assert round(DEVICES["h800"].ridge) == 258
    assert all(device.source for device in DEVICES.values())


def test_what_is_not_in_a_table_is_refused_with_what_is() -> None:
    with pytest.raises(UsageFault, match="h200"):
        make_ledger(V2, Workload(1, 1, 1, "bfloat16"), "gtx280")
    with pytest.raises(UsageFault, match="bfloat16"):
        make_ledger(V2, Workload(1, 1, 1, "int3"))
    with pytest.raises(InputRefused, match="heads"):
        replace(V2, heads=0)


def test_no_torch_is_imported() -> None:
    script = "import sys, mla_convert.mla.ledger, mla_convert.cli.ledger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
