"""`mla-convert bench scaling`: time and memory of a conversion by calibration tokens and by depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mla_convert.cli.common import Debug, JsonFlag, Seed, run_command

if TYPE_CHECKING:
    from rich.console import Console

    from mla_convert.bench.scaling import ScalingPoint, ScalingReport

EXAMPLES = """
mla-convert bench scaling
mla-convert bench scaling --tokens 5120 --tokens 10240 --tokens 40960 --layers 6 --layers 12 --layers 24
mla-convert bench scaling --source SOURCE --calibration train.jsonl --plan hf:16+48 --json
"""
DEFAULT_TOKENS = "5120, 10240, 20480"
DEFAULT_PLAN = "engine:40+152"


def command(
    source: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Source checkpoint.", show_default="SmolLM2-135M-Instruct"),
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(metavar="PATH", help="Calibration text.", show_default="Wikipedia articles")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(metavar="PLAN", help="profile:rope+latent.", show_default=DEFAULT_PLAN)
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Calibration tokens; three times or more, rising.", show_default=DEFAULT_TOKENS),
    ] = None,
    layers: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="First layers of the source; three times or more, rising.",
            show_default="a third, two thirds and all",
        ),
    ] = None,
    seed: Seed = 0,
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Convert at several sizes, and say whether time is linear and memory within its bound.

    Every conversion is a process of its own with an empty cache and a memory budget of nothing. Ends with exit code 3
    if a cost is not linear, memory exceeds the bound, or the closed form of the default model takes too long.
    """

    def body() -> ScalingResult:
        from mla_convert.bench.plan_spec import PlanSpec
        from mla_convert.bench.scaling import ScalingRequest, run_scaling

        standard = ScalingRequest()
        request = ScalingRequest(
            source=source,
            calibration=calibration,
            plan=PlanSpec.parse(plan) if plan else standard.plan,
            tokens=tuple(tokens) if tokens else standard.tokens,
            layers=tuple(layers) if layers else None,
            seed=seed,
        )
        return ScalingResult(run_scaling(request))

    run_command(json_output, body, debug=debug)


@dataclass(frozen=True)
class ScalingResult:
    """A report and how it is printed."""

    report: ScalingReport

    @property
    def exit_code(self) -> int:
        """3 where something does not hold."""
        return self.report.exit_code

    def to_json(self) -> Mapping[str, object]:
        """See `ScalingReport.to_json`."""
        return self.report.to_json()

    def render(self, console: Console) -> None:
        """Conversions, then the ratios that they stand for, and under them the conditions."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        for heading in ("layers", "tokens", "forward", "statistics", "closed form", "reload", "memory MB", "bound MB"):
            table.add_column(heading, justify="right", no_wrap=True)
        for point in self.report.points:
            table.add_row(*_cells(point))
        console.print(table)
        for line in self._conclusions():
            console.print(Text(line), soft_wrap=True)

    def _conclusions(self) -> list[str]:
        report = self.report
        found = [
            f"{line.what}: {' : '.join(f'{ratio:.2f}' for ratio in line.unit_ratios)} a unit, "
            f"{line.farthest:.1%} off a straight line: {'linear' if line.linear else 'NOT LINEAR'}"
            for line in report.lines
        ]
        if report.closed_form_bar is not None:
            seconds = report.points[0].phases.closed_form.wall
            verdict = "pass" if report.closed_form_passed else "FAIL"
            found.append(f"closed form by the clock: {seconds:.1f} s, at most {report.closed_form_bar:.0f}: {verdict}")
        return [
            *found,
            f"model   {report.model}, plan {report.plan}",
            "forward to reload: CPU seconds of all threads; memory: peak private bytes above those before any work;",
            "bound: embeddings + two layers + statistics, states on disk; a unit: one token or one layer, first = 1",
        ]


def _cells(point: ScalingPoint) -> tuple[str, ...]:
    phases = (point.phases.forward, point.phases.statistics, point.phases.closed_form, point.phases.reload_check)
    memory = "unknown" if point.memory_bytes is None else f"{point.memory_bytes / 1e6:.0f}"
    mark = " FAIL" if point.within_bound is False else ""
    return (
        str(point.layers),
        f"{point.tokens:,}",
        *(f"{seconds.cpu:.1f}" for seconds in phases),
        memory,
        f"{point.bound.total / 1e6:.0f}{mark}",
    )
