"""The choice of a plan: the splits that a width allows, and the one that is predicted to lose least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mla_convert.convert.budget import Goal, goal_width, width_limits
from mla_convert.convert.calibrate import StatisticsStore
from mla_convert.convert.calibration_run import gather
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.planning import legal_rope_step, make_plan
from mla_convert.convert.predict import Prediction, predict, predictable
from mla_convert.convert.receipts import digest_of_source, prediction_record
from mla_convert.convert.states import MEMORY_BUDGET_BYTES
from mla_convert.errors import InputRefused, UsageFault
from mla_convert.manifests.quality import CandidateRecord, PredictionRecord
from mla_convert.progress import track

# Rotary shares of a width that are tried. Measured best on SmolLM2 are a fifth to a third (docs/fidelity.md).
ROPE_SHARES = (1 / 8, 1 / 6, 5 / 24, 1 / 4, 7 / 24, 1 / 3, 5 / 12, 1 / 2)
# Kernels like rows in multiples of eight numbers; at small widths that would be too coarse a grid.
ALIGNMENT, UNITS_OF_WIDTH = 8, 24
# Widths that a search for a loss looks at: multiples of a 48th of the source's.
WIDTHS_OF_SOURCE = 48


@dataclass(frozen=True)
class Candidate:
    """One plan and what it is expected to lose."""

    plan: ConversionPlan
    prediction: Prediction

    @property
    def width(self) -> int:
        """Numbers per token and layer."""
        return self.plan.kv_lora_rank + self.plan.qk_rope_head_dim

    def record(self) -> CandidateRecord:
        """Its line in the manifest."""
        return CandidateRecord(
            width=self.width,
            qk_rope_head_dim=self.plan.qk_rope_head_dim,
            kv_lora_rank=self.plan.kv_lora_rank,
            predicted_kl=self.prediction.kl,
        )


@dataclass(frozen=True)
class Choice:
    """What was chosen, and from what.

    Attributes:
        options: The options with both widths.
        best: The plan chosen.
        considered: All plans predicted, widest first.
        goal: What it was chosen for.
    """

    options: ConvertOptions
    best: Candidate
    considered: tuple[Candidate, ...]
    goal: Goal

    def record(self) -> PredictionRecord:
        """The manifest's `prediction`."""
        candidates = [candidate.record() for candidate in self.considered]
        return prediction_record(self.best.prediction, str(self.goal), candidates)


def split_plans(
    source: SourceCheckpoint, options: ConvertOptions, width: int, slots: Sequence[int] | None = None
) -> tuple[ConversionPlan, ...]:
    """Every plan of a width that is worth a prediction, narrow rotary keys first; headers alone are read.

    With profile `auto` those are the plans that `engine` carries, or where it carries none, those of `hf`.

    Args:
        source: The source.
        options: Everything but the widths.
        width: Numbers per token and layer.
        slots: Rotary slots to try; None takes a grid of shares of the width.

    Raises:
        UsageFault: If no split is legal, as its widest rotary key is refused.
        InputRefused: If no profile carries one.
    """
    ropes = _grid(source, options, width) if slots is None else sorted({2 * count for count in slots})
    plans: list[ConversionPlan] = []
    refusal: UsageFault | InputRefused | None = None
    for rope in ropes:
        try:
            plans.append(make_plan(source, replace(options, qk_rope_head_dim=rope, kv_lora_rank=width - rope)))
        except (UsageFault, InputRefused) as error:
            refusal = error
    if not plans:
        raise refusal or UsageFault("no split of that width", found=str(width))
    if options.profile == "auto" and any(plan.profile == "engine" for plan in plans):
        plans = [plan for plan in plans if plan.profile == "engine"]
    return tuple(plans)


def _grid(source: SourceCheckpoint, options: ConvertOptions, width: int) -> list[int]:
    step = legal_rope_step(source.shape, options.rope_policy)
    unit = step
    while unit * 2 <= min(ALIGNMENT, width / UNITS_OF_WIDTH):
        unit *= 2
    return sorted({max(step, round(width * share / unit) * unit) for share in ROPE_SHARES})


