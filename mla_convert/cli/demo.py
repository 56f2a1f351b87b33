"""`mla-convert demo`: a real model converted at two widths, and one table of what that cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_convert.cli.common import Debug, JsonFlag, run_command

if TYPE_CHECKING:
    from rich.console import Console

    from mla_convert.bench.demo import DemoReport

HELP = (
    "Convert the real SmolLM2-135M-Instruct at two cache widths and show what it costs: inspect, convert, "
    "verify, eval on held-out Wikipedia text and generate, each command printed before it runs. "
    "The first run downloads 120 MB."
)
EXAMPLES = """
mla-convert demo
mla-convert demo --work-dir /tmp/demo --json
"""


def command(
    work_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the converted folders go; those of an earlier run are replaced.",
            show_default="demo in the cache folder",
        ),
    ] = None,
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Run the demo."""

    def body() -> DemoResult:
        from mla_convert.bench.demo import run_demo
        from mla_convert.cache_dir import cache_root

        return DemoResult(run_demo(work_dir or cache_root() / "demo"))

    run_command(json_output, body, debug=debug)


@dataclass(frozen=True)
class DemoResult:
    """A report and how it is printed."""

    report: DemoReport

    def to_json(self) -> Mapping[str, object]:
        """See `DemoReport.to_json`."""
        return self.report.to_json()

    def render(self, console: Console) -> None:
        """The table, the samples under it, then time and memory of each step."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        from mla_convert.bench.demo import CALIBRATION_TOKENS, EVAL_TOKENS, PROMPT, SEQ_LEN

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        for heading in ("width", "cache bytes/token", "perplexity", "ratio", "KL", "top-1"):
            table.add_column(heading, justify="right")
        for row in self.report.rows:
            table.add_row(
                row.name,
                str(row.width),
                f"{row.cache_bytes_per_token:,}",
                f"{row.perplexity:.2f}",
                f"{row.ratio:.3f}",
                f"{row.kl:.3g}",
                f"{row.top1_agreement:.1%}",
            )
        console.print(table)
        console.print(f"{self.report.model};", soft_wrap=True)
        console.print("all are run from their files in float32, the source by stock transformers,")
        console.print("the others from their latent cache.")
        console.print(
            f"Held-out text: {EVAL_TOKENS:,} tokens, window and stride {SEQ_LEN}; calibration: "
            f"{CALIBRATION_TOKENS:,} tokens of other articles.",
            soft_wrap=True,
        )
        console.print("width: numbers cached per token and layer.\n")
        for row in self.report.rows:
            console.print(Text(f"{row.name:>14}  ") + Text(PROMPT, style="dim") + Text(row.sample), soft_wrap=True)
        console.print()
        self._render_steps(console)
        console.print(Text(f"report of {self.report.rows[1].name}: {self.report.page}"), soft_wrap=True)

    def _render_steps(self, console: Console) -> None:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("step")
        table.add_column("seconds", justify="right")
        table.add_column("peak memory, GB", justify="right")
        usages = [("model and text", self.report.assets)]
        usages += [(step.name, step.usage) for step in self.report.steps]
        for name, usage in usages:
            table.add_row(name, f"{usage.seconds:.1f}", f"{usage.peak_rss_bytes / 1e9:.2f}")
        table.add_row("together", f"{self.report.seconds:.1f}", "")
        console.print(table)
        console.print(f"The converted folders are in {self.report.work_dir}", soft_wrap=True, highlight=False)
