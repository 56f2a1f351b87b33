"""How a run of the evaluation suite is printed, and with which exit code it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mla_convert.errors import CheckFailed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mla_convert.manifests.evaluation.figure import Figure
    from mla_convert.manifests.evaluation.receipt import EvaluationReceipt
    from mla_convert.manifests.evaluation.systems import SpeedRow

WIDTH = 100
NAME_WIDTH = 32


@dataclass(frozen=True)
class SuiteResult:
    """A receipt and where it was written."""

    receipt: EvaluationReceipt
    path: Path

    @property
    def exit_code(self) -> int:
        """3 for a fault, a failed gate or withheld figures."""
        return CheckFailed.exit_code if self.alarms else 0

    @property
    def alarms(self) -> tuple[str, ...]:
        """Everything that makes the run fail, one line each."""
        receipt = self.receipt
        found = () if receipt.ladder is None else receipt.ladder.findings
        withheld = None if receipt.systems is None else receipt.systems.withheld
        return (
            *(f"FAULT  {_where(item.layer)}{item.stage}: {item.what}" for item in found),
            *([] if withheld is None else [f"WITHHELD  speed: {withheld}"]),
            *(
                f"GATE  {gate.figure}: {_bar(gate.at_least, gate.at_most)}, "
                f"found {'nothing' if gate.measured is None else repr(gate.measured)}"
                for gate in receipt.gates
                if not gate.passed
            ),
        )

    def to_json(self) -> Mapping[str, object]:
        """The receipt, its path, and what failed."""
        return {**self.receipt.model_dump(mode="json"), "receipt_path": self.path, "alarms": list(self.alarms)}

    def render(self, console: Console) -> None:
        """Tables of at most 100 columns, the worst first, and at the end what failed."""
        from rich.text import Text

        for table in self._tables():
            console.print(table, width=min(WIDTH, console.width))
        for line in self._lines():
            console.print(Text(line), soft_wrap=True)
        for alarm in self.alarms:
            console.print(Text(alarm, style="bold red"), soft_wrap=True)
        if not self.alarms:
            climbed = self.receipt.ladder is not None
            said = "no fault found" if climbed else "the ladder was not run, so nothing is said of faults"
            gates = f"; {len(self.receipt.gates)} gates met" if self.receipt.gates else ""
            console.print(Text(f"{said}{gates}", style="bold green" if climbed else "bold"))

    def _tables(self) -> Iterator[Table]:
        receipt = self.receipt
        if receipt.quality is not None:
            rows = []
            for text in (receipt.quality.overall, *receipt.quality.domains):
                row = [_short(text.name), f"{text.source_perplexity.value:.2f}", _spread(text.ratio, ".3f")]
                row += [_spread(text.kl, ".3f"), f"{text.top1.value:.1%}", f"{text.top5.value:.1%}"]
                rows.append([*row, f"{text.ece_target.value - text.ece_source.value:+.3f}"])
            headings = ("text", "source", "perplexity ×", "KL, nats", "top-1", "top-5", "ECE shift")
            yield _table("Quality", headings, rows)
        if receipt.tasks is not None:
            rows = [
                [
                    f"{cell.task} {cell.length}" + ("" if cell.depth is None else f" at {cell.depth:.0%}"),
                    f"{cell.source_match:.0%}",
                    f"{cell.target_match:.0%}",
                    _spread(cell.difference, "+.2f"),
                    cell.verdict,
                ]
                for cell in receipt.tasks.cells
            ]
            columns = ("task, tokens", "source", "target", "Δ log-prob of the answer", "verdict")
            yield _table("Retrieval and position", columns, rows)
        if receipt.systems is not None and receipt.systems.withheld is None:
            rows = [list(_speed(row)) for row in receipt.systems.rows]
            yield _table("Speed", ("prompt, batch", "", "TTFT s", "TPOT ms", "tokens/s", "goodput", "peak MB"), rows)

    def _lines(self) -> Iterator[str]:
        receipt = self.receipt
        ladder = receipt.ladder
        if ladder is not None:
            worst = ladder.layers[ladder.worst_layer]
            yield (
                f"worst layer   {worst.index} of {len(ladder.layers)}: output error {worst.output_error:.3f}, scores "
                f"{worst.score_error:.3f}, total variation {worst.total_variation:.3f}"
            )
            drift = ladder.drift
            yield (
                f"drift         KL {drift.first_quarter_kl:.3f} at first, {drift.last_quarter_kl:.3f} at the end of "
                f"{drift.steps} decoded steps; off one pass by {drift.one_pass_error:.1e}"
            )
        if receipt.decomposition is not None:
            parts = [
                f"{part.name} {part.variant} {'–' if part.error is None else f'{part.error:.1e}'}"
                for part in receipt.decomposition.parts
            ]
            yield f"error parts   {'; '.join(parts)}"
        if receipt.quality is not None:
            worst_text = receipt.quality.worst_domain
            yield f"worst domain  {worst_text.name}: KL {worst_text.kl.value:.3f}, × {worst_text.ratio.value:.3f}"
        if receipt.tasks is not None:
            informative = [cell for cell in receipt.tasks.cells if cell.verdict != "uninformative"]
            lost = sum(cell.verdict == "lost" for cell in informative)
            yield f"retrieval     {lost} of {len(informative)} tasks that the source can do are lost"
            for left in receipt.tasks.left_out:
                yield f"left out      {left.task} at {left.length} tokens: {left.reason}"
        if receipt.generation is not None:
            done = receipt.generation
            yield (
                f"generation    {done.median_identical_prefix:g} of {done.new_tokens} tokens identical (median of "
                f"{len(done.samples)}); repetition {done.source_repetition:.1%} → {done.target_repetition:.1%}"
            )
        if receipt.systems is not None:
            yield from _cache_lines(receipt)
        for item in receipt.overlap:
            yield f"overlap       {item.document}: {item.by}, {item.share:.1%}"
        for reason in receipt.overlap_unchecked:
            yield f"not checked   for overlap with {reason}"
        yield f"took          {', '.join(_time(part.part, part.seconds, part.reused) for part in receipt.times)}"
        yield f"receipt       {self.path}"


def _cache_lines(receipt: EvaluationReceipt) -> Iterator[str]:
    assert receipt.systems is not None  # the caller has it
    for cache in receipt.systems.cache:
        yield (
            f"cache         {cache.subject}: {cache.payload_bytes_per_token:,.0f} bytes per token ({cache.dtype}), "
            f"{cache.formula_bytes_per_token:,.0f} by formula; {cache.resident_bytes:,} held at {cache.tokens} tokens"
        )
    ran = receipt.systems.dispatch
    yield f"backend       asked {ran.requested}, ran {ran.ran}, {ran.calls} calls, {ran.fallbacks} fallbacks"


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _spread(figure: Figure, form: str) -> str:
    if figure.low is None or figure.high is None:
        return f"{figure.value:{form}}"
    return f"{figure.value:{form}} [{figure.low:{form}}, {figure.high:{form}}]"


def _speed(row: SpeedRow) -> Iterator[str]:
    yield f"{row.prompt_tokens}, {row.batch}"
    yield row.subject
    for value, form in (
        (row.ttft_s, ".2f"),
        (None if row.tpot_s is None else row.tpot_s * 1000, ".1f"),
        (row.tokens_per_s, ".1f"),
        (row.goodput_tokens_per_s, ".1f"),
        (None if row.peak_bytes is None else row.peak_bytes / 1e6, ".0f"),
    ):
        yield "–" if value is None else f"{value:{form}}"


def _time(part: str, seconds: float, reused: bool) -> str:
    return f"{part} {seconds:.0f} s{' (kept)' if reused else ''}"


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else "…" + name[1 - NAME_WIDTH :]


def _where(layer: int | None) -> str:
    return "" if layer is None else f"layer {layer}, "


def _bar(at_least: float | None, at_most: float | None) -> str:
    bars = [] if at_least is None else [f"at least {at_least!r}"]
    return " and ".join([*bars, *([] if at_most is None else [f"at most {at_most!r}"])])
