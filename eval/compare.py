"""Two evaluations against each other: which differences are more than the choice of windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from mla_convert.errors import InputRefused
from mla_convert.eval.bootstrap import (
    DEFAULT_CONFIDENCE,
    DEFAULT_RESAMPLES,
    Floats,
    Interval,
    draw_weights,
    percentiles,
)
from mla_convert.manifests.evaluation.quality import QualitySection, WindowSums
from mla_convert.manifests.evaluation.receipt import EvaluationReceipt

if TYPE_CHECKING:
    from rich.console import Console

ALL_TEXTS = "all texts"
FigureName = Literal["ratio", "kl", "top1"]
Verdict = Literal["A is better", "B is better", "no real difference", "too few windows"]
LABELS: dict[FigureName, str] = {"ratio": "ppl ratio", "kl": "KL, nats", "top1": "top-1"}


@dataclass(frozen=True)
class Difference:
    """One figure of A and of B on the same windows.

    Attributes:
        figure: Which one; of `ratio` and `kl` less is better, of `top1` more.
        a: Value of A.
        b: Value of B.
        difference: B less A.
        interval: Paired bootstrap interval of the difference; None for a single window.
        verdict: Which is better if the interval excludes 0 and there are windows enough to say so.
    """

    figure: FigureName
    a: float
    b: float
    difference: float
    interval: Interval | None
    verdict: Verdict


@dataclass(frozen=True)
class TextComparison:
    """One text, or all of them.

    Attributes:
        name: Of the text, as A has it.
        windows: Windows that both have.
        tokens: Their scored tokens.
        differences: By figure.
    """

    name: str
    windows: int
    tokens: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Comparison:
    """Two converted checkpoints of one source.

    Attributes:
        a: Folder of A.
        b: Folder of B.
        a_manifest: Digest of A's manifest.
        b_manifest: Digest of B's manifest.
        texts: All texts together, then each.
        left_out: Windows that only one of them has.
        resamples: Of the bootstrap.
        confidence: Of each interval by itself.
        seed: Of the bootstrap.
        enough: Fewest windows on which a difference can be called real.
    """

    a: str
    b: str
    a_manifest: str
    b_manifest: str
    texts: tuple[TextComparison, ...]
    left_out: int
    resamples: int
    confidence: float
    seed: int
    enough: int

    def to_json(self) -> dict[str, object]:
        """Everything, unrounded; differences are B less A."""
        return {"schema_version": "mla-convert/comparison/v1", **asdict(self)}

    def render(self, console: Console) -> None:
        """A table of differences that fits 100 columns, and how to read it."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for heading in ("text", "figure", "A", "B", "B − A", "interval", "verdict"):
            side: Literal["left", "right"] = "left" if heading in ("text", "figure", "verdict") else "right"
            table.add_column(heading, justify=side, no_wrap=True)
        for text in self.texts:
            for row in _rows(text):
                table.add_row(*map(Text, row))
        for label, folder, manifest in (("A", self.a, self.a_manifest), ("B", self.b, self.b_manifest)):
            console.print(Text(f"{label}        {folder}, manifest {manifest[:16]}"), soft_wrap=True)
        console.print(table)
        for line in self._notes():
            console.print(Text(line), soft_wrap=True)

    def _notes(self) -> Iterator[str]:
        yield (
            f"[ , ]    {self.confidence:.0%} of {self.resamples:,} paired resamples of the windows, each figure by "
            f"itself; seed {self.seed}"
        )
        yield "ppl ratio: target's perplexity over the source's; of it and of KL less is better; of top-1 more"
        yield f"windows  {self.texts[0].windows} in both; {self.enough} needed to call a difference real"
        if self.left_out:
            yield f"left out {self.left_out} windows that only one of the two has"


def compare_receipts(
    a: EvaluationReceipt, b: EvaluationReceipt, seed: int = 0, resamples: int = DEFAULT_RESAMPLES
) -> Comparison:
    """Compare two evaluations by a paired bootstrap over the windows that both have.

    A resample draws the same windows for both, so that what is hard about a text is in neither's interval. A
    difference is called real if the interval excludes 0 and there are windows enough: with n of them all of one sign,
    which happens by chance in `2^(1 − n)` of the cases, every resample agrees, so fewer than 6 prove nothing at 95%.

    Args:
        a: One evaluation.
        b: The other.
        seed: Of the resamples.
        resamples: How many.

    Raises:
        InputRefused: If they have no quality part, or were not made on the same source, texts, lengths and windows.
    """
    first, second = _quality(a, "A"), _quality(b, "B")
    _refuse_unlike(a, b, first, second)
    pairs = _shared_windows(first, second)
    if not pairs:
        raise InputRefused(
            "the two evaluations have no window in common",
            expected="the same --max-tokens, --seed and suite",
            found=f"{len(first.windows)} and {len(second.windows)} windows of the same texts",
        )
    names = {text.sha256: text.name for text in first.domains}
    enough = windows_needed(DEFAULT_CONFIDENCE)
    texts = [TextComparison(ALL_TEXTS, *_compare(list(pairs.values()), seed, resamples, enough))]
    for sha256, name in names.items():
        own = [pair for key, pair in pairs.items() if key.text == sha256]
        if own:
            texts.append(TextComparison(name, *_compare(own, seed, resamples, enough)))
    return Comparison(
        a=a.compared.target,
        b=b.compared.target,
        a_manifest=a.compared.manifest_sha256,
        b_manifest=b.compared.manifest_sha256,
        texts=tuple(texts),
        left_out=len(first.windows) + len(second.windows) - 2 * len(pairs),
        resamples=resamples,
        confidence=DEFAULT_CONFIDENCE,
        seed=seed,
        enough=enough,
    )


