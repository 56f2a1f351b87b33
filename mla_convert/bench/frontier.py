"""Quality against cache bytes: the splits of each width with what they are predicted and measured to lose."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mla_convert.bench.frontier_report import FrontierPoint, FrontierReport, SourcePoint, TextUsed
from mla_convert.convert.budget import parse_widths, width_limits
from mla_convert.convert.calibration_run import gather
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.choose import Candidate, Search, least, refuse_unpredictable, split_plans
from mla_convert.convert.inspection import source_cache, target_cache
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.receipts import SourceDigests, digest_of_source, prediction_record
from mla_convert.convert.recipes import RECIPES, apply_recipe
from mla_convert.convert.run import convert
from mla_convert.errors import UsageFault
from mla_convert.eval import defaults
from mla_convert.eval.evaluate import evaluate_target
from mla_convert.eval.evaluation import Evaluation
from mla_convert.eval.held_out import HeldOut
from mla_convert.eval.quality import source_perplexity
from mla_convert.eval.source_states import source_states
from mla_convert.manifests.environment import capture

Measure = Literal["none", "best", "all"]


@dataclass(frozen=True)
class FrontierRequest:
    """What to compare.

    Attributes:
        options: Everything but the widths; calibration text among it.
        widths: Widths and shares, such as `192,128,25%`.
        text: Held-out text; without it nothing is measured.
        slots: Rotary slots to try at each width; None takes the grid of `split_plans`.
        recipes: Published methods to measure beside the plans, each at the split nearest to the best plan's.
        measure: Which plans are converted, reloaded and evaluated.
        max_tokens: Tokens of held-out text.
    """

    options: ConvertOptions
    widths: str
    text: tuple[str, ...] = ()
    slots: tuple[int, ...] | None = None
    recipes: tuple[str, ...] = ()
    measure: Measure = "none"
    max_tokens: int = defaults.MAX_TOKENS


def run_frontier(
    source: SourceCheckpoint, request: FrontierRequest, command: Sequence[str] | None = None
) -> FrontierReport:
    """Predict every split of every width, and measure as many as asked for from their written files.

    Args:
        source: The opened source.
        request: What to compare.
        command: Command line for the record; the process's own by default.

    Raises:
        UsageFault: For widths out of range, or options that would do nothing; before any work.
        InputRefused: For a source or text that cannot be used.
        CheckFailed: If a conversion does not compute what it should.
    """
    environment = capture(list(command if command is not None else sys.argv))
    _refuse_idle(request)
    options = request.options
    widths = parse_widths(request.widths, width_limits(source, options))
    plans = {width: split_plans(source, options, width, request.slots) for width in widths}
    sample = plans[widths[0]][0]
    refuse_unpredictable(sample, "the frontier")
    rivals = [
        (name, width, _recipe_plans(source, options, name, width)) for name in request.recipes for width in widths
    ]
    held_out = HeldOut.of(source, request.text, options, request.max_tokens) if request.text else None
    digests = digest_of_source(source)
    evidence = gather(source, digests, sample)
    assert evidence is not None  # a predictable plan has calibration text
    search = Search(source, options, evidence.store)
    bench = _Bench(source, options, held_out, digests)
    points, best = [], {}
    for width in widths:
        candidates = search.candidates(plans[width])
        best[width] = least(candidates)
        points += [bench.point(item, item is best[width], request.measure) for item in candidates]
    for name, width, choices in rivals:
        rope = best[width].plan.qk_rope_head_dim
        plan = min(choices, key=lambda choice: abs(choice.qk_rope_head_dim - rope))
        points.append(bench.rival(name, plan))
    return FrontierReport(
        model=source.location.given,
        source=bench.source_point(),
        points=tuple(points),
        text=None if held_out is None else TextUsed.of(held_out.prepared),
        calibration=tuple(corpus.name for corpus in evidence.corpora),
        calibration_tokens=evidence.windows.tokens,
        environment=environment.finish(),
    )


def recipe_options(options: ConvertOptions, name: str) -> ConvertOptions:
    """The options of a published method in place of those that make up ours; `hf` carries them all.

    Raises:
        UsageFault: For a name that there is not.
    """
    if name not in RECIPES:
        raise UsageFault("no such recipe", expected=", ".join(RECIPES), found=name, where="--recipe")
    recipe = RECIPES[name]
    text = options.calibration if recipe.calibrated else ()
    chosen = replace(options, profile="auto", calibration=text, recipe=name)  # type: ignore[arg-type]
    return apply_recipe(chosen)


def _recipe_plans(
    source: SourceCheckpoint, options: ConvertOptions, name: str, width: int
) -> tuple[ConversionPlan, ...]:
    return split_plans(source, recipe_options(options, name), width)


def _refuse_idle(request: FrontierRequest) -> None:
    if request.measure != "none" and not request.text:
        raise UsageFault("nothing to measure on", expected="held-out text", remedy="Give --text PATH.")
    if request.recipes and request.measure == "none":
        raise UsageFault(
            "recipes are measured, not predicted: --recipe has no effect here", remedy="Give --measure, or drop it."
        )


@dataclass(frozen=True)
class _Bench:
    """Turns plans into points, converting and evaluating one folder at a time."""

    source: SourceCheckpoint
    options: ConvertOptions
    held_out: HeldOut | None
    digests: SourceDigests

    def point(self, candidate: Candidate, best: bool, measure: Measure) -> FrontierPoint:
        measured = None
        if measure == "all" or (measure == "best" and best):
            measured = self._measure(self.options, candidate.plan, candidate)
        return self._made(candidate.plan, None, candidate.prediction.kl, best, measured)

    def rival(self, name: str, plan: ConversionPlan) -> FrontierPoint:
        return self._made(plan, name, None, False, self._measure(recipe_options(self.options, name), plan, None))

    def source_point(self) -> SourcePoint:
        facts = source_cache(self.source)
        perplexity = None
        if self.held_out is not None:
            windows = self.held_out.prepared.windows
            perplexity = source_perplexity(source_states(self.source, self.digests, windows), windows)
        return SourcePoint(facts.numbers_per_token_per_layer, facts.bytes_per_token, facts.dtype, perplexity)

    def _made(
        self, plan: ConversionPlan, recipe: str | None, kl: float | None, best: bool, measured: Evaluation | None
    ) -> FrontierPoint:
        cache = target_cache(self.source, plan)
        return FrontierPoint(
            profile=plan.profile,
            qk_rope_head_dim=plan.qk_rope_head_dim,
            kv_lora_rank=plan.kv_lora_rank,
            recipe=recipe,
            bytes_per_token=cache.bytes_per_token,
            dtype=cache.dtype,
            predicted_kl=kl,
            best=best,
            measured=measured,
        )

    def _measure(self, options: ConvertOptions, plan: ConversionPlan, candidate: Candidate | None) -> Evaluation:
        assert self.held_out is not None  # refused before any work
        print(f"measuring {plan.profile}:{plan.qk_rope_head_dim}+{plan.kv_lora_rank}", file=sys.stderr)
        wanted = replace(
            options, profile=plan.profile, qk_rope_head_dim=plan.qk_rope_head_dim, kv_lora_rank=plan.kv_lora_rank
        )
        expected = None if candidate is None else prediction_record(candidate.prediction)
        # One folder at a time: a converted checkpoint is as large as its source.
        with tempfile.TemporaryDirectory(prefix="mla-convert-frontier-") as scratch:
            out = Path(scratch) / "converted"
            convert(self.source, out, wanted, prediction=expected)
            return evaluate_target(self.held_out.prepared, out)
