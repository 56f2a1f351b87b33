"""Charts with a place for every layer: errors by stage, singular values, rotary slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.ticker import MaxNLocator

from mla_convert.eval.report.chart import FAULT, SOURCE, TARGET, THIRD, Chart
from mla_convert.eval.report.grids import COLOURS, Grid, add_colour_bar, draw_grid, log_scale, plain_log_ticks
from mla_convert.eval.report.table import Cell, row, table
from mla_convert.eval.report.words import number
from mla_convert.manifests.evaluation.ladder import LadderSection, LayerLadder
from mla_convert.manifests.layers import LayerReceipt
from mla_convert.manifests.models import ConversionManifest

WIDTH = 9.0
_FEW = 3
# The middle of the map: its ends vanish on a dark or on a light page.
LINE_COLOURS: Final = ListedColormap(COLOURS([0.32 + 0.5 * step / 47 for step in range(48)]))
COUNT_COLOURS: Final = (SOURCE, TARGET, THIRD, FAULT)


@dataclass(frozen=True)
class StageColumn:
    """One row of the heat map: its name, what it reads of a layer, and the stage whose findings are marked on it."""

    name: str
    read: Callable[[LayerLadder], float]
    stage: str | None = None


STAGES: Final = (
    StageColumn("key map", lambda layer: layer.key_map_error, "key map"),
    StageColumn("key map, weighted", lambda layer: layer.weighted_key_map_error),
    StageColumn("value map", lambda layer: layer.value_map_error, "value map"),
    StageColumn("value map, weighted", lambda layer: layer.weighted_value_map_error),
    StageColumn("energy lost", lambda layer: max(0.0, 1 - layer.singular_energy_kept)),
    StageColumn("content score", lambda layer: layer.content_score_error, "content score"),
    StageColumn("position score", lambda layer: layer.position_score_error, "position score"),
    StageColumn("score", lambda layer: layer.score_error),
    StageColumn("row maximum", lambda layer: layer.row_max_error),
    StageColumn("log-sum-exp", lambda layer: layer.lse_error),
    StageColumn("total variation", lambda layer: layer.total_variation, "attention probability"),
    StageColumn("output", lambda layer: layer.output_error, "layer output"),
    StageColumn("output, prefix fed", lambda layer: layer.prefix_output_error),
    StageColumn("residual stream", lambda layer: layer.stream_error),
    StageColumn("rest of the layer", lambda layer: layer.rest_error, "rest of the layer"),
)


def ladder_chart(ladder: LadderSection) -> Chart:
    """Layer by stage, as the evaluation measured it."""
    values = [[stage.read(layer) for layer in ladder.layers] for stage in STAGES]
    found = {(finding.stage, finding.layer) for finding in ladder.findings}
    marked = frozenset(
        (i, j)
        for i, stage in enumerate(STAGES)
        for j, layer in enumerate(ladder.layers)
        if (stage.stage, layer.index) in found
    )
    worst = ladder.worst_layer
    return _heat_map(
        "layer-errors",
        "Error by layer and stage",
        f"Relative errors, on a logarithmic scale; layer {worst} has the largest output error on the source's input. "
        "Grey is exactly zero; a cross marks a fault.",
        [stage.name for stage in STAGES],
        [layer.index for layer in ladder.layers],
        values,
        marked,
    )


def conversion_error_chart(layers: Sequence[LayerReceipt]) -> Chart:
    """Layer by stage as the conversion recorded it, for a folder that has not been evaluated."""
    columns: dict[str, list[float | None]] = {
        "key map": [layer.key_map_error for layer in layers],
        "key map, weighted": [layer.weighted_key_error for layer in layers],
        "value map": [layer.value_map_error for layer in layers],
        "value map, weighted": [layer.weighted_value_error for layer in layers],
        "energy lost": [max(0.0, 1 - layer.singular_energy_kept) for layer in layers],
    }
    kept = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    return _heat_map(
        "layer-errors",
        "Error by layer, as the conversion recorded it",
        "Relative errors, on a logarithmic scale. Grey is exactly zero.",
        list(kept),
        [layer.index for layer in layers],
        list(kept.values()),
        frozenset(),
    )


def _heat_map(
    key: str,
    title: str,
    description: str,
    stages: Sequence[str],
    layers: Sequence[int],
    values: Sequence[Sequence[float | None]],
    marked: frozenset[tuple[int, int]],
) -> Chart:
    grid = Grid(tuple(map(tuple, values)), tuple(stages), tuple(map(str, layers)), marked=marked)

    def draw(figure: Any) -> None:
        axes: Any = figure.add_subplot()
        scale = log_scale(grid.shown)
        draw_grid(axes, grid, scale)
        axes.set_xlabel("layer")
        add_colour_bar(figure, axes, scale, "relative error")

    rows = [row([str(layer), *(line[j] for line in values)]) for j, layer in enumerate(layers)]
    content = table(title, ["layer", *stages], rows)
    return Chart(key, title, description, WIDTH, 1.0 + 0.3 * len(stages), draw, content)


def spectra_chart(manifest: ConversionManifest) -> Chart | None:
    """Singular values of every layer with the rank that was kept, None where none were recorded."""
    layers = [layer for layer in manifest.layers if layer.singular_values]
    if not layers:
        return None
    kept = max(len(layer.singular_values) for layer in layers)
    title = "Singular values of the compressed maps"
    content = table(
        title,
        ["layer", "useful rank", "stored rank", *map(str, range(1, kept + 1))],
        [
            row([str(layer.index), layer.useful_rank, layer.kv_lora_rank, *layer.singular_values, *_gap(kept, layer)])
            for layer in layers
        ],
    )

    def draw(figure: Any) -> None:
        axes: Any = figure.add_subplot()
        _draw_spectra(figure, axes, layers)

    return Chart(
        "spectra", title, _spectra_words(layers, kept, manifest.method.factorization), WIDTH, 4.4, draw, content
    )


def _gap(kept: int, layer: LayerReceipt) -> list[None]:
    return [None] * (kept - len(layer.singular_values))


def _spectra_words(layers: Sequence[LayerReceipt], kept: int, factorization: str) -> str:
    ranks = sorted({layer.useful_rank for layer in layers})
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    words = f"Each line is a layer, relative to its first value; dashed, the rank that is kept ({rank})."
    if ranks[-1] > kept:
        words += f" The manifest holds the first {kept} values, so the kept rank lies to the right of the lines."
    if factorization == "split":
        words += " Keys and values were factorised apart: the values of the keys come first, so a line may rise once."
    return words


def _draw_spectra(figure: Any, axes: Any, layers: Sequence[LayerReceipt]) -> None:
    scale = _layer_scale(layers)
    smallest = []
    for layer in layers:
        first = max(layer.singular_values)
        shares = [value / first if first else 0.0 for value in layer.singular_values]
        smallest += [share for share in shares if share > 0]
        axes.plot(
            range(1, len(shares) + 1),
            [share if share > 0 else None for share in shares],
            color=LINE_COLOURS(scale(layer.index)),
            linewidth=1.1,
            marker="." if len(shares) <= _FEW else None,
        )
    ranks = Counter(layer.useful_rank for layer in layers)
    for rank in ranks:
        axes.axvline(rank, color=TARGET, linestyle="--", linewidth=1.2 if len(ranks) <= _FEW else 0.6)
    if smallest:
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis, min(smallest), 1)
    axes.set_xlim(left=0)
    axes.set_xlabel("index of the singular value")
    axes.set_ylabel("share of the layer's first")
    _layer_bar(figure, axes, layers)


def _layer_scale(layers: Sequence[LayerReceipt]) -> Normalize:
    indices = [layer.index for layer in layers]
    return Normalize(min(indices), max(indices) if max(indices) > min(indices) else min(indices) + 1)


def _layer_bar(figure: Any, axes: Any, layers: Sequence[LayerReceipt]) -> None:
    if len(layers) > 1:
        bar = figure.colorbar(ScalarMappable(_layer_scale(layers), LINE_COLOURS), ax=axes, label="layer", pad=0.01)
        bar.outline.set_visible(False)
        bar.ax.grid(visible=False)


def rope_chart(manifest: ConversionManifest) -> Chart | None:
    """Frequencies that stay rotary, by layer; None where no layer has any."""
    layers = [layer for layer in manifest.layers if layer.rope_slots]
    if not layers:
        return None
    slots = max(len(layer.rope_slots) for layer in layers)
    counts = Counter((layer.index, slot.frequency) for layer in layers for slot in layer.rope_slots)
    title = "Rotary slots by frequency and layer"
    rows = [
        row(
            [
                str(layer.index),
                *(Cell(f"{number(slot.frequency)} (pair {slot.pair})", slot.frequency) for slot in layer.rope_slots),
                *[None] * (slots - len(layer.rope_slots)),
            ]
        )
        for layer in layers
    ]
    still = sum(frequency <= 0 for _, frequency in counts)
    description = (
        f"Each dot is a frequency at which a layer still rotates, in radians per token; up to {slots} slots a layer. "
        "The colour counts the slots that share a frequency."
        + (f" {still} slots do not turn at all and are in the table only." if still else "")
    )
    content = table(title, ["layer", *(f"slot {slot}" for slot in range(slots))], rows)

    def draw(figure: Any) -> None:
        _draw_slots(figure, {place: count for place, count in counts.items() if place[1] > 0})

    return Chart("rope-slots", title, description, WIDTH, 4.2, draw, content)


def _draw_slots(figure: Any, counts: dict[tuple[int, float], int]) -> None:
    axes: Any = figure.add_subplot()
    most = len(COUNT_COLOURS)
    for count in sorted({min(count, most) for count in counts.values()}):
        places = [place for place, found in counts.items() if min(found, most) == count]
        name = f"{count}{' or more' if count == most else ''} {'slot' if count == 1 else 'slots'}"
        layers, frequencies = zip(*places, strict=True)
        axes.plot(
            layers, frequencies, color=COUNT_COLOURS[count - 1], marker="s", markersize=4, linestyle="none", label=name
        )
    if counts:
        axes.set_yscale("log")
        turning = [frequency for _, frequency in counts]
        plain_log_ticks(axes.yaxis, min(turning), max(turning))
        figure.legend(loc="outside upper left", ncols=most)
    indices = [layer for layer, _ in counts]
    if indices:
        axes.set_xlim(min(indices) - 1, max(indices) + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer")
    axes.set_ylabel("frequency, radians per token")
