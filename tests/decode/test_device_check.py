"""What of the device check needs no device: its cells, its ratios, its verdicts, and its refusal without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mla_convert.decode.device_bench import BenchCell, BenchRow, DeviceRates, Peer, bench_cells, build_cell, ratios
from mla_convert.decode.device_check import CaseResult, DeviceReport, SanitizerResult, judged, main, moved, table
from mla_convert.decode.ladder import Deviation, LadderCase, build, deviation, exact
from mla_convert.decode.tiles import TileConfig
from mla_convert.decode.triton_aot import Resources
from mla_convert.decode.triton_backend import LaunchReport
from mla_convert.errors import EnvironmentFault

RATES = DeviceRates(copy_bytes_per_s=4e12, matmul_flops_per_s=800e12)
CELL = BenchCell(128, 4096, 16, 512, 64)
RESOURCES = Resources(200, 0, 0, 56000, "mma.sync", True)
LAUNCH = LaunchReport("triton", "sm_90", TileConfig(16, 32, 4, 3), 2, (256,), 64, 0, 1000, RESOURCES)
GOOD = CaseResult("good", 1e-3, 1e-6, True)


def row(seconds: float, *peers: Peer, cell: BenchCell = CELL) -> BenchRow:
    return BenchRow(cell, seconds, ratios(cell, seconds, RATES), peers, LAUNCH)


def report(**changes: object) -> DeviceReport:
    sanitizer = SanitizerResult(False, False, "compute-sanitizer is not installed")
    base = DeviceReport("H200", "sm_90", {}, (GOOD,), (), sanitizer, RATES, (row(2e-4),), (), 1.0)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_cells_are_the_benchmarks() -> None:
    cells = bench_cells()

    assert {(c.batch, c.length, c.heads, c.d_c, c.d_r, c.tokens) for c in cells} == {
        (128, 4096, 16, 512, 64, 1),
        (128, 4096, 32, 512, 64, 1),
        (128, 4096, 128, 512, 64, 1),
        (128, 4096, 16, 256, 32, 1),
        (128, 4096, 9, 144, 48, 1),
        (128, 4096, 16, 384, 32, 1),
        (1, 16384, 16, 512, 64, 1),
        (128, 4096, 16, 512, 64, 4),
    }
    assert len(cells) == 8


def test_traffic_and_work_of_a_cell() -> None:
    assert CELL.bytes == 128 * 4096 * 1152 + 128 * 16 * (1152 + 1024 + 4)
    assert CELL.flops == 2 * 128 * 16 * 4096 * (576 + 512)
    assert BenchCell(128, 4096, 16, 512, 64, 4).flops == 4 * CELL.flops


def test_ratios_beside_the_measured_rates() -> None:
    found = ratios(CELL, 2 * CELL.bytes / RATES.copy_bytes_per_s, RATES)

    assert found.bound == "memory"
    assert found.bandwidth == pytest.approx(0.5)
    assert found.roofline == found.bandwidth
    assert ratios(replace(CELL, heads=32), 1.0, RATES).bound == "memory"
    assert ratios(replace(CELL, heads=128), 1.0, RATES).bound == "compute"


def test_missed_goals_are_named() -> None:
    fast, slow = CELL.bytes / RATES.copy_bytes_per_s / 0.8, CELL.bytes / RATES.copy_bytes_per_s / 0.7

    assert row(fast).missed == ()
    assert "0.70 of the copy bandwidth" in row(slow).missed[0]
    assert "0.80 × FlashMLA" in row(fast, Peer("flashmla", 0.8 * fast, None)).missed[0]
    assert row(fast, Peer("flashmla", 0.8 * fast, None, padded=True)).missed == ()
    assert row(fast, Peer("flashinfer", 0.1 * fast, None)).missed == ()
    assert row(fast, Peer("flashmla", None, "not installed")).missed == ()
    heads = BenchCell(128, 4096, 128, 512, 64)
    assert row(2e-4, Peer("flashmla", 1e-4, None), cell=heads).missed == ()


def test_a_small_cell_has_full_tables_of_different_pages() -> None:
    call = build_cell(BenchCell(2, 130, 3, 32, 8), torch.device("cpu"))

    assert call.block_table.shape == (2, 3)
    assert sorted(call.block_table.flatten().tolist()) == list(range(6))
    assert call.seq_lens.tolist() == [130, 130]
    assert call.q.dtype == call.pool.dtype == torch.bfloat16


def test_wrong_answers_fail_and_slow_ones_do_not() -> None:
    wrong = replace(GOOD, name="wrong", passed=False)

    assert report(bench=(row(1.0),)).failed == ()
    assert report(cases=(GOOD, wrong)).failed == ("wrong",)
    assert report(graph=(wrong,)).failed == ("wrong",)
    assert report(sanitizer=SanitizerResult(True, False, "invalid read")).failed == ("compute-sanitizer",)


def test_a_nan_is_no_pass() -> None:
    case = LadderCase(dtype="float32")

    assert judged(case, Deviation(1e-7, 1e-7)).passed
    assert not judged(case, Deviation(float("nan"), 0.0)).passed
    assert not judged(case, Deviation(0.0, 1e-4)).passed


def test_a_deviation_counts_a_wrong_infinity() -> None:
    expected = exact(build(LadderCase(dtype="float32", lengths=(0, 3), heads=1)))
    wrong = replace(expected, lse=expected.lse.clone().fill_(0.0))

    assert deviation(expected, expected) == Deviation(0.0, 0.0)
    assert deviation(wrong, expected).lse == float("inf")


def test_the_report_is_json_and_a_table() -> None:
    full = report(bench=(row(1.0, Peer("vllm-triton", 2.0, None), Peer("flashmla", None, "not installed")),))
    parsed = json.loads(json.dumps(full.to_json(), default=str))

    assert parsed["failed"] == []
    assert parsed["bench"][0]["name"] == "B128 L4096 H16 512+64 s_q 1"
    assert parsed["bench"][0]["launch"]["resources"]["registers"] == 200
    assert "0.00 of the copy bandwidth" in parsed["bench"][0]["missed"][0]
    text = table(replace(full, skipped=("B1",)))
    assert "copy 4.00 TB/s" in text
    assert "vllm-triton 2000000 µs, 2.00 × its speed, flashmla (not installed)" in text
    assert "B1: skipped" in text


def test_moving_a_call_keeps_every_tensor() -> None:
    call = build(LadderCase(dtype="float32", causal=False, top_k=8, extra_top_k=4, sinks=True, lengths=(3, 20)))
    there = moved(call, torch.device("meta"))

    assert there.sparse is not None
    assert there.sparse.extra_pool is not None
    assert there.sinks is not None
    assert {there.q.device.type, there.pool.device.type, there.sparse.extra_pool.device.type} == {"meta"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_fault_is_the_environments() -> None:
    with pytest.raises(EnvironmentFault, match="CUDA device"):
        main(["--json", "unused.json"])
    done = subprocess.run(
        [sys.executable, "-m", "mla_convert.decode.device_check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 5
    assert "needs a CUDA device" in done.stderr
