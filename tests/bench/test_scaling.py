"""The scaling bench on a tiny model; lines and verdicts on made-up costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mla_convert.bench import scaling as module
from mla_convert.bench.plan_spec import PlanSpec
from mla_convert.bench.scaling import ScalingPoint, ScalingReport, ScalingRequest, fit_line, run_scaling
from mla_convert.bench.steps import Step, run_step
from mla_convert.bench.usage import Usage
from mla_convert.cli import bench_scaling
from mla_convert.convert.memory import MemoryBound
from mla_convert.convert.phases import PhaseSeconds, Seconds
from mla_convert.errors import UsageFault
from mla_convert.manifests.environment import capture
from tests.conftest import PicoFactory
from tests.eval.helpers import write_text

SIZES = (10, 20, 30)


@pytest.mark.parametrize(
    ("cost", "linear"),
    [
        (lambda n: n, True),
        (lambda n: 5 + n, True),
        (lambda n: 100 + 0 * n, True),
        (lambda n: n * (1.05 if n == 20 else 1), True),
        (lambda n: n**2, False),
        (lambda n: n**1.3, False),
        (lambda n: n * (1.5 if n == 20 else 1), False),
    ],
    ids=["proportional", "fixed part", "constant", "noise", "quadratic", "power 1.3", "a jump"],
)
def test_a_cost_that_grows_faster_than_its_size_is_not_linear(cost: Any, linear: bool) -> None:
    line = fit_line("cost", SIZES, [float(cost(n)) for n in SIZES])

    assert line.linear is linear


def test_a_line_has_its_fixed_part_and_its_slope() -> None:
    line = fit_line("cost", SIZES, [25.0, 45.0, 65.0])

    assert (line.fixed, line.per_unit, line.farthest) == (5.0, 2.0, 0.0)
    assert line.unit_ratios == (1.0, 2.25 / 2.5, 65 / 30 / 2.5)


def point(closed_form: float = 1.0, peak: int | None = 50, baseline: int | None = 10) -> ScalingPoint:
    phases = PhaseSeconds(Seconds(1, 1), Seconds(2, 2), Seconds(closed_form, closed_form), Seconds(1, 1))
    step = Step("convert", ("convert",), {}, Usage(5.0, 100, peak))
    return ScalingPoint(4, 512, phases, step, MemoryBound(10, 20, 10, 0), baseline)


def report(one: ScalingPoint, costs: tuple[float, ...] = (1, 2, 3), bar: float | None = 20.0) -> ScalingReport:
    line = fit_line("cost", SIZES, costs)
    return ScalingReport("model", PlanSpec("hf", 16, 24), (one,), (line,), bar, capture(["test"]).finish())


def test_each_verdict_alone_fails_the_bench() -> None:
    assert report(point()).exit_code == 0
    assert report(point(), costs=(1, 4, 9)).exit_code == 3
    assert report(point(peak=51)).exit_code == 3
    assert report(point(closed_form=20.1)).exit_code == 3
    assert report(point(closed_form=20.1), bar=None).exit_code == 0
    assert report(point(peak=None)).exit_code == 0
    assert point(peak=51).memory_bytes == 41
    assert point(baseline=None).within_bound is None


def test_sizes_are_refused_before_any_conversion(pico: PicoFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "run_step")
    request = ScalingRequest(str(pico(kv_heads=2)), "unread.txt", PlanSpec("hf", 16, 24), (64, 128, 256), (1, 2, 4))

    for wrong in ({"tokens": (512, 1024)}, {"tokens": (512, 512, 1024)}, {"layers": (1, 2, 5)}, {"layers": (0, 1, 2)}):
        with pytest.raises(UsageFault, match="needs other sizes"):
            run_scaling(replace(request, **wrong))  # type: ignore[arg-type]
    with pytest.raises(UsageFault):
        run_scaling(replace(request, tokens=(512, 1024, 2048), plan=PlanSpec("hf", 16, 999)))


def test_a_tiny_model_is_measured_at_every_size(
    pico: PicoFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real commands for the smallest size; the others are stood in for, since each costs seconds of imports."""
    steps: list[Step] = []

    def once(name: str, arguments: list[str], variables: dict[str, str]) -> Step:
        asked = arguments[arguments.index("--calibration-tokens") + 1]
        known = [step for step in steps if step.name == name]
        step = known[0] if known else run_step(name, arguments, variables)
        if name == "convert":
            step.result["calibration"]["tokens"] = int(asked)
            config = json.loads((Path(arguments[1]) / "config.json").read_text())
            steps.append(replace(step, result={**step.result, "layers": config["num_hidden_layers"]}))
        else:
            steps.append(step)
        return step

    monkeypatch.setattr(module, "run_step", once)
    request = ScalingRequest(
        str(pico(kv_heads=2)),
        str(write_text(tmp_path / "text.txt", 2000, seed=1)),
        PlanSpec("hf", 16, 24),
        (512, 1024, 1536),
        (1, 2, 4),
    )

    found = run_scaling(request, ["mla-convert"])

    assert [(one.tokens, one.layers) for one in found.points] == [(512, 4), (1024, 4), (1536, 4), (512, 1), (512, 2)]
    assert [step.result["layers"] for step in steps if step.name == "convert"] == [4, 4, 4, 1, 2]
    first = found.points[0]
    assert min(first.phases.forward.cpu, first.phases.statistics.cpu, first.phases.closed_form.cpu) > 0
    assert first.bound.states == 0
    assert first.step.result["reload_check"]["whole_model"] is False
    assert found.closed_form_bar is None
    assert [line.what.split(" over ")[1] for line in found.lines] == ["tokens", "layers", "layers", "layers"]
    assert json.dumps(found.to_json())


def test_the_help_says_the_defaults() -> None:
    assert ", ".join(map(str, module.TOKENS)) == bench_scaling.DEFAULT_TOKENS
    assert str(module.PLAN) == bench_scaling.DEFAULT_PLAN


def test_what_is_printed_says_ratios_and_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(one: ScalingReport) -> str:
        bench_scaling.ScalingResult(one).render(Console(width=100))
        return capsys.readouterr().out

    good = printed(report(point()))
    bad = printed(report(point(closed_form=20.1, peak=51), costs=(1, 4, 9)))

    assert "cost: 1.00 : 1.00 : 1.00 a unit, 0.0% off a straight line: linear" in good
    assert "closed form by the clock: 1.0 s, at most 20: pass" in good
    assert "cost: 1.00 : 2.00 : 3.00 a unit, 33.3% off a straight line: NOT LINEAR" in bad
    assert "closed form by the clock: 20.1 s, at most 20: FAIL" in bad
    assert "0 FAIL" in bad
    assert "FAIL" not in good
    assert "unknown" in printed(report(point(peak=None)))
