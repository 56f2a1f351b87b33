"""`mla-convert convert`: write a source as an MLA checkpoint that stock transformers loads."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from mla_convert.cli.common import Debug, JsonFlag, Seed, run_command
from mla_convert.cli.convert_options import (
    CALIBRATION_TOKENS,
    CALIBRATION_WINDOW,
    MEASURE_TOKENS,
    MEMORY_BUDGET,
    REFINE_BATCH,
    REFINE_CALIBRATION_TOKENS,
    REFINE_CONTINUED,
    REFINE_STEPS,
    REFINE_TOKENS,
    Balance,
    Budget,
    CacheBytes,
    Calibration,
    CalibrationLong,
    CalibrationTokens,
    CalibrationWindow,
    Centring,
    Damping,
    DryRunFlag,
    Dtype,
    Factorization,
    FreqFold,
    Gamma,
    KeyRank,
    KvLoraRank,
    LatentNorm,
    Lossless,
    MaxKL,
    Measure,
    MeasureTokens,
    MemoryBudget,
    Out,
    Overwrite,
    PadCache,
    Profile,
    QkRopeHeadDim,
    RankRule,
    Recipe,
    Refine,
    RefineBatch,
    RefineContinued,
    RefineSteps,
    RefineTokens,
    RopePolicy,
    RopeStride,
    TextField,
    Weighting,
    Width,
)
from mla_convert.cli.convert_result import ConvertResult, DryRun, print_expectation, print_preview
from mla_convert.cli.inspect import Revision, Source, open_revision
from mla_convert.cli.plan_file import read_plan_file
from mla_convert.errors import UsageFault

if TYPE_CHECKING:
    from mla_convert.convert.budget import Goal
    from mla_convert.convert.options import ConvertOptions

HELP = (
    "Write SOURCE as a Multi-head Latent Attention checkpoint in OUT, with a manifest. The plan is printed before "
    "work starts. The written files are loaded again by stock transformers and compared before OUT appears; "
    "a run that fails or is interrupted leaves no OUT."
)
EXAMPLES = """
mla-convert convert SOURCE OUT --lossless
mla-convert convert SOURCE OUT --qk-rope-head-dim 40 --kv-lora-rank 152 --calibration books/
mla-convert convert SOURCE OUT --budget 50% --calibration books/ --measure heldout.txt
mla-convert convert SOURCE OUT --max-kl 0.1 --calibration books/
mla-convert convert SOURCE OUT --recipe transmla --qk-rope-head-dim 32 --kv-lora-rank 160 --calibration books/
mla-convert convert model.gguf OUT --rope-policy high --qk-rope-head-dim 48 --kv-lora-rank 144
mla-convert convert SOURCE OUT --config plan.yaml --profile hf --dry-run --json
"""

NOT_IN_PLAN_FILE = ("ctx", "source", "out", "config", "json_output", "debug", "return")
# What a lossless plan leaves no choice of, and what only calibration text gives a meaning.
SET_BY_LOSSLESS = (
    "recipe",
    "rope_policy",
    "factorization",
    "key_rank",
    "weighting",
    "gamma",
    "freqfold",
    "rope_stride",
    "balance",
    "rank_rule",
    "centring",
    "damping",
    "calibration",
    "refine",
)
# Each of these chooses the plan, so none goes with another or with what sets a width itself.
GOALS = ("width", "budget", "cache_bytes", "max_kl")
WIDTHS = ("lossless", "kv_lora_rank", "qk_rope_head_dim", "pad_cache", "key_rank")
OF_CALIBRATION = ("calibration_tokens", "calibration_window", "calibration_long", "text_field")


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Take the options of a YAML file as defaults of the command line; runs before all other options.

    Raises:
        UsageFault: See `read_plan_file`.
    """
    if path is not None and not ctx.resilient_parsing:
        hints = {name: hint for name, hint in get_type_hints(command).items() if name not in NOT_IN_PLAN_FILE}
        ctx.default_map = read_plan_file(path, hints)
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        metavar="YAML",
        callback=read_config,
        is_eager=True,
        help="File with these options by name, such as kv_lora_rank: 152. The command line overrides it.",
    ),
]