def windows_needed(confidence: float) -> int:
    """Fewest windows whose agreement in sign is rarer by chance than 1 − confidence: `2^(1 − n) <= 1 − confidence`."""
    count = 1
    while 2.0 ** (1 - count) > 1 - confidence:
        count += 1
    return count


def _quality(receipt: EvaluationReceipt, label: str) -> QualitySection:
    if receipt.quality is None:
        raise InputRefused(
            f"{label} has no quality part",
            where=receipt.compared.target,
            remedy="Evaluate it with the quality part.",
        )
    return receipt.quality


def _refuse_unlike(a: EvaluationReceipt, b: EvaluationReceipt, first: QualitySection, second: QualitySection) -> None:
    # Sixteen digits tell texts apart and leave the line readable.
    texts = [", ".join(sorted(text.sha256[:16] for text in quality.domains)) for quality in (first, second)]
    for what, one, other in (
        ("sources", a.compared.source_digest, b.compared.source_digest),
        ("texts", *texts),
        ("window lengths", first.seq_len, second.seq_len),
        ("strides", first.stride, second.stride),
        ("BOS policies", first.bos_policy, second.bos_policy),
        ("dtypes", first.dtype, second.dtype),
    ):
        if one != other:
            raise InputRefused(f"the {what} of the two evaluations differ", expected=f"{one} (A)", found=f"{other} (B)")


@dataclass(frozen=True, order=True)
class _Key:
    """What makes two windows the same: text, place, tokens and how many of them are scored."""

    text: str
    start: int
    ids_digest: str
    tokens: int


def _keyed(quality: QualitySection) -> dict[_Key, WindowSums]:
    digests = {text.name: text.sha256 for text in quality.domains}
    return {_Key(digests[item.text], item.start, item.ids_digest, item.tokens): item for item in quality.windows}


def _shared_windows(a: QualitySection, b: QualitySection) -> dict[_Key, tuple[WindowSums, WindowSums]]:
    first, second = _keyed(a), _keyed(b)
    # Sorted, so that A against B draws as B against A.
    return {key: (first[key], second[key]) for key in sorted(first.keys() & second.keys())}


def _compare(
    pairs: Sequence[tuple[WindowSums, WindowSums]], seed: int, resamples: int, enough: int
) -> tuple[int, int, tuple[Difference, ...]]:
    """Windows, tokens and differences."""
    count = len(pairs)
    one = np.ones((1, count))
    values = [_values([pair[side] for pair in pairs], one) for side in (0, 1)]
    drawn: list[dict[FigureName, Floats]] = []
    if count > 1:
        weights = draw_weights(count, seed, resamples)
        drawn = [_values([pair[side] for pair in pairs], weights) for side in (0, 1)]
    differences = []
    for name in LABELS:
        a, b = (float(value[name][0]) for value in values)
        interval = percentiles(drawn[1][name] - drawn[0][name], DEFAULT_CONFIDENCE) if drawn else None
        verdict = _verdict(name, interval, count >= enough)
        differences.append(Difference(name, a, b, b - a, interval, verdict))
    return count, sum(pair[0].tokens for pair in pairs), tuple(differences)


def _values(windows: Sequence[WindowSums], weights: Floats) -> dict[FigureName, Floats]:
    """The figures for each row of (R, N) window weights, (R,)."""
    sums = np.array([(w.tokens, w.source_nll, w.target_nll, w.kl, w.top1) for w in windows], dtype=np.float64)
    tokens, source, target, kl, top1 = (weights @ sums).T
    return {"ratio": np.exp((target - source) / tokens), "kl": kl / tokens, "top1": top1 / tokens}


def _verdict(figure: FigureName, interval: Interval | None, enough: bool) -> Verdict:
    if interval is None or not enough:
        return "too few windows"
    if interval.low <= 0 <= interval.high:
        return "no real difference"
    more_is_better = figure == "top1"
    return "B is better" if (interval.low > 0) == more_is_better else "A is better"


def _rows(text: TextComparison) -> Iterator[tuple[str, ...]]:
    for number, item in enumerate(text.differences):
        form = ".2%" if item.figure == "top1" else ".4f"
        ends = item.interval
        spread = "" if ends is None else f"[{ends.low:+{form}}, {ends.high:+{form}}]"
        name = _short(text.name) if number == 0 else ""
        verdict = "not real" if item.verdict == "no real difference" else item.verdict
        yield (
            name,
            LABELS[item.figure],
            *(f"{v:{form}}" for v in (item.a, item.b)),
            f"{item.difference:+{form}}",
            spread,
            verdict,
        )


def _short(name: str, width: int = 18) -> str:
    """The end of a long name, which says more than its beginning."""
    return name if len(name) <= width else f"…{name[1 - width :]}"
