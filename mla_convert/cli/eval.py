"""`mla-convert eval`: perplexity, divergence and cache bytes of a converted folder beside its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mla_convert.cli.common import Backend, CommandResult, Debug, JsonFlag, Seed, run_command
from mla_convert.cli.eval_options import (
    AllowOverlap,
    Compare,
    Gates,
    MaxTokens,
    Out,
    Parts,
    SeqLen,
    Source,
    Strict,
    Stride,
    Suite,
    TextField,
    Texts,
)
from mla_convert.cli.eval_suite import SuiteResult
from mla_convert.errors import UsageFault
from mla_convert.eval import defaults

if TYPE_CHECKING:
    from rich.console import Console

    from mla_convert.eval.bootstrap import Interval
    from mla_convert.eval.evaluate import EvalOptions
    from mla_convert.eval.evaluation import Evaluation

HELP = (
    "Compare a converted folder with its source on held-out text: perplexity with bootstrap intervals, "
    "KL divergence, top-1 agreement, and cache bytes per token counted in the live cache. "
    "Both are loaded from their files and run in float32, the source by stock transformers, the converted folder from "
    "the pages of its latent cache. "
    "With --suite: every layer against the source's, decoding step by step, each text by itself, retrieval tasks, "
    "generation and speed, with a receipt in OUT/receipts; the exit code is 3 for a fault, a failed gate or withheld "
    "figures."
)
EXAMPLES = """
mla-convert eval OUT --source SOURCE --text heldout.jsonl
mla-convert eval OUT --source SOURCE --text books/ --text notes.txt --max-tokens 65536 --seq-len 1024
mla-convert eval OUT --source SOURCE --text heldout.jsonl --stride 256 --json
mla-convert eval OUT --source SOURCE --text wiki.jsonl --text code/ --suite quick --gates bars.yaml --strict
mla-convert eval OUT --source SOURCE --text wiki.jsonl --suite full --part ladder --part quality
mla-convert eval --compare OUT_A OUT_B
"""


def command(
    out: Out = None,
    source: Source = None,
    text: Texts = None,
    suite: Suite = None,
    part: Parts = None,
    gates: Gates = None,
    strict: Strict = False,
    compare: Compare = None,
    max_tokens: MaxTokens = defaults.MAX_TOKENS,
    seq_len: SeqLen = defaults.SEQ_LEN,
    stride: Stride = None,
    text_field: TextField = "text",
    allow_overlap: AllowOverlap = False,
    backend: Backend = "auto",
    seed: Seed = 0,
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Evaluate `out` against `source`."""

    def body() -> CommandResult:
        if compare is not None:
            if out is not None or source is not None or text or suite:
                raise UsageFault("--compare reads two receipts and takes no OUT, --source, --text or --suite")
            return _compared(*compare, seed)
        if out is None or source is None or not text:
            missing = [n for n, given in (("OUT", out), ("--source", source), ("--text", text)) if not given]
            raise UsageFault("nothing to evaluate", expected="OUT, --source and --text", found=_no(missing))
        if suite is None and (part or gates or strict):
            raise UsageFault("--part, --gates and --strict belong to a suite", expected="--suite quick or full")
        from mla_convert.eval.evaluate import EvalOptions, evaluate

        options = EvalOptions(
            max_tokens=max_tokens,
            seq_len=seq_len,
            stride=stride,
            backend=backend,
            seed=seed,
            allow_overlap=allow_overlap,
            text_field=text_field,
        )
        if suite is None:
            return EvalResult(evaluate(out, source, text, options))
        return _run_suite(out, source, text, options, suite, part, gates, strict)

    run_command(json_output, body, debug=debug)


def _no(missing: list[str]) -> str:
    return "no " + ", no ".join(missing)


def _run_suite(
    out: Path,
    source: str,
    texts: list[str],
    options: EvalOptions,
    suite: Literal["quick", "full"],
    parts: list[str] | None,
    gates: Path | None,
    strict: bool,
) -> CommandResult:
    from mla_convert.eval.gates import load_gates
    from mla_convert.eval.suite import PARTS, SuiteRequest, run_suite, write_receipt

    bars = () if gates is None else load_gates(gates)
    names = tuple(parts) if parts else tuple(PARTS)
    receipt = run_suite(SuiteRequest(out, source, tuple(texts), options, suite, names, bars, strict))
    return SuiteResult(receipt, write_receipt(receipt, out))


def _compared(a: Path, b: Path, seed: int) -> CommandResult:
    from mla_convert.eval.compare import compare_receipts
    from mla_convert.manifests.evaluation.reading import load_receipt

    return compare_receipts(load_receipt(a), load_receipt(b), seed)


@dataclass(frozen=True)
class EvalResult:
    """An evaluation and how it is printed."""

    evaluation: Evaluation

    def to_json(self) -> Mapping[str, object]:
        """See `Evaluation.to_json`."""
        return self.evaluation.to_json()

    def render(self, console: Console) -> None:
        """One table, and under it what is needed to repeat it."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("", "source", "target", "target against source"):
            table.add_column(heading, justify="left" if heading == "" else "right")
        for row in self._rows():
            table.add_row(*map(Text, row))
        console.print(table)
        for line in self._conditions():
            console.print(Text(line), soft_wrap=True)

    def _rows(self) -> list[tuple[str, str, str, str]]:
        before, after = self.evaluation.source_cache, self.evaluation.target_cache
        return [
            (
                "perplexity",
                self._spread("source_perplexity", ".2f"),
                self._spread("target_perplexity", ".2f"),
                f"× {self._spread('ratio', '.4f')}",
            ),
            ("KL(source ‖ target), nats", "", "", self._spread("kl", ".3g")),
            ("top-1 agreement", "", "", self._spread("top1_agreement", ".2%")),
            (
                f"cache bytes per token, {after.dtype}",
                f"{before.bytes_per_token:,}",
                f"{after.bytes_per_token:,}",
                f"{after.bytes_per_token / before.bytes_per_token:.1%}",
            ),
            (
                "cached numbers per token",
                f"{before.numbers_per_token:,}",
                f"{after.numbers_per_token:,}",
                f"{after.numbers_per_token / before.numbers_per_token:.1%}",
            ),
        ]

    def _spread(self, name: str, form: str) -> str:
        value, intervals = getattr(self.evaluation.figures, name), self.evaluation.intervals
        if intervals is None:
            return f"{value:{form}}"
        interval: Interval = getattr(intervals, name)
        return f"{value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"

    def _conditions(self) -> list[str]:
        done, text, intervals = self.evaluation, self.evaluation.text, self.evaluation.intervals
        tokens = f"{text.tokens:,} of {text.text_tokens:,}, {text.scored_tokens:,} of them scored"
        lines = [
            f"text     {', '.join(text.names)}",
            f"sha256   {text.sha256}",
            f"tokens   {tokens}",
            f"windows  {text.windows} of {done.seq_len}, stride {done.stride}, seed {done.seed}; float32",
        ]
        if intervals is not None:
            share = f"{intervals.confidence:.0%}"
            lines.append(f"[ , ]    {share} of {intervals.resamples:,} resamples of the windows")
        if text.shared_with_calibration:
            count = len(text.shared_with_calibration)
            lines.append(f"warning  {count} document(s) of the text were calibration text")
        return lines
