"""How much of a model's quality each plan keeps: convert, reload from the files, evaluate."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mla_convert.assets.pydoc_topics import write_topic_splits
from mla_convert.assets.smollm2 import DESCRIPTION, smollm2_folder
from mla_convert.assets.wikipedia import write_splits
from mla_convert.bench.plan_spec import PlanSpec
from mla_convert.bench.usage import Usage, UsageMeter
from mla_convert.cache_dir import cache_root
from mla_convert.convert.options import DEFAULT_TOKENS, REFINE_CALIBRATION_TOKENS
from mla_convert.convert.planning import make_plan
from mla_convert.convert.run import convert
from mla_convert.errors import CheckFailed
from mla_convert.eval import defaults
from mla_convert.eval.evaluate import EvalOptions, evaluate_target, prepare
from mla_convert.eval.evaluation import Evaluation
from mla_convert.manifests.environment import Environment, capture

BENCH_SCHEMA = "mla-convert/bench-fidelity/v2"


@dataclass(frozen=True)
class Bar:
    """Largest perplexity over the source's.

    Attributes:
        ratio: On the held-out text.
        off_domain: On a kind of text that calibration has not seen; None where there is no bar.
    """

    ratio: float
    off_domain: float | None = None


# Half, a third and a quarter of the cache of SmolLM2-135M, on the Wikipedia text and the reference of Python.
BARS: Mapping[PlanSpec, Bar] = {
    PlanSpec("hf", 48, 144): Bar(1.30),
    PlanSpec("engine", 40, 152): Bar(1.36),
    PlanSpec("engine", 40, 88): Bar(2.3),
    PlanSpec("engine", 32, 64): Bar(4.3),
    PlanSpec("engine", 40, 152, refine="e2e", own_text=True): Bar(1.06, 1.25),
    PlanSpec("engine", 40, 88, refine="e2e"): Bar(1.22),
    PlanSpec("engine", 32, 64, refine="e2e"): Bar(1.5),
}
# The published methods at half the cache, and the refinement in its parts.
COMPARED: tuple[PlanSpec, ...] = (
    PlanSpec("hf", 32, 160, recipe="transmla"),
    PlanSpec("hf", 64, 128, recipe="transmla"),
    PlanSpec("hf", 32, 160, recipe="care"),
    PlanSpec("hf", 48, 144, recipe="mha2mla"),
    PlanSpec("hf", 48, 144, recipe="elitekv"),
    PlanSpec("hf", 32, 160, recipe="x-ecomla"),
    PlanSpec("engine", 40, 152, refine="block"),
)
OFF_DOMAIN_TOKENS = 4096


@dataclass(frozen=True)
class FidelityRequest:
    """What to measure.

    Attributes:
        source: Source checkpoint; None takes SmolLM2-135M-Instruct.
        calibration: Calibration text; None takes the Wikipedia articles set aside for it.
        text: Held-out text; None takes the other Wikipedia articles.
        off_domain: Text of another kind to measure on as well; None takes the language reference of the running
            Python where `text` is None too, and otherwise measures on nothing else.
        plans: Plans to compare.
        max_tokens: Tokens of held-out text.
        calibration_tokens: Tokens of calibration text.
        refine_calibration_tokens: The same of plans that are refined.
        seed: Of every random choice.
    """

    source: str | None = None
    calibration: str | None = None
    text: str | None = None
    off_domain: str | None = None
    plans: tuple[PlanSpec, ...] = (*COMPARED, *BARS)
    max_tokens: int = defaults.MAX_TOKENS
    calibration_tokens: int = DEFAULT_TOKENS
    refine_calibration_tokens: int = REFINE_CALIBRATION_TOKENS
    seed: int = 0

    @property
    def has_bars(self) -> bool:
        """Whether the bars apply: they are for one model and one text."""
        return self.source is None and self.calibration is None and self.text is None and self.off_domain is None


@dataclass(frozen=True)
class FidelityRow:
    """One plan's outcome.

    Attributes:
        plan: The plan.
        evaluation: Of the written and reloaded files.
        off_domain: The same on text of another kind, None without one.
        convert: What the conversion took.
        evaluate: What the evaluation took; the first also runs the source unless that is on disk.
        bar: Largest ratios allowed, None where there is no bar.
    """

    plan: PlanSpec
    evaluation: Evaluation
    off_domain: Evaluation | None
    convert: Usage
    evaluate: Usage
    bar: Bar | None

    @property
    def passed(self) -> bool | None:
        """Whether the unrounded ratios are within the bar; None without one."""
        if self.bar is None:
            return None
        held = self.evaluation.figures.ratio <= self.bar.ratio
        if self.bar.off_domain is not None and self.off_domain is not None:
            held = held and self.off_domain.figures.ratio <= self.bar.off_domain
        return held

    def to_json(self) -> dict[str, object]:
        """The row, with the whole evaluation."""
        return {
            "plan": str(self.plan),
            "profile": self.plan.profile,
            "rope_policy": self.plan.policy,
            "recipe": self.plan.recipe,
            "refine": self.plan.refine,
            "qk_rope_head_dim": self.plan.rope,
            "kv_lora_rank": self.plan.latent,
            "width": self.plan.width,
            "bar": None if self.bar is None else asdict(self.bar),
            "passed": self.passed,
            "convert": asdict(self.convert),
            "evaluate": asdict(self.evaluate),
            "evaluation": self.evaluation.to_json(),
            "off_domain": None if self.off_domain is None else self.off_domain.to_json(),
        }


@dataclass(frozen=True)
class FidelityReport:
    """All rows.

    Attributes:
        model: The source in words.
        rows: In the order asked for.
        calibration_tokens: Tokens that each closed form was calibrated on.
        refine_calibration_tokens: The same of refined plans.
        environment: Versions, machine and command line.
    """

    model: str
    rows: tuple[FidelityRow, ...]
    calibration_tokens: int
    refine_calibration_tokens: int
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
            "refine_calibration_tokens": self.refine_calibration_tokens,
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
    calibration, text, other = _texts(request)
    prepared = prepare(source, (text,), EvalOptions(max_tokens=request.max_tokens, seed=request.seed))
    off_domain = None
    if other is not None:
        tokens = min(request.max_tokens, OFF_DOMAIN_TOKENS)
        off_domain = prepare(prepared.source, (other,), EvalOptions(max_tokens=tokens, seed=request.seed))
    jobs = [(plan, plan.options(calibration, _tokens(request, plan), request.seed)) for plan in request.plans]
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
                beside = None if off_domain is None else evaluate_target(off_domain, out, environment.command)
        bar = BARS.get(plan) if request.has_bars else None
        rows.append(FidelityRow(plan, evaluation, beside, converting.usage, evaluating.usage, bar))
        print(f"  {_ratios(rows[-1])}", file=sys.stderr)
    model = source if request.source else DESCRIPTION
    return FidelityReport(
        model=model,
        rows=tuple(rows),
        calibration_tokens=request.calibration_tokens,
        refine_calibration_tokens=request.refine_calibration_tokens,
        environment=environment.finish(),
    )


def _ratios(row: FidelityRow) -> str:
    """One finished row in short, since all of them take long."""
    beside = "" if row.off_domain is None else f", off domain {row.off_domain.figures.ratio:.4f}"
    return f"perplexity over the source's {row.evaluation.figures.ratio:.4f}{beside}"


def _tokens(request: FidelityRequest, plan: PlanSpec) -> int:
    return request.calibration_tokens if plan.refine is None else request.refine_calibration_tokens


def _texts(request: FidelityRequest) -> tuple[str, str, str | None]:
    """Calibration, held-out and off-domain text."""
    off_domain = request.off_domain
    if off_domain is None and request.text is None:
        off_domain = str(write_topic_splits(cache_root() / "text").heldout)
    if request.calibration is not None and request.text is not None:
        return request.calibration, request.text, off_domain
    splits = write_splits(cache_root() / "text")
    return request.calibration or str(splits.calibration), request.text or str(splits.heldout), off_domain
