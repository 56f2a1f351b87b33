"""`mla-convert harness`: EleutherAI's lm-evaluation-harness over a source and its conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_convert.cli.common import Debug, JsonFlag, Seed, run_command

if TYPE_CHECKING:
    from rich.console import Console

    from mla_convert.manifests.evaluation.harness import HarnessMetric, HarnessReceipt

HELP = (
    "Run tasks of EleutherAI's lm-evaluation-harness (pip install 'mla-convert[harness]') on the source and on the "
    "converted folder, one after the other, both as transformers loads them in float32. Nothing is downloaded unless "
    "HF_DATASETS_OFFLINE=0; files that a task names are found from the working directory."
)
EXAMPLES = """
mla-convert harness OUT --source SOURCE --tasks my_task --task-path tasks/
mla-convert harness OUT --source SOURCE --tasks arc_easy,piqa --limit 200 --batch-size 8 --json
"""


def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Converted folder.")],
    source: Annotated[
        str, typer.Option(metavar="SOURCE", help="What it was converted from: folder, GGUF file or Hub id.")
    ],
    tasks: Annotated[str, typer.Option(metavar="NAMES", help="Tasks, groups or tags, with commas between them.")],
    task_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with task files of your own, besides the harness's.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most examples of each task.", show_default="all")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that go through a model at once.")] = 1,
    seed: Seed = 0,
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Run `tasks` on `out` and `source`."""

    def body() -> HarnessResult:
        from mla_convert.eval.harness import HarnessOptions, run_harness

        names = tuple(name.strip() for name in tasks.split(","))
        return HarnessResult(run_harness(out, source, HarnessOptions(names, task_path, limit, batch_size, seed)))

    run_command(json_output, body, debug=debug)


@dataclass(frozen=True)
class HarnessResult:
    """A receipt and how it is printed."""

    receipt: HarnessReceipt

    def to_json(self) -> Mapping[str, object]:
        """The receipt."""
        return self.receipt.model_dump(mode="json")

    def render(self, console: Console) -> None:
        """One row a metric, and under it what is needed to repeat it."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("task", "metric", "source", "target", "difference"):
            table.add_column(heading, justify="left" if heading in ("task", "metric") else "right")
        for metric in self.receipt.metrics:
            table.add_row(*map(Text, _cells(metric)))
        console.print(table)
        counts = ", ".join(f"{task.task} {task.examples}" for task in self.receipt.tasks)
        for line in (
            f"examples {counts}",
            f"harness  {self.receipt.harness}, batch {self.receipt.batch_size}, seed {self.receipt.seed}; float32",
            f"manifest {self.receipt.compared.manifest_sha256}",
        ):
            console.print(Text(line), soft_wrap=True)


def _cells(metric: HarnessMetric) -> tuple[str, str, str, str, str]:
    name = metric.metric if metric.filter == "none" else f"{metric.metric}, {metric.filter}"
    arrow = {True: " ↑", False: " ↓", None: ""}[metric.higher_is_better]
    return (
        metric.task,
        f"{name}{arrow}",
        _figure(metric.source, metric.source_stderr),
        _figure(metric.target, metric.target_stderr),
        "" if metric.difference is None else f"{metric.difference:+.4g}",
    )


def _figure(value: float | None, error: float | None) -> str:
    if value is None:
        return "no number"
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"
