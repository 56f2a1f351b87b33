"""`mla-convert bench`: measurements on a real model, one subcommand each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mla_convert.cli import bench_decode, bench_scaling
from mla_convert.cli.common import Debug, JsonFlag, Seed, epilog, run_command
from mla_convert.eval import defaults

if TYPE_CHECKING:
    from rich.console import Console

    from mla_convert.bench.fidelity import FidelityReport, FidelityRow
    from mla_convert.eval.evaluation import Evaluation

HELP = "Measure on a real model."
EXAMPLES = """
mla-convert bench fidelity
mla-convert bench fidelity --plan engine:40+152 --plan hf:24+72 --max-tokens 4096
mla-convert bench fidelity --source SOURCE --calibration train.jsonl --text heldout.jsonl --json
"""
DEFAULT_PLANS = "all with a bar, and the published methods"

command = typer.Typer(rich_markup_mode="rich")


@command.callback()
def _benches() -> None:
    """One bench still is a subcommand: without this, typer would make it the command itself."""


command.command("scaling", epilog=epilog(bench_scaling.EXAMPLES))(bench_scaling.command)
command.command("decode", epilog=epilog(bench_decode.EXAMPLES))(bench_decode.command)


@command.command("fidelity", epilog=epilog(EXAMPLES))
def fidelity(
    source: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Source checkpoint.", show_default="SmolLM2-135M-Instruct"),
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(metavar="PATH", help="Calibration text.", show_default="Wikipedia articles")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Held-out text.", show_default="other Wikipedia articles"),
    ] = None,
    off_domain: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Text of another kind, to measure on as well.",
            show_default="the running Python's language reference, with the standard text",
        ),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLAN",
            help="profile:rope+latent, then :policy or :recipe, :block or :e2e, :self. Can be repeated.",
            show_default=DEFAULT_PLANS,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of held-out text.")] = defaults.MAX_TOKENS,
    calibration_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of calibration text.", show_default="as mla-convert convert"),
    ] = None,
    seed: Seed = 0,
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Convert by several plans, reload the files, and print what each keeps; 3 if a default plan misses its bar."""

    def body() -> FidelityResult:
        from mla_convert.bench.fidelity import FidelityRequest, run_fidelity
        from mla_convert.bench.plan_spec import PlanSpec

        standard = FidelityRequest()
        request = FidelityRequest(
            source=source,
            calibration=calibration,
            text=text,
            off_domain=off_domain,
            plans=tuple(PlanSpec.parse(item) for item in plan) if plan else standard.plans,
            max_tokens=max_tokens,
            calibration_tokens=calibration_tokens or standard.calibration_tokens,
            refine_calibration_tokens=calibration_tokens or standard.refine_calibration_tokens,
            seed=seed,
        )
        return FidelityResult(run_fidelity(request))

    run_command(json_output, body, debug=debug)


@dataclass(frozen=True)
class FidelityResult:
    """A report and how it is printed."""

    report: FidelityReport

    @property
    def exit_code(self) -> int:
        """3 where a bar is missed."""
        return self.report.exit_code

    def to_json(self) -> Mapping[str, object]:
        """See `FidelityReport.to_json`."""
        return self.report.to_json()

    def render(self, console: Console) -> None:
        """One table, and under it the conditions."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        table.add_column("plan")
        for heading in ("width", "bytes", "ppl", "ratio", "95 %", "KL", "top-1", "off", "s", "GB", "bar"):
            table.add_column(heading, justify="right", no_wrap=True)
        first = self.report.rows[0].evaluation
        table.add_row(
            "source",
            str(first.source_cache.numbers_per_token_per_layer[0]),
            f"{first.source_cache.bytes_per_token:,}",
            f"{first.figures.source_perplexity:.2f}",
        )
        for row in self.report.rows:
            table.add_row(*map(Text, _cells(row)))
        console.print(table)
        for line in self._conditions(first):
            console.print(Text(line), soft_wrap=True)

    def _conditions(self, first: Evaluation) -> list[str]:
        text = first.text
        windows = f"{text.windows} windows of {first.seq_len}, stride {first.stride}, seed {first.seed}"
        tokens = f"{self.report.calibration_tokens:,}"
        if any(row.plan.refine is not None for row in self.report.rows):
            tokens += f" ({self.report.refine_calibration_tokens:,} where refined)"
        calibrated = f"calibrated on {tokens}"
        return [
            f"model   {self.report.model}",
            f"text    {', '.join(text.names)}",
            f"sha256  {text.sha256}",
            f"tokens  {text.tokens:,} in {windows}; {calibrated}; float32",
            *self._off_domain(),
            "width: numbers cached per token and layer; bytes: cached per token; ratio: to the source's ppl,",
            "with its bootstrap interval; KL in nats; s: convert + evaluate; GB: peak resident memory",
        ]

    def _off_domain(self) -> list[str]:
        beside = self.report.rows[0].off_domain
        if beside is None:
            return []
        where = f"{beside.text.tokens:,} tokens of {', '.join(beside.text.names)}"
        return [f"off     ratio on {where} (source {beside.figures.source_perplexity:.2f})"]


def _cells(row: FidelityRow) -> tuple[str, ...]:
    done, cache = row.evaluation, row.evaluation.target_cache
    interval = done.intervals.ratio if done.intervals else None
    spread = "" if interval is None else f"{interval.low:.3f}–{interval.high:.3f}"
    verdict = ""
    if row.bar is not None:
        off = "" if row.bar.off_domain is None else f", off ≤{row.bar.off_domain:.2f}"
        verdict = f"≤{row.bar.ratio:.2f}{off} {'pass' if row.passed else 'FAIL'}"
    return (
        str(row.plan),
        str(cache.numbers_per_token_per_layer[0]),
        f"{cache.bytes_per_token:,}",
        f"{done.figures.target_perplexity:.2f}",
        f"{done.figures.ratio:.4f}",
        spread,
        f"{done.figures.kl:.3g}",
        f"{done.figures.top1_agreement:.1%}",
        "" if row.off_domain is None else f"{row.off_domain.figures.ratio:.3f}",
        f"{row.convert.seconds:.0f}+{row.evaluate.seconds:.0f}",
        f"{max(row.convert.peak_rss_bytes, row.evaluate.peak_rss_bytes) / 1e9:.1f}",
        verdict,
    )
