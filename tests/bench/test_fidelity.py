"""The fidelity bench on a tiny model; the bars on made-up outcomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mla_convert.assets.wikipedia import WikipediaSplits
from mla_convert.bench import fidelity as module
from mla_convert.bench.fidelity import BARS, COMPARED, Bar, FidelityReport, FidelityRequest, FidelityRow, run_fidelity
from mla_convert.bench.plan_spec import PlanSpec
from mla_convert.bench.usage import Usage
from mla_convert.errors import InputRefused, UsageFault
from mla_convert.eval.evaluation import Evaluation
from tests.conftest import PicoFactory
from tests.eval.helpers import write_text

PLANS = (PlanSpec("hf", 16, 40), PlanSpec("engine", 8, 12))


@pytest.fixture(scope="module")
def request_of_pico(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory) -> FidelityRequest:
    """A tiny source with two texts."""
    folder = tmp_path_factory.mktemp("bench")
    return FidelityRequest(
        source=str(pico("llama", kv_heads=2)),
        calibration=str(write_text(folder / "calibration.txt", 1500, seed=1)),
        text=str(write_text(folder / "heldout.txt", 1500, seed=2)),
        off_domain=str(write_text(folder / "other.txt", 1500, seed=3)),
        plans=PLANS,
        max_tokens=1024,
        calibration_tokens=1024,
    )


@pytest.fixture(scope="module")
def report(request_of_pico: FidelityRequest, tmp_path_factory: pytest.TempPathFactory) -> FidelityReport:
    """One run of the bench."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_CONVERT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return run_fidelity(request_of_pico, ["mla-convert", "bench"])


def test_every_plan_is_converted_and_measured_from_its_files(report: FidelityReport) -> None:
    found = [row.evaluation.target_cache.numbers_per_token_per_layer for row in report.rows]

    assert found == [(56,) * 4, (20,) * 4]
    assert len({row.evaluation.subjects.canonical_mla_id for row in report.rows}) == 2
    assert len({row.evaluation.figures.source_perplexity for row in report.rows}) == 1
    assert [row.evaluation.source_reused for row in report.rows] == [False, True]


def test_a_narrower_cache_costs_more(report: FidelityReport) -> None:
    wide, narrow = (row.evaluation.figures.kl for row in report.rows)

    assert 0 < wide < narrow


def test_time_and_memory_stand_beside_the_figures(report: FidelityReport) -> None:
    for row in report.rows:
        assert row.convert.seconds > 0
        assert row.evaluate.peak_rss_bytes > 50 << 20


def test_a_model_of_ones_own_has_no_bars(report: FidelityReport) -> None:
    assert {row.bar for row in report.rows} == {None}
    assert report.exit_code == 0


def test_json_holds_each_plan_whole(report: FidelityReport) -> None:
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))

    assert [plan["plan"] for plan in found["plans"]] == ["hf:16+40", "engine:8+12"]
    assert [plan["width"] for plan in found["plans"]] == [56, 20]
    assert found["plans"][0]["evaluation"]["text"]["tokens"] == 1024
    assert found["plans"][0]["off_domain"]["text"]["sha256"] != found["plans"][0]["evaluation"]["text"]["sha256"]
    assert found["environment"]["command"] == ["mla-convert", "bench"]
    assert found["passed"] is True


def outcome(evaluation: Evaluation, ratio: float, bar: Bar | None, off_domain: float | None = None) -> FidelityRow:
    usage = Usage(1.0, 1)
    beside = None if off_domain is None else with_ratio(evaluation, off_domain)
    return FidelityRow(PLANS[0], with_ratio(evaluation, ratio), beside, usage, usage, bar)


def with_ratio(evaluation: Evaluation, ratio: float) -> Evaluation:
    return replace(evaluation, figures=replace(evaluation.figures, ratio=ratio))


@pytest.mark.parametrize(
    ("ratios", "code"), [((1.29999,), 0), ((1.3,), 0), ((1.300001,), 3), ((1.2, 1.31), 3), ((9.0, None), 3)]
)
def test_a_missed_bar_ends_with_three_and_is_not_rounded_away(
    report: FidelityReport, ratios: tuple[float | None, ...], code: int
) -> None:
    evaluation = report.rows[0].evaluation
    rows = tuple(outcome(evaluation, r or 9.0, None if r is None else Bar(1.30)) for r in ratios)

    assert replace(report, rows=rows).exit_code == code


@pytest.mark.parametrize(("off_domain", "passed"), [(1.25, True), (1.2500001, False), (None, True)])
def test_a_bar_off_the_domain_counts_as_well(report: FidelityReport, off_domain: float | None, passed: bool) -> None:
    row = outcome(report.rows[0].evaluation, 1.0, Bar(1.06, 1.25), off_domain)

    assert row.passed is passed


def test_the_bars_are_for_the_default_model_and_texts_only() -> None:
    assert BARS[PlanSpec.parse("hf:48+144")] == Bar(1.30)
    assert BARS[PlanSpec.parse("engine:40+152")] == Bar(1.36)
    assert {plan.width for plan in BARS if plan.refine is not None} == {192, 128, 96}
    assert FidelityRequest().plans == (*COMPARED, *BARS)
    assert FidelityRequest().has_bars
    for fields in ({"source": "x"}, {"calibration": "x"}, {"text": "x"}, {"off_domain": "x"}):
        assert not replace(FidelityRequest(), **fields).has_bars


def test_a_plan_that_does_not_fit_is_refused_before_any_is_run(
    request_of_pico: FidelityRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "convert", lambda *_args, **_options: pytest.fail("a plan was run"))

    with pytest.raises(UsageFault, match="--kv-lora-rank is out of range"):
        run_fidelity(replace(request_of_pico, plans=(PLANS[0], PlanSpec("hf", 16, 400))))
    with pytest.raises(InputRefused, match="full profile"):
        run_fidelity(replace(request_of_pico, plans=(PLANS[0], PlanSpec("full", 16, 40))))


def test_the_real_model_at_half_width(smollm2: Path, wikipedia: WikipediaSplits) -> None:
    """1,024 held-out tokens: far too few for a figure, enough to see that a conversion is no accident."""
    plans = (PlanSpec("engine", 40, 152),)
    report = run_fidelity(FidelityRequest(plans=plans, max_tokens=1024))
    row = report.rows[0]

    assert row.bar == Bar(1.36)
    assert row.off_domain is not None
    assert 1.0 < row.off_domain.figures.ratio < 3.0
    assert row.evaluation.target_cache.numbers_per_token_per_layer == (192,) * 30
    assert row.evaluation.target_cache.bytes_per_token * 2 == row.evaluation.source_cache.bytes_per_token
    assert 1.0 < row.evaluation.figures.ratio < 1.6
    assert row.evaluation.text.names == (str(wikipedia.heldout),)
