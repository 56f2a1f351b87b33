"""Charts of quality on held-out text: by position, by domain, and over decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mla_convert.eval.report.chart import MUTED, SOURCE, TARGET, THIRD, Chart
from mla_convert.eval.report.grids import plain_log_ticks
from mla_convert.eval.report.table import Table, figure_columns, row, table
from mla_convert.eval.report.words import interval, number, short
from mla_convert.manifests.evaluation.figure import Figure
from mla_convert.manifests.evaluation.ladder import Drift
from mla_convert.manifests.evaluation.quality import PositionBucket, QualitySection, TextQuality

WIDTH = 9.0
# Where a bucket of the first position alone is drawn: a logarithmic axis has no place for 0.
_FIRST = 0.5


def domain_chart(quality: QualitySection) -> Chart:
    """Perplexity ratio and KL of every text, and of all together."""
    texts = [*quality.domains, quality.overall]
    worst = quality.worst_domain
    title = "Quality by domain"

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, name, figures in (
            (left, "perplexity ratio, converted / source", [text.ratio for text in texts]),
            (right, "KL(source ‖ converted), nats per token", [text.kl for text in texts]),
        ):
            _points(axes, figures)
            axes.set_xlabel(name)
        left.axvline(1, color=MUTED, linestyle=":", linewidth=1)
        left.set_yticks(range(len(texts)), labels=[short(text.name) for text in texts])
        left.set_ylim(len(texts) - 0.5, -0.5)

    return Chart(
        "domains",
        title,
        f"Points with their intervals, the last row is all text together. Worst is {short(worst.name, 60)}: "
        f"KL {number(worst.kl.value)}, {interval(worst.kl)}.",
        WIDTH,
        1.3 + 0.34 * len(texts),
        draw,
        domain_table(title, texts),
    )


def domain_table(title: str, texts: Sequence[TextQuality]) -> Table:
    """Every figure of every text."""
    figures = ("source_perplexity", "target_perplexity", "ratio", "kl", "top1", "top5", "ece_source", "ece_target")
    names = ["source perplexity", "converted perplexity", "ratio", "KL, nats", "same first token"]
    names += ["in the first five", "ECE, source", "ECE, converted"]
    columns = ["text", "windows", "tokens", *(column for name in names for column in figure_columns(name))]
    rows = [
        row([text.name, text.windows, text.tokens, *(getattr(text, figure) for figure in figures)]) for text in texts
    ]
    return table(title, columns, rows)


def position_chart(quality: QualitySection) -> Chart:
    """Ratio and KL by position in the window."""
    title = "Quality by position"
    series = [(f"windows of {quality.seq_len:,}", quality.buckets, TARGET)]
    if quality.long_context:
        series.append((f"long windows of {quality.long_seq_len or 0:,}", quality.long_context, THIRD))

    def draw(figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True)
        for name, buckets, colour in series:
            _band(top, buckets, [bucket.ratio for bucket in buckets], name, colour)
            _band(bottom, buckets, [bucket.kl for bucket in buckets], name, colour)
        top.axhline(1, color=MUTED, linestyle=":", linewidth=1)
        top.set_ylabel("perplexity ratio")
        bottom.set_ylabel("KL, nats")
        bottom.set_xscale("log", base=2)
        bottom.xaxis.set_major_formatter("{x:g}")
        bottom.set_xlabel("position in the window")
        top.legend(loc="best")

    columns = ["windows", "from", "to", "tokens", "source perplexity", "converted perplexity"]
    columns += [*figure_columns("ratio"), *figure_columns("KL, nats")]
    rows = [row(_bucket_cells(name, bucket)) for name, buckets, _ in series for bucket in buckets]
    words = "Converted beside source by the position of the predicted token; bands are intervals."
    if not quality.long_context:
        words += " No text was long enough for positions beyond the window."
    return Chart("positions", title, words, WIDTH, 5.0, draw, table(title, columns, rows))


def _bucket_cells(name: str, bucket: PositionBucket) -> list[str | int | float | Figure]:
    return [
        name,
        bucket.first,
        bucket.last,
        bucket.tokens,
        bucket.source_perplexity,
        bucket.target_perplexity,
        bucket.ratio,
        bucket.kl,
    ]


def _band(axes: Any, buckets: Sequence[PositionBucket], figures: Sequence[Figure], name: str, colour: str) -> None:
    middles = [max(_FIRST, (bucket.first + bucket.last) / 2) for bucket in buckets]
    values = [figure.value for figure in figures]
    axes.plot(middles, values, color=colour, marker="o", markersize=4, label=name)
    low = [figure.value if figure.low is None else figure.low for figure in figures]
    high = [figure.value if figure.high is None else figure.high for figure in figures]
    axes.fill_between(middles, low, high, color=colour, alpha=0.2, linewidth=0)


def _points(axes: Any, figures: Sequence[Figure]) -> None:
    for place, figure in enumerate(figures):
        last = place == len(figures) - 1
        colour = SOURCE if last else TARGET
        if figure.low is not None and figure.high is not None:
            axes.plot([figure.low, figure.high], [place, place], color=colour, linewidth=1.4)
        axes.plot(figure.value, place, marker="D" if last else "o", color=colour, markersize=6)
    axes.grid(visible=False, axis="y")


def drift_chart(drift: Drift) -> Chart:
    """KL of every decode step."""
    title = "Drift over decode steps"
    steps = range(1, len(drift.kl) + 1)
    positive = [value for value in drift.kl if value > 0]
    # A logarithmic axis has no place for what rounding leaves of a lossless conversion.
    logarithmic = len(positive) == len(drift.kl) > 0

    def draw(figure: Any) -> None:
        axes: Any = figure.add_subplot()
        axes.plot(steps, drift.kl, color=TARGET, linewidth=1, label="each step")
        quarter = max(1, len(drift.kl) // 4)
        ends = (
            (1, quarter, drift.first_quarter_kl),
            (len(drift.kl) - quarter + 1, len(drift.kl), drift.last_quarter_kl),
        )
        for index, (first, last, mean) in enumerate(ends):
            label = "mean of the first and the last quarter" if index == 0 else None
            axes.plot([first, last], [mean, mean], color=SOURCE, linewidth=2.6, label=label)
        axes.axhline(drift.one_pass_kl, color=THIRD, linestyle="--", label="mean in one pass without a cache")
        if logarithmic:
            axes.set_yscale("log")
            plain_log_ticks(axes.yaxis, min(positive), max(positive))
        axes.set_xlabel(f"decode step after a prefill of {drift.prefill:,} tokens")
        axes.set_ylabel("KL, nats")
        figure.legend(loc="outside upper left", ncols=3)

    words = (
        f"KL of each teacher-forced step. First quarter {number(drift.first_quarter_kl)}, last "
        f"{number(drift.last_quarter_kl)}, in one pass {number(drift.one_pass_kl)} nats; steps differ from one pass by "
        f"{number(drift.one_pass_error)} of the largest logit."
    )
    rows = [
        row(["first quarter", drift.first_quarter_kl]),
        row(["last quarter", drift.last_quarter_kl]),
        row(["one pass", drift.one_pass_kl]),
        row(["largest difference of a step from one pass, relative", drift.one_pass_error]),
        *(row([f"step {step}", value]) for step, value in zip(steps, drift.kl, strict=True)),
    ]
    return Chart("drift", title, words, WIDTH, 3.6, draw, table(title, ["what", "KL, nats"], rows))
