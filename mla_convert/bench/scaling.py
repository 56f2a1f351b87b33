"""What a conversion costs, by calibration tokens and by depth: is it linear, and how much memory does it take?"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from mla_convert.assets.smollm2 import DESCRIPTION, smollm2_folder
from mla_convert.assets.wikipedia import write_splits
from mla_convert.bench.plan_spec import PlanSpec
from mla_convert.bench.steps import Step, run_step
from mla_convert.bench.truncate import truncate_source
from mla_convert.cache_dir import cache_root
from mla_convert.convert.checkpoint import SourceCheckpoint, open_source
from mla_convert.convert.memory import MemoryBound, memory_bound
from mla_convert.convert.phases import PhaseSeconds, Seconds
from mla_convert.convert.planning import make_plan
from mla_convert.errors import CheckFailed, UsageFault
from mla_convert.manifests.environment import Environment, capture

SCALING_SCHEMA = "mla-convert/bench-scaling/v1"
# How far a cost may lie from a straight line over the sizes, as a share of itself.
BAND = 0.15
# Seconds of the closed form on SmolLM2-135M beyond the calibration forward passes.
CLOSED_FORM_BAR = 20.0
TOKENS = (5120, 10240, 20480)
PLAN = PlanSpec("engine", 40, 152)
# With no budget all states are on disk, and the written model is never loaded whole.
BUDGET_BYTES = 0


@dataclass(frozen=True)
class ScalingRequest:
    """What to measure.

    Attributes:
        source: Source checkpoint; None takes SmolLM2-135M-Instruct.
        calibration: Calibration text; None takes Wikipedia articles.
        plan: The plan of every conversion.
        tokens: Numbers of calibration tokens, at full depth; at least three, rising.
        layers: Numbers of layers, at the fewest tokens; None takes a third, two thirds and all.
        seed: Of every random choice.
    """

    source: str | None = None
    calibration: str | None = None
    plan: PlanSpec = PLAN
    tokens: tuple[int, ...] = TOKENS
    layers: tuple[int, ...] | None = None
    seed: int = 0


@dataclass(frozen=True)
class ScalingPoint:
    """One conversion.

    Attributes:
        layers: Of the source.
        tokens: Calibration tokens that the text gave.
        phases: Time by phase.
        step: The command with its time and memory.
        bound: What it may take above the baseline.
        baseline_bytes: Private memory of the same command before any work (`--dry-run`); None where unknown.
    """

    layers: int
    tokens: int
    phases: PhaseSeconds
    step: Step
    bound: MemoryBound
    baseline_bytes: int | None

    @property
    def calibration_cpu(self) -> float:
        """Forward passes and statistics, CPU seconds."""
        return self.phases.forward.cpu + self.phases.statistics.cpu

    @property
    def memory_bytes(self) -> int | None:
        """Peak private memory above the baseline."""
        peak = self.step.usage.peak_private_bytes
        return None if peak is None or self.baseline_bytes is None else peak - self.baseline_bytes

    @property
    def within_bound(self) -> bool | None:
        """Whether the memory is within the bound; None where it is unknown."""
        return None if self.memory_bytes is None else self.memory_bytes <= self.bound.total

    def to_json(self) -> dict[str, object]:
        """The point with its command."""
        return {
            "layers": self.layers,
            "tokens": self.tokens,
            "phase_seconds": asdict(self.phases),
            "peak_private_bytes": self.step.usage.peak_private_bytes,
            "baseline_bytes": self.baseline_bytes,
            "memory_bytes": self.memory_bytes,
            "memory_bound": {**asdict(self.bound), "total": self.bound.total},
            "within_bound": self.within_bound,
            **self.step.to_json(),
        }


@dataclass(frozen=True)
class Line:
    """The straight line nearest to a cost over its sizes, and how far the cost is from it.

    Attributes:
        what: Which cost, over what.
        sizes: Tokens or layers.
        costs: CPU seconds.
        fixed: The line's cost at size zero.
        per_unit: Its cost of one more token or layer.
        farthest: Largest distance from it, as a share of the cost there.
    """

    what: str
    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    fixed: float
    per_unit: float
    farthest: float

    @property
    def linear(self) -> bool:
        """Within the band; a cost that grows faster than its size also has a line that starts below zero."""
        return self.farthest <= BAND and self.fixed >= -BAND * self.costs[0]

    @property
    def unit_ratios(self) -> tuple[float, ...]:
        """Cost of one unit over that at the smallest size."""
        units = [cost / size for cost, size in zip(self.costs, self.sizes, strict=True)]
        return tuple(unit / units[0] for unit in units)

    def to_json(self) -> dict[str, object]:
        """Fields and verdict."""
        return {**asdict(self), "unit_ratios": self.unit_ratios, "band": BAND, "linear": self.linear}


def fit_line(what: str, sizes: Sequence[int], costs: Sequence[float]) -> Line:
    """Least squares over at least three sizes."""
    mean_size, mean_cost = sum(sizes) / len(sizes), sum(costs) / len(costs)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    slope = sum((size - mean_size) * (cost - mean_cost) for size, cost in zip(sizes, costs, strict=True)) / spread
    fixed = mean_cost - slope * mean_size
    distances = [abs(fixed + slope * size - cost) / cost for size, cost in zip(sizes, costs, strict=True)]
    return Line(what, tuple(sizes), tuple(costs), fixed, slope, max(distances))


@dataclass(frozen=True)
class ScalingReport:
    """All conversions and what they say.

    Attributes:
        model: The source in words.
        plan: Plan of every conversion.
        points: By tokens, then by layers; the one of both is in both.
        lines: One for each cost.
        closed_form_bar: Seconds allowed to the closed form at the fewest tokens, None where there is no bar.
        environment: Versions, machine and command line.
    """

    model: str
    plan: PlanSpec
    points: tuple[ScalingPoint, ...]
    lines: tuple[Line, ...]
    closed_form_bar: float | None
    environment: Environment

    @property
    def closed_form_passed(self) -> bool | None:
        """Whether the bar holds, at the fewest tokens and full depth; None without one."""
        return None if self.closed_form_bar is None else self.points[0].phases.closed_form.wall <= self.closed_form_bar

    @property
    def exit_code(self) -> int:
        """3 where a cost is not linear, memory exceeds its bound, or the bar is missed."""
        verdicts = [line.linear for line in self.lines]
        verdicts += [point.within_bound is not False for point in self.points]
        verdicts.append(self.closed_form_passed is not False)
        return 0 if all(verdicts) else CheckFailed.exit_code

    def to_json(self) -> dict[str, object]:
        """The whole report."""
        return {
            "schema_version": SCALING_SCHEMA,
            "model": self.model,
            "plan": str(self.plan),
            "points": [point.to_json() for point in self.points],
            "lines": [line.to_json() for line in self.lines],
            "closed_form_bar": self.closed_form_bar,
            "closed_form_passed": self.closed_form_passed,
            "passed": self.exit_code == 0,
            "environment": self.environment.model_dump(mode="json"),
        }


def run_scaling(request: ScalingRequest, command: Sequence[str] | None = None) -> ScalingReport:
    """Convert at every size, each in a process of its own with an empty cache.

    Args:
        request: What to measure.
        command: Command line for the record; the process's own by default.

    Raises:
        UsageFault: For fewer than three sizes, or sizes or a plan that do not fit the source; before any conversion.
        InputRefused: For a source or text that cannot be used.
        EnvironmentFault: If the model or the text cannot be downloaded, or the disk is too small.
        CheckFailed: If a conversion does not compute what it should.
    """
    environment = capture(list(command if command is not None else sys.argv))
    source = open_source(request.source or str(smollm2_folder()))
    calibration = request.calibration or str(write_splits(cache_root() / "text").calibration)
    depths = request.layers or tuple(source.num_layers * third // 3 for third in (1, 2, 3))
    _check_sizes("--tokens", request.tokens, None)
    _check_sizes("--layers", depths, source.num_layers)
    for tokens in request.tokens:
        make_plan(source, request.plan.options(calibration, tokens, request.seed))
    measure = _Measurement(source, calibration, request)
    by_tokens = [measure.at(source.num_layers, tokens) for tokens in request.tokens]
    by_layers = [
        by_tokens[0] if layers == source.num_layers else measure.at(layers, request.tokens[0]) for layers in depths
    ]
    lines = _lines(by_tokens, by_layers)
    points = (*by_tokens, *(point for point in by_layers if point is not by_tokens[0]))
    bar = CLOSED_FORM_BAR if request == ScalingRequest() else None
    model = request.source or DESCRIPTION
    return ScalingReport(model, request.plan, points, lines, bar, environment.finish())


def _check_sizes(option: str, sizes: Sequence[int], largest: int | None) -> None:
    rising = all(a < b for a, b in pairwise(sizes)) and sizes[0] >= 1
    if len(sizes) < 3 or not rising or (largest is not None and sizes[-1] > largest):
        limit = "" if largest is None else f" up to {largest}"
        raise UsageFault(f"{option} needs other sizes", expected=f"three or more, rising{limit}", found=str(sizes))


def _lines(by_tokens: Sequence[ScalingPoint], by_layers: Sequence[ScalingPoint]) -> tuple[Line, ...]:
    costs: dict[str, Callable[[ScalingPoint], float]] = {
        "calibration": lambda point: point.calibration_cpu,
        "closed form": lambda point: point.phases.closed_form.cpu,
        "reload check": lambda point: point.phases.reload_check.cpu,
    }
    tokens, layers = [point.tokens for point in by_tokens], [point.layers for point in by_layers]
    calibration = costs["calibration"]
    return (
        fit_line("calibration over tokens", tokens, [calibration(point) for point in by_tokens]),
        *(
            fit_line(f"{name} over layers", layers, [cost(point) for point in by_layers])
            for name, cost in costs.items()
        ),
    )


@dataclass(frozen=True)
class _Measurement:
    """Conversions of one source at several sizes."""

    source: SourceCheckpoint
    calibration: str
    request: ScalingRequest

    def at(self, layers: int, tokens: int) -> ScalingPoint:
        """One conversion, of a source cut to size where it has more layers."""
        with tempfile.TemporaryDirectory(prefix="mla-convert-scaling-") as scratch:
            folder = self.source.location.folder
            if layers < self.source.num_layers:
                folder = truncate_source(self.source, layers, Path(scratch) / "source")
            arguments = self._arguments(folder, Path(scratch) / "out", tokens)
            variables = {"MLA_CONVERT_CACHE": str(Path(scratch) / "cache")}
            idle = run_step("convert, nothing yet", [*arguments, "--dry-run"], variables)
            step = run_step("convert", arguments, variables)
        seconds = {name: Seconds(**found) for name, found in step.result["phase_seconds"].items()}
        measured = int(step.result["calibration"]["tokens"])
        return ScalingPoint(
            layers=layers,
            tokens=measured,
            phases=PhaseSeconds(**seconds),
            step=step,
            bound=memory_bound(self.source, measured, BUDGET_BYTES),
            baseline_bytes=idle.usage.peak_private_bytes,
        )

    def _arguments(self, folder: Path, out: Path, tokens: int) -> list[str]:
        plan = self.request.plan
        return [
            *("convert", str(folder), str(out), "--profile", plan.profile, "--rope-policy", plan.policy),
            *("--qk-rope-head-dim", str(plan.rope), "--kv-lora-rank", str(plan.latent)),
            *("--calibration", self.calibration, "--calibration-tokens", str(tokens)),
            *("--seed", str(self.request.seed), "--memory-budget", str(BUDGET_BYTES), "--json"),
        ]
