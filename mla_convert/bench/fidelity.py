"""How much of a model's quality each plan keeps: convert, reload from the files, evaluate."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mla_convert.assets.smollm2 import DESCRIPTION, smollm2_folder
from mla_convert.assets.wikipedia import write_splits
from mla_convert.bench.plan_spec import PlanSpec
from mla_convert.bench.usage import Usage, UsageMeter
from mla_convert.cache_dir import cache_root
from mla_convert.convert.options import DEFAULT_TOKENS
from mla_convert.convert.planning import make_plan
from mla_convert.convert.run import convert
from mla_convert.errors import CheckFailed
from mla_convert.eval import defaults
from mla_convert.eval.evaluate import EvalOptions, evaluate_target, prepare
from mla_convert.eval.evaluation import Evaluation
from mla_convert.manifests.environment import Environment, capture

BENCH_SCHEMA = "mla-convert/bench-fidelity/v1"

# Perplexity over the source's that must hold for half the cache of SmolLM2-135M on the Wikipedia text.
BARS: Mapping[PlanSpec, float] = {PlanSpec("hf", 48, 144): 1.30, PlanSpec("engine", 40, 152): 1.40}


@dataclass(frozen=True)
class FidelityRequest:
    """What to measure.

    Attributes:
        source: Source checkpoint; None takes SmolLM2-135M-Instruct.
        calibration: Calibration text; None takes the Wikipedia articles set aside for it.
        text: Held-out text; None takes the other Wikipedia articles.
        plans: Plans to compare.
        max_tokens: Tokens of held-out text.
        calibration_tokens: Tokens of calibration text.
        seed: Of every random choice.
    """

    source: str | None = None
    calibration: str | None = None
    text: str | None = None
    plans: tuple[PlanSpec, ...] = tuple(BARS)
    max_tokens: int = defaults.MAX_TOKENS
    calibration_tokens: int = DEFAULT_TOKENS
    seed: int = 0

    @property
    def has_bars(self) -> bool:
        """Whether the bars apply: they are for one model and one text."""
        return self.source is None and self.calibration is None and self.text is None


@dataclass(frozen=True)
class FidelityRow:
    """One plan's outcome.

    Attributes:
        plan: The plan.
        evaluation: Of the written and reloaded files.
        convert: What the conversion took.
        evaluate: What the evaluation took; the first also runs the source unless that is on disk.
        bar: Largest ratio allowed, None where there is no bar.
    """

    plan: PlanSpec
    evaluation: Evaluation
    convert: Usage
    evaluate: Usage
    bar: float | None

    @property
    def passed(self) -> bool | None:
        """Whether the unrounded ratio is within the bar; None without one."""
        return None if self.bar is None else self.evaluation.figures.ratio <= self.bar

    def to_json(self) -> dict[str, object]:
        """The row, with the whole evaluation."""
        return {
            "plan": str(self.plan),
            "profile": self.plan.profile,
            "rope_policy": self.plan.policy,
            "qk_rope_head_dim": self.plan.rope,
            "kv_lora_rank": self.plan.latent,
            "width": self.plan.width,
            "bar": self.bar,
            "passed": self.passed,
            "convert": asdict(self.convert),
            "evaluate": asdict(self.evaluate),
            "evaluation": self.evaluation.to_json(),
        }


@dataclass(frozen=True)
class FidelityReport:
    """All rows.

    Attributes:
        model: The source in words.
        rows: In the order asked for.
        calibration_tokens: Tokens that each conversion was calibrated on.
        environment: Versions, machine and command line.
    """

    model: str
    rows: tuple[FidelityRow, ...]
    calibration_tokens: int
    environment: Environment

    @property
    def exit_code(self) -> int:
        """3 where a bar is missed."""
        return CheckFailed.exit_code if any(row.passed is False for row in self.rows) else 0

    def to_json(self) -> dict[str, object]:
        """The whole report."""
        return {
            "schema_version": BENCH_SCHEMA,
            "model": self.model,
            "calibration_tokens": self.calibration_tokens,
            "passed": self.exit_code == 0,
            "plans": [row.to_json() for row in self.rows],
            "environment": self.environment.model_dump(mode="json"),
        }


def run_fidelity(request: FidelityRequest, command: Sequence[str] | None = None) -> FidelityReport:
    """Convert, reload and evaluate every plan.

    Args:
        request: What to measure.
        command: Command line for the record; the process's own by default.

    Raises:
        UsageFault: For a plan that does not fit the source; before any plan is run.
        InputRefused: For a source or text that cannot be used.
        EnvironmentFault: If the model or the text cannot be downloaded.
        CheckFailed: If a conversion does not compute what it should.
    """
    environment = capture(list(command if command is not None else sys.argv))
    source = request.source or str(smollm2_folder())
    calibration, text = _texts(request)
    options = EvalOptions(max_tokens=request.max_tokens, seed=request.seed)
    prepared = prepare(source, (text,), options)
    jobs = [(plan, plan.options(calibration, request.calibration_tokens, request.seed)) for plan in request.plans]
    for _, wanted in jobs:
        make_plan(prepared.source, wanted)
    rows = []
    for number, (plan, wanted) in enumerate(jobs, start=1):
        print(f"plan {number} of {len(jobs)}: {plan}", file=sys.stderr)
        # One folder at a time: a converted checkpoint is as large as its source.
        with tempfile.TemporaryDirectory(prefix="mla-convert-bench-") as scratch:
            out = Path(scratch) / "converted"
            with UsageMeter() as converting:
                convert(prepared.source, out, wanted, command=environment.command)
            with UsageMeter() as evaluating:
                evaluation = evaluate_target(prepared, out, environment.command)
        bar = BARS.get(plan) if request.has_bars else None
        rows.append(FidelityRow(plan, evaluation, converting.usage, evaluating.usage, bar))
    model = source if request.source else DESCRIPTION
    return FidelityReport(model, tuple(rows), request.calibration_tokens, environment.finish())


def _texts(request: FidelityRequest) -> tuple[str, str]:
    if request.calibration is not None and request.text is not None:
        return request.calibration, request.text
    splits = write_splits(cache_root() / "text")
    return request.calibration or str(splits.calibration), request.text or str(splits.heldout)
