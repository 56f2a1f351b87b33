"""The decode bench: bars that can be missed, bytes that are counted, and a run on tiny models."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from mla_convert.bench import decode as module
from mla_convert.bench.decode import DecodeRequest, DecodeRow, SubjectReport, run_decode
from mla_convert.bench.decode_subjects import Subject

ROW = DecodeRow(
    history=4096,
    stock_over_absorbed=4.0,
    source_over_absorbed=0.5,
    cache_bytes=1000,
    peak_cache_bytes=1100,
    row_bytes=900,
    padding_bytes=100,
    source_cache_bytes=2000,
)
REPORT = SubjectReport(
    name="subject",
    description="none",
    rows=(ROW, replace(ROW, history=16384, stock_over_absorbed=9.0)),
    prefill_over_stock=1.0,
    receipts={},
)


def test_bars_that_hold_say_nothing() -> None:
    assert REPORT.missed == ()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rows": (replace(ROW, stock_over_absorbed=2.9), REPORT.rows[1])}, "2.90 at 4096, bar 3"),
        ({"rows": (ROW, replace(ROW, stock_over_absorbed=3.9))}, "does not grow"),
        ({"prefill_over_stock": 1.06}, "prefill takes 1.060"),
        ({"rows": (replace(ROW, cache_bytes=1001), REPORT.rows[1])}, "1001 bytes, 900 \\+ 100"),
    ],
)
def test_a_bar_that_is_missed_is_named(changed: dict[str, object], said: str) -> None:
    (line,) = replace(REPORT, **changed).missed  # type: ignore[arg-type]
    assert re.search(said, line)


def tiny_subject() -> Subject:
    common = {
        "hidden_size": 32,
        "intermediate_size": 16,
        "vocab_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(0)
    mla = DeepseekV3Config(
        **common,  # type: ignore[arg-type]
        num_key_value_heads=4,
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        q_lora_rank=None,
        first_k_dense_replace=2,
    )
    gqa = LlamaConfig(**common, num_key_value_heads=2, head_dim=8)  # type: ignore[arg-type]
    return Subject("tiny", "tiny", LlamaForCausalLM(gqa).eval(), DeepseekV3ForCausalLM(mla).eval())


def test_a_run_counts_the_bytes_of_both_caches_and_says_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "layer_subject", lambda _seed: tiny_subject())
    request = DecodeRequest(subjects=("layer",), histories=(70, 130), repeats=2, prefill_tokens=20)

    report = run_decode(request)

    (subject,) = report.subjects
    assert [row.history for row in subject.rows] == [70, 130]
    for row, pages in zip(subject.rows, (2, 3), strict=True):
        assert row.row_bytes == row.history * 16 * 4 * 2
        assert row.cache_bytes == pages * 64 * 16 * 4 * 2 == row.row_bytes + row.padding_bytes
        assert row.source_cache_bytes == row.history * 2 * 2 * 8 * 4 * 2
        assert min(row.stock_over_absorbed, row.source_over_absorbed) > 0
    # A step of each layer in every turn, the first included.
    assert subject.receipts["calls"] == 2 * 2 * 3
    written = report.to_json()
    assert written["schema"] == module.DECODE_SCHEMA
