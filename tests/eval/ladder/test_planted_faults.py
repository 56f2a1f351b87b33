"""Faults that are planted must be named, stage and layer; a right conversion must raise no alarm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_convert.decode.absorbed_module import AbsorbedOptions, use_absorbed
from mla_convert.decode.receipt import ReceiptBook
from mla_convert.eval.ladder.measure import measure_ladder, measure_live
from mla_convert.eval.ladder.target_layers import TargetLayers
from mla_convert.eval.loading import load_model
from mla_convert.eval.serving import NEVER_EXPAND, Served
from mla_convert.eval.source_states import source_states
from tests.conftest import PicoFactory
from tests.eval.ladder.cases import PAGE, PREFILL, RIGHT, SEQ_LEN, Case, make_case
from tests.eval.ladder.faults import FILE_FAULTS, FLOAT32_ONLY, RUN_FAULTS, damaged_copy


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_conversion_raises_no_alarm(name: str, pico: PicoFactory, tmp_path: Path) -> None:
    case = make_case(pico, tmp_path, *RIGHT[name])

    section = measure_ladder(case.context)

    assert section.findings == ()
    assert len(section.layers) == len(section.cache_rows) == 3
    lossless = RIGHT[name][1].lossless
    assert (max(layer.output_error for layer in section.layers) < 1e-4) == lossless
    assert all(rows.explanation is None and rows.width == rows.expected_width for rows in section.cache_rows)


@pytest.mark.parametrize("name", FILE_FAULTS)
def test_a_fault_in_the_files_is_named(name: str, lossy_case: Case, tmp_path: Path) -> None:
    fault = FILE_FAULTS[name]
    folder = damaged_copy(lossy_case.context.target, tmp_path / "damaged", fault.change)

    found = measure_ladder(lossy_case.at(folder)).findings

    assert (fault.stage, fault.layer) in [(item.stage, item.layer) for item in found], found
    assert {item.layer for item in found} == {fault.layer}, found
    if not name.startswith("noise of a thousandth in kv_b"):  # which holds keys and values
        assert len(found) == 1, found


@pytest.mark.parametrize("name", sorted(FILE_FAULTS.keys() - FLOAT32_ONLY))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_fault_in_files_of_half_precision_is_named(
    dtype: str, name: str, half_cases: dict[str, Case], tmp_path: Path
) -> None:
    fault, case = FILE_FAULTS[name], half_cases[dtype]
    folder = damaged_copy(case.context.target, tmp_path / "damaged", fault.change)

    found = measure_ladder(case.at(folder)).findings

    assert (fault.stage, fault.layer) in [(item.stage, item.layer) for item in found], found
    assert {item.layer for item in found} == {fault.layer}, found


@pytest.mark.parametrize("name", RUN_FAULTS)
def test_a_fault_of_the_running_model_is_named(name: str, lossy_case: Case) -> None:
    fault, context = RUN_FAULTS[name], lossy_case.context
    prepared = context.prepared
    states = source_states(prepared.source, prepared.digests, prepared.windows)
    target = TargetLayers.open(context.target, context.manifest)
    model = load_model(context.target)
    if fault.model is not None:
        fault.model(model)
    options = AbsorbedOptions(page_size=PAGE, expand_from=NEVER_EXPAND)
    with use_absorbed(model, fault.decoder or "torch", options) as handle:
        running = Served(model, "torch", handle, ReceiptBook())
        found = measure_live(running, target, states, prepared.windows.ids[0], PREFILL).findings

    first = found[0]
    assert (first.stage, first.layer) == (fault.stage, fault.layer), found
    assert first.what.startswith(fault.says)
    if fault.layer == 1:
        assert {item.layer for item in found} <= {1, None}


def test_without_a_fault_the_same_run_is_clean(lossy_case: Case) -> None:
    context = lossy_case.context
    prepared = context.prepared
    states = source_states(prepared.source, prepared.digests, prepared.windows)
    target = TargetLayers.open(context.target, context.manifest)
    model = load_model(context.target)
    with use_absorbed(model, "torch", AbsorbedOptions(page_size=PAGE, expand_from=NEVER_EXPAND)) as handle:
        found = measure_live(Served(model, "torch", handle, ReceiptBook()), target, states, prepared.windows.ids[0], 20)

    assert found.findings == ()
    assert len(found.drift.kl) == SEQ_LEN - PREFILL
    assert found.drift.kl[0] >= 0
    assert torch.tensor(found.drift.kl).mean().item() == pytest.approx(found.drift.one_pass_kl, rel=1e-3)
