"""The demo: a real model converted at two widths by the command line itself, and what that cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from mla_convert.assets.smollm2 import DESCRIPTION, smollm2_folder
from mla_convert.assets.wikipedia import write_splits
from mla_convert.bench.plan_spec import PlanSpec
from mla_convert.bench.steps import Step, run_step
from mla_convert.bench.usage import Usage, UsageMeter
from mla_convert.cache_dir import cache_root

PLANS = (PlanSpec("engine", 40, 152), PlanSpec("hf", 32, 96))
CALIBRATION_TOKENS = 5120
EVAL_TOKENS = 4096
SEQ_LEN = 512
PROMPT = "The Sun is the star at the center of"
NEW_TOKENS = 24
# The parts that the demo has minutes for.
SUITE = ("--suite", "quick", "--part", "ladder", "--part", "quality")

T = TypeVar("T")


@dataclass(frozen=True)
class DemoRow:
    """One line of the table.

    Attributes:
        name: `source`, or the plan.
        width: Numbers cached per token and layer, counted in the cache.
        cache_bytes_per_token: Bytes cached per token in all layers, counted in the cache.
        perplexity: On the held-out text.
        ratio: Perplexity over the source's.
        kl: `KL(source ‖ target)` per token, nats.
        top1_agreement: Share of tokens where source and target put the same token first.
        sample: Continuation of the prompt, likeliest token each time.
    """

    name: str
    width: int
    cache_bytes_per_token: int
    perplexity: float
    ratio: float
    kl: float
    top1_agreement: float
    sample: str


@dataclass(frozen=True)
class DemoReport:
    """What the demo found.

    Attributes:
        model: The source in words.
        work_dir: Where the converted folders are.
        rows: Source first.
        page: The report of the first plan.
        assets: Time and memory of bringing the model and the text.
        steps: The commands.
        seconds: Of all together.
    """

    model: str
    work_dir: Path
    rows: tuple[DemoRow, ...]
    page: Path
    assets: Usage
    steps: tuple[Step, ...]
    seconds: float

    def to_json(self) -> dict[str, object]:
        """The whole report."""
        return {
            "model": self.model,
            "work_dir": self.work_dir.as_posix(),
            "prompt": PROMPT,
            "eval_tokens": EVAL_TOKENS,
            "seq_len": SEQ_LEN,
            "stride": SEQ_LEN,
            "calibration_tokens": CALIBRATION_TOKENS,
            "rows": [asdict(row) for row in self.rows],
            "page": self.page.as_posix(),
            "assets": asdict(self.assets),
            "steps": [step.to_json() for step in self.steps],
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class _Assets:
    source: str
    calibration: str
    heldout: str


def run_demo(work_dir: Path) -> DemoReport:
    """Fetch the model and the text, convert at two widths, verify, evaluate, generate, and report on the first.

    Args:
        work_dir: Where the converted folders go; those of an earlier run are replaced.

    Raises:
        EnvironmentFault: If the model or the text cannot be downloaded.
        MLAConvertError: If a command fails, with its exit code.
    """
    started = time.perf_counter()
    work_dir.mkdir(parents=True, exist_ok=True)
    with UsageMeter() as fetching:
        assets = _bring_assets()
    folders = {plan: str(work_dir / f"{plan.profile}-{plan.rope}-{plan.latent}") for plan in PLANS}
    inspected = run_step("inspect", ["inspect", assets.source, "--json"])
    converted = [run_step(f"convert, {plan}", _convert(plan, out, assets)) for plan, out in folders.items()]
    verified = [run_step(f"verify, {plan}", _verify(out, assets)) for plan, out in folders.items()]
    evaluated = [run_step(f"eval, {plan}", _evaluate(out, assets)) for plan, out in folders.items()]
    generated = [run_step("generate, source", _generate(assets.source))]
    generated += [run_step(f"generate, {plan}", _generate(out)) for plan, out in folders.items()]
    rows = [_source_row(evaluated[0].result, generated[0].result)]
    rows += [
        _target_row(plan, evaluation.result, sample.result)
        for plan, evaluation, sample in zip(folders, evaluated, generated[1:], strict=True)
    ]
    plan, out = next(iter(folders.items()))
    suite = run_step(f"eval --suite quick, {plan}", [*_evaluate(out, assets), *SUITE])
    reported = run_step(f"report, {plan}", ["report", out, "--json"])
    steps = (inspected, *converted, *verified, *evaluated, *generated, suite, reported)
    seconds = time.perf_counter() - started
    page = Path(reported.result["report"])
    return DemoReport(DESCRIPTION, work_dir, tuple(rows), page, fetching.usage, steps, seconds)


def _bring_assets() -> _Assets:
    source = _announced("model", smollm2_folder)
    splits = _announced("text", lambda: write_splits(cache_root() / "text"))
    return _Assets(str(source), str(splits.calibration), str(splits.heldout))


def _announced(what: str, bring: Callable[[], T]) -> T:
    print(f"{what}: from {cache_root()}, or downloaded the first time ...", file=sys.stderr, flush=True)
    return bring()


def _convert(plan: PlanSpec, out: str, assets: _Assets) -> list[str]:
    arguments = ["convert", assets.source, out, "--profile", plan.profile, "--rope-policy", plan.policy]
    arguments += ["--qk-rope-head-dim", str(plan.rope), "--kv-lora-rank", str(plan.latent)]
    arguments += ["--calibration", assets.calibration, "--calibration-tokens", str(CALIBRATION_TOKENS)]
    return [*arguments, "--overwrite", "--json"]


def _verify(out: str, assets: _Assets) -> list[str]:
    return ["verify", out, "--source", assets.source, "--json"]


def _evaluate(out: str, assets: _Assets) -> list[str]:
    arguments = ["eval", out, "--source", assets.source, "--text", assets.heldout]
    sizes = ["--max-tokens", str(EVAL_TOKENS), "--seq-len", str(SEQ_LEN), "--stride", str(SEQ_LEN)]
    return [*arguments, *sizes, "--json"]


def _generate(checkpoint: str) -> list[str]:
    return ["generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS), "--json"]


def _source_row(evaluation: dict[str, Any], sample: dict[str, Any]) -> DemoRow:
    return DemoRow(
        name="source",
        width=_width(evaluation, "source"),
        cache_bytes_per_token=evaluation["cache_bytes_per_token"]["source"],
        perplexity=evaluation["source"]["perplexity"],
        ratio=1.0,
        kl=0.0,
        top1_agreement=1.0,
        sample=sample["text"],
    )


def _target_row(plan: PlanSpec, evaluation: dict[str, Any], sample: dict[str, Any]) -> DemoRow:
    return DemoRow(
        name=str(plan),
        width=_width(evaluation, "target"),
        cache_bytes_per_token=evaluation["cache_bytes_per_token"]["target"],
        perplexity=evaluation["target"]["perplexity"],
        ratio=evaluation["perplexity_ratio"],
        kl=evaluation["kl"],
        top1_agreement=evaluation["top1_agreement"],
        sample=sample["text"],
    )


def _width(evaluation: dict[str, Any], side: str) -> int:
    """Numbers per token and layer; all layers of a stock checkpoint cache the same."""
    return int(evaluation["cache"][side]["numbers_per_token_per_layer"][0])