@dataclass
class Search:
    """Predictions of one source on one calibration text, each made once.

    Attributes:
        source: The source.
        options: Everything but the widths.
        store: Calibration statistics.
    """

    source: SourceCheckpoint
    options: ConvertOptions
    store: StatisticsStore
    _known: dict[str, Candidate] = field(default_factory=dict, init=False)

    @property
    def considered(self) -> tuple[Candidate, ...]:
        """All plans predicted so far, widest first and narrow rotary keys first."""
        return tuple(sorted(self._known.values(), key=lambda found: (-found.width, found.plan.qk_rope_head_dim)))

    def candidates(self, plans: Sequence[ConversionPlan]) -> tuple[Candidate, ...]:
        """Predict some plans."""
        for plan in track([plan for plan in plans if plan.plan_id not in self._known], "predicting", unit="plan"):
            self._known[plan.plan_id] = Candidate(plan, predict(self.source, self.store, plan))
        return tuple(self._known[plan.plan_id] for plan in plans)

    def best(self, width: int, near: float | None = None) -> Candidate:
        """The split of a width that is predicted to lose least; of equal ones, that with the narrower rotary key.

        Args:
            width: Numbers per token and layer.
            near: Look only at the three splits around this rotary share.
        """
        plans = split_plans(self.source, self.options, width)
        if near is not None:
            plans = tuple(sorted(plans, key=lambda plan: abs(plan.qk_rope_head_dim / width - near))[:3])
        return least(self.candidates(plans))

    def narrowest(self, max_kl: float, widths: Sequence[int]) -> Candidate:
        """The narrowest width whose predicted loss is within `max_kl`, by bisection: loss falls with width.

        Args:
            max_kl: Nats per token.
            widths: Those that may be taken, ascending.

        Raises:
            UsageFault: If even the widest is predicted to lose more, with what can be had.
        """
        low, high = 0, len(widths) - 1
        found = self.best(widths[high])
        if found.prediction.kl > max_kl:
            narrow = self.best(widths[0])
            raise UsageFault(
                "--max-kl is out of range",
                expected=f"{found.prediction.kl:.3g} (width {widths[high]}) to {narrow.prediction.kl:.3g} "
                f"(width {widths[0]}), as predicted",
                found=f"{max_kl:g}",
            )
        while low < high:
            middle = (low + high) // 2
            tried = self.best(widths[middle], near=found.plan.qk_rope_head_dim / found.width)
            if tried.prediction.kl <= max_kl:
                high, found = middle, tried
            else:
                low = middle + 1
        return found


def least(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that is predicted to lose least; of equal ones the first."""
    return min(candidates, key=lambda candidate: candidate.prediction.kl)


def search_widths(source: SourceCheckpoint, options: ConvertOptions) -> tuple[int, ...]:
    """Widths that a search for a loss looks at, narrowest first: those of a grid that have a legal split.

    Raises:
        UsageFault: If none has, as the widest is refused.
        InputRefused: If no profile carries any.
    """
    limits = width_limits(source, options)
    step = max(2, limits.source // WIDTHS_OF_SOURCE // 2 * 2)
    widths: list[int] = []
    refusal: UsageFault | InputRefused | None = None
    for width in range(-(-limits.lowest // step) * step, limits.highest + 1, step):
        try:
            split_plans(source, options, width)
            widths.append(width)
        except (UsageFault, InputRefused) as error:
            refusal = error
    if not widths:
        raise refusal or UsageFault("no width is legal", expected=f"{limits.lowest} to {limits.highest}")
    return tuple(widths)


def goal_widths(source: SourceCheckpoint, options: ConvertOptions, goal: Goal) -> tuple[int, ...]:
    """Widths among which a goal chooses, ascending; headers alone are read.

    Raises:
        UsageFault: For a goal out of range, with the legal range.
        InputRefused: If no profile carries any width.
    """
    if goal.max_kl is None:
        return (goal_width(goal, width_limits(source, options)),)
    return search_widths(source, options)


def widest_plan(source: SourceCheckpoint, options: ConvertOptions, goal: Goal) -> ConversionPlan:
    """One plan as wide as a goal allows: what headers and options alone refuse of a goal is refused here.

    Raises:
        UsageFault: As `goal_widths`, and for options that leave nothing to predict.
        InputRefused: As `goal_widths`.
    """
    plan = split_plans(source, options, goal_widths(source, options, goal)[-1])[0]
    refuse_unpredictable(plan, str(goal))
    return plan


def choose(
    source: SourceCheckpoint, options: ConvertOptions, goal: Goal, memory_budget_bytes: int = MEMORY_BUDGET_BYTES
) -> Choice:
    """Pick the plan that is predicted to lose least within a goal.

    Args:
        source: The source.
        options: Everything but the widths; calibration text among it.
        goal: What is asked of the plan.
        memory_budget_bytes: Most bytes of hidden states to hold in memory while calibrating.

    Raises:
        UsageFault: For a goal out of range, with the legal range, or options that leave nothing to predict.
        InputRefused: If no profile carries the source, or the text cannot be used.
    """
    # Whatever the width, every plan of these options is calibrated on the same windows.
    evidence = gather(source, digest_of_source(source), widest_plan(source, options, goal), memory_budget_bytes)
    assert evidence is not None  # a predictable plan has calibration text
    search, widths = Search(source, options, evidence.store), goal_widths(source, options, goal)
    best = search.best(widths[0]) if goal.max_kl is None else search.narrowest(goal.max_kl, widths)
    chosen = replace(
        options,
        profile=best.plan.profile,
        qk_rope_head_dim=best.plan.qk_rope_head_dim,
        kv_lora_rank=best.plan.kv_lora_rank,
    )
    return Choice(chosen, best, search.considered, goal)


def refuse_unpredictable(plan: ConversionPlan, what: str) -> None:
    """Refuse a plan whose loss cannot be predicted.

    Raises:
        UsageFault: If so.
    """
    if not predictable(plan):
        found = f"--weighting {plan.weighting}, --rope-policy {plan.rope_policy}, --rope-stride {plan.rope_stride:g}"
        raise UsageFault(
            f"{what} needs a predicted loss",
            expected="calibration text, --weighting output, --rope-policy optimal and a stride of 1 or 2",
            found="no calibration text" if plan.calibration is None else found,
            remedy="Give --calibration PATH, or both --kv-lora-rank and --qk-rope-head-dim.",
        )