def command(
    ctx: typer.Context,
    source: Source,
    out: Out,
    lossless: Lossless = False,
    kv_lora_rank: KvLoraRank = None,
    qk_rope_head_dim: QkRopeHeadDim = None,
    width: Width = None,
    budget: Budget = None,
    cache_bytes: CacheBytes = None,
    max_kl: MaxKL = None,
    profile: Profile = "auto",
    recipe: Recipe = None,
    rope_policy: RopePolicy = "optimal",
    factorization: Factorization = "joint",
    key_rank: KeyRank = None,
    weighting: Weighting = None,
    gamma: Gamma = None,
    freqfold: FreqFold = None,
    rope_stride: RopeStride = 1.0,
    balance: Balance = "none",
    rank_rule: RankRule = "spectra",
    centring: Centring = "auto",
    damping: Damping = "auto",
    latent_norm: LatentNorm = "auto",
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = None,
    calibration_window: CalibrationWindow = CALIBRATION_WINDOW,
    calibration_long: CalibrationLong = 0,
    text_field: TextField = "text",
    dtype: Dtype = "source",
    pad_cache: PadCache = None,
    refine: Refine = None,
    refine_steps: RefineSteps = REFINE_STEPS,
    refine_batch: RefineBatch = REFINE_BATCH,
    refine_continued: RefineContinued = REFINE_CONTINUED,
    refine_tokens: RefineTokens = REFINE_TOKENS,
    revision: Revision = None,
    measure: Measure = None,
    measure_tokens: MeasureTokens = MEASURE_TOKENS,
    seed: Seed = 0,
    memory_budget: MemoryBudget = MEMORY_BUDGET,
    dry_run: DryRunFlag = False,
    overwrite: Overwrite = False,
    config: Config = None,  # noqa: ARG001 - `read_config` has read it
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Convert `source` into `out`."""

    def body() -> ConvertResult | DryRun:
        from mla_convert.convert.options import ConvertOptions

        refuse_idle(ctx)
        options = ConvertOptions(
            lossless=lossless,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            profile=profile,
            rope_policy=rope_policy,
            factorization=factorization,
            key_rank=key_rank,
            weighting=weighting,
            gamma=gamma or "measured",
            latent_norm=latent_norm,
            dtype=dtype,
            pad_cache=_pad_widths(pad_cache),
            calibration=tuple(calibration or ()),
            calibration_tokens=calibration_tokens or (REFINE_CALIBRATION_TOKENS if refine else CALIBRATION_TOKENS),
            refine=refine,
            refine_steps=refine_steps,
            refine_batch=refine_batch,
            refine_continued=refine_continued,
            refine_tokens=refine_tokens,
            calibration_window=calibration_window,
            calibration_long=calibration_long,
            text_field=text_field,
            seed=seed,
            recipe=recipe,
            freqfold=freqfold,
            rope_stride=rope_stride,
            balance=balance,
            rank_rule=rank_rule,
            centring=centring,
            damping=damping,
        )
        request = _Request(
            source=source,
            revision=revision,
            out=out,
            options=options,
            goal=_goal(width, budget, cache_bytes, max_kl),
            measure=tuple(measure or ()),
            measure_tokens=measure_tokens,
            memory_budget_bytes=_budget_bytes(memory_budget),
        )
        return _run(request, overwrite=overwrite, dry_run=dry_run)

    run_command(json_output, body, debug=debug)


@dataclass(frozen=True)
class _Request:
    """One command line, read."""

    source: str
    revision: str | None
    out: Path
    options: ConvertOptions
    goal: Goal | None
    measure: tuple[str, ...]
    measure_tokens: int
    memory_budget_bytes: int


def _run(request: _Request, *, overwrite: bool, dry_run: bool) -> ConvertResult | DryRun:
    from mla_convert.convert.calibration_run import check_texts
    from mla_convert.convert.calibration_text import read_corpus
    from mla_convert.convert.checkpoint_writer import absolute, check_writable, refuse_existing
    from mla_convert.convert.choose import choose, widest_plan
    from mla_convert.convert.inspection import preview_conversion
    from mla_convert.convert.planning import make_plan
    from mla_convert.convert.run import check_disk, convert, refuse_inside
    from mla_convert.eval.held_out import HeldOut

    started = time.perf_counter()
    out, options = absolute(request.out), request.options
    refuse_existing(out, overwrite=overwrite)
    checkpoint = open_revision(request.source, request.revision)
    refuse_inside(out, checkpoint.location.folder)
    goal = request.goal
    plan = make_plan(checkpoint, options) if goal is None else widest_plan(checkpoint, options, goal)
    check_disk(out, checkpoint, plan)
    if not dry_run:
        check_writable(out)
    held_out, choice = None, None
    if request.measure and not dry_run:
        held_out = HeldOut.of(checkpoint, request.measure, options, request.measure_tokens)
    if goal is not None:
        choice = choose(checkpoint, options, goal, request.memory_budget_bytes)
        options, plan = choice.options, choice.best.plan
    preview = preview_conversion(checkpoint, plan, out)
    if dry_run:
        check_texts(checkpoint, plan)
        for text in request.measure:
            # A dataset may have to be downloaded, which writes to its cache.
            if not text.startswith("datasets:"):
                read_corpus(text, options.text_field)
        return DryRun(preview)
    print_preview(preview)
    expected = None if choice is None else choice.record()
    print_expectation(expected, plan)
    done = convert(
        checkpoint,
        out,
        options,
        overwrite=overwrite,
        prediction=expected,
        measure=held_out,
        memory_budget_bytes=request.memory_budget_bytes,
    )
    return ConvertResult(done, preview, time.perf_counter() - started)


def _goal(width: int | None, budget: str | None, cache_bytes: int | None, max_kl: float | None) -> Goal | None:
    from mla_convert.convert.budget import Goal, parse_share

    share = None if budget is None else parse_share(budget, "--budget")
    goal = Goal(width, share, cache_bytes, max_kl)
    return None if goal == Goal() else goal


def refuse_idle(ctx: typer.Context) -> None:
    """Refuse options that were given and would change nothing, or that say something else than the recipe.

    Raises:
        UsageFault: Naming the option and what it needs.
    """
    from mla_convert.convert.recipes import RECIPES, check_recipe

    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    given = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    asked = {name: ctx.params[name] for name in given}
    idle, reason, remedy = [], "", ""
    refuse_two_widths(asked)
    if "measure_tokens" in given and not asked.get("measure"):
        raise UsageFault("--measure-tokens has no effect without --measure", remedy="Give --measure PATH, or drop it.")
    refuse_idle_refinement(given, asked)
    recipe = asked.get("recipe")
    if asked.get("lossless"):
        idle, reason = [name for name in (*SET_BY_LOSSLESS, *OF_CALIBRATION) if name in given], "with --lossless"
        remedy = "Drop it."
    elif recipe is not None and not RECIPES[recipe].calibrated and asked.get("calibration"):
        names = ("calibration", "refine", *OF_CALIBRATION)
        idle, reason = [name for name in names if name in given], f"with --recipe {recipe}"
        remedy = "The method measures nothing on text; drop it."
    elif not asked.get("calibration"):
        measured = ("gamma",) if asked.get("gamma") == "measured" else ()
        idle, reason = [name for name in (*OF_CALIBRATION, *measured) if name in given], "without calibration text"
        remedy = "Give --calibration PATH, or drop it."
    if idle:
        raise UsageFault(f"{', '.join(map(_option, idle))} has no effect {reason}", remedy=remedy)
    if recipe is not None:
        check_recipe(recipe, asked)


def refuse_idle_refinement(given: AbstractSet[str], asked: Mapping[str, object]) -> None:
    """Refuse options of a refinement that is not made.

    Raises:
        UsageFault: Naming them.
    """
    idle = [name for name in ("refine_steps", "refine_batch", "refine_continued", "refine_tokens") if name in given]
    if asked.get("refine") == "e2e":
        return
    if asked.get("refine") is not None:
        idle = [name for name in idle if name == "refine_tokens"]
    if idle:
        needed = "--refine e2e" if idle == ["refine_tokens"] else "--refine"
        raise UsageFault(
            f"{', '.join(map(_option, idle))} has no effect without {needed}", remedy="Give that, or drop it."
        )


def refuse_two_widths(asked: Mapping[str, object]) -> None:
    """Refuse options that both say how wide the cache is to be, and a dry run that would have to calibrate.

    Raises:
        UsageFault: Naming them.
    """
    goals = [name for name in GOALS if asked.get(name) is not None]
    if not goals:
        return
    others = [name for name in WIDTHS if asked.get(name)]
    clashing = [*goals, *others]
    if len(clashing) > 1:
        raise UsageFault(
            f"{' and '.join(map(_option, clashing))} each say how wide the cache is", remedy="Give one of them."
        )
    if asked.get("dry_run"):
        raise UsageFault(
            f"a dry run reads no weights, and {_option(goals[0])} chooses by predictions that need them",
            remedy="mla-convert frontier prints the choice and writes no checkpoint.",
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _budget_bytes(gibibytes: float) -> int:
    if not math.isfinite(gibibytes * 1024**3):
        raise UsageFault("not an amount of memory", expected="GiB", found=str(gibibytes), where="--memory-budget")
    return int(gibibytes * 1024**3)


def _pad_widths(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)\+(\d+)", text)
    if found is None:
        raise UsageFault("not two widths", expected="RANK+ROPE, such as 512+64", found=text, where="--pad-cache")
    return int(found[1]), int(found[2])
