"""`mla-convert inspect`: what a source is, what it caches, and what can be made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_convert.cli.common import Debug, JsonFlag, run_command
from mla_convert.errors import UsageFault

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mla_convert.convert.checkpoint import SourceCheckpoint
    from mla_convert.convert.inspection import Inspection, ProfileFacts, SuggestedPlan

HELP = (
    "Show a source's family and shapes, its cache bytes per token now and at suggested plans, the legal widths, "
    "and what each output profile can carry. Only headers are read. A source that cannot be converted is refused "
    "with the feature or tensor that stops it."
)
EXAMPLES = """
mla-convert inspect path/to/model
mla-convert inspect model.gguf
mla-convert inspect HuggingFaceTB/SmolLM2-135M --revision main --json
"""

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Hugging Face folder, GGUF file or Hub id.")]
Revision = Annotated[str | None, typer.Option(metavar="REV", help="Branch, tag or commit of a Hub id.")]


def command(
    source: Source,
    revision: Revision = None,
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Inspect `source`."""

    def body() -> InspectResult:
        from mla_convert.convert.inspection import inspect_source

        return InspectResult(inspect_source(open_revision(source, revision)))

    run_command(json_output, body, debug=debug)


def open_revision(source: str, revision: str | None) -> SourceCheckpoint:
    """Open a source; only a Hub id has revisions.

    Raises:
        UsageFault: If a revision is asked of a file or folder.
        MLAConvertError: See `open_source`.
    """
    from mla_convert.convert.checkpoint import open_source

    if revision is not None and Path(source).expanduser().exists():
        raise UsageFault("--revision is for a Hub id", found=f"a local path, {source}")
    return open_source(source, revision)


@dataclass(frozen=True)
class InspectResult:
    """An inspection and how it is printed."""

    inspection: Inspection

    def to_json(self) -> Mapping[str, object]:
        """See `Inspection.to_json`."""
        return self.inspection.to_json()

    def render(self, console: Console) -> None:
        """Facts, then the suggested plans, the legal widths and the profiles."""
        from rich.table import Table
        from rich.text import Text

        facts = Table.grid(padding=(0, 2))
        for name, value in self._facts():
            facts.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
        console.print(facts)
        self._render_plans(console)
        self._render_widths(console)
        self._render_profiles(console)

    def _facts(self) -> list[tuple[str, str]]:
        found = self.inspection
        shape, rope, cache = found.shape, found.rope, found.cache
        scaled = rope.unscaled_pairs < rope.pairs
        scaling = f", the first {rope.unscaled_pairs} of {rope.pairs} pairs unscaled" if scaled else ""
        heads = f"{shape.num_heads} query heads, {shape.num_kv_heads} of keys and values, size {shape.head_dim}"
        numbers = f"{cache.numbers_per_token_per_layer:,} numbers per token and layer"
        rows = [
            ("source", f"{found.location} ({found.kind})"),
            ("family", f"{found.family} ({found.architecture})"),
            ("shape", f"{found.num_layers} layers, hidden {shape.hidden_size}, vocabulary {found.vocab_size:,}"),
            ("attention", heads),
            ("rope", f"{rope.rope_type}, theta {rope.theta:g}{scaling}; {found.max_position_embeddings:,} positions"),
            ("tensors", ", ".join(f"{count} {dtype}" for dtype, count in found.dtype_counts.items())),
            ("biases", ", ".join(found.biases) or "none in attention"),
            ("output head", "tied to the embedding" if found.tied else "its own"),
            ("cache now", f"{numbers}, {cache.bytes_per_token:,} bytes per token ({cache.dtype})"),
        ]
        if found.revision is not None:
            rows.insert(1, ("revision", found.revision))
        if found.unknown_config_keys:
            rows.append(("unknown keys", ", ".join(found.unknown_config_keys)))
        return rows

    def _render_plans(self, console: Console) -> None:
        table = _table("Suggested plans")
        table.add_column("plan")
        for heading in ("kv_lora_rank", "qk_rope_head_dim", "numbers", "bytes/token", "of source"):
            table.add_column(heading, justify="right")
        for plan in self.inspection.plans:
            table.add_row(*_plan_cells(plan))
        console.print(table)
        dtypes = {plan.dtype for plan in self.inspection.plans} - {"source"}
        also = f" Add --dtype {dtypes.pop()}: {self.inspection.cache.dtype} is not written." if dtypes else ""
        console.print(
            f"numbers: cached per token and layer. All but the lossless plan want --calibration TEXT.{also}",
            soft_wrap=True,
        )

    def _render_widths(self, console: Console) -> None:
        found = self.inspection
        table = _table("Legal widths")
        for heading in ("option", "from", "to", "step"):
            table.add_column(heading, justify="left" if heading == "option" else "right")
        for policy, width in found.rope_widths.items():
            option = f"--qk-rope-head-dim, --rope-policy {policy}"
            table.add_row(option, str(width.lowest), str(width.highest), str(width.step))
        rank = found.rank_width
        table.add_row("--kv-lora-rank", str(rank.lowest), f"{rank.highest} *", str(rank.step))
        console.print(table)
        channel = " + 1, a row of the norm's constant" if found.norm_route == "constant" else ""
        shape = found.shape
        console.print(
            f"* min({shape.hidden_size}, {shape.cached_numbers} - qk_rope_head_dim){channel}: more carries nothing.",
            soft_wrap=True,
            highlight=False,
        )

    def _render_profiles(self, console: Console) -> None:
        from rich.text import Text

        table = _table("Profiles")
        table.add_column("profile")
        table.add_column("qk_rope_head_dim", justify="right")
        table.add_column("lossless")
        table.add_column("why not", overflow="fold")
        for facts in self.inspection.profiles:
            table.add_row(*map(Text, _profile_cells(facts)))
        console.print(table)
        console.print("qk_rope_head_dim: with --rope-policy optimal.", highlight=False)


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, title=Text(title, style="bold"), title_justify="left")


def _plan_cells(plan: SuggestedPlan) -> tuple[str, ...]:
    return (
        f"{plan.profile}{', lossless' if plan.lossless else ''}",
        str(plan.kv_lora_rank),
        str(plan.qk_rope_head_dim),
        f"{plan.cache.numbers_per_token_per_layer:,}",
        f"{plan.cache.bytes_per_token:,}",
        f"{plan.share:.1%}",
    )


def _profile_cells(facts: ProfileFacts) -> tuple[str, ...]:
    width = facts.qk_rope_head_dim
    return (
        facts.name,
        "none" if width is None else f"{width.lowest} to {width.highest}",
        "yes" if facts.lossless_refusal is None else "no",
        facts.refusal or facts.lossless_refusal or "",
    )
