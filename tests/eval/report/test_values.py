"""Every figure that is shown is the receipt's or the manifest's, unrounded in the machine's copy of it."""

from __future__ import annotations

import pytest

from mla_convert.eval.report.inputs import ReportInput
from mla_convert.eval.report.layer_charts import STAGES
from mla_convert.manifests.evaluation.figure import Figure
from mla_convert.manifests.evaluation.receipt import EvaluationReceipt
from tests.eval.report.parse import Page, values

FOUR_DIGITS = 5e-4


@pytest.fixture(scope="module")
def page(full_page: str) -> Page:
    return Page(full_page)


@pytest.fixture
def receipt(full_input: ReportInput) -> EvaluationReceipt:
    assert full_input.receipt is not None
    return full_input.receipt


def spread(figure: Figure) -> list[float]:
    return [value for value in (figure.value, figure.low, figure.high) if value is not None]


def test_layer_errors(page: Page, receipt: EvaluationReceipt) -> None:
    assert receipt.ladder is not None
    table = page.table("Error by layer and stage")

    assert table.columns == ["layer", *(stage.name for stage in STAGES)]
    assert [row[0][0] for row in table.rows] == [str(layer.index) for layer in receipt.ladder.layers]
    expected = [[stage.read(layer) for stage in STAGES] for layer in receipt.ladder.layers]
    assert values(table) == expected
    recorded = {value for layer in receipt.ladder.layers for value in layer.model_dump().values()}
    shown = {value for row in values(table) for value in row}
    assert recorded - shown - {layer.index for layer in receipt.ladder.layers} == {
        layer.singular_energy_kept for layer in receipt.ladder.layers
    }


def test_singular_values_and_rope_slots(page: Page, full_input: ReportInput) -> None:
    layers = full_input.manifest.layers

    spectra = values(page.table("Singular values of the compressed maps"))
    assert spectra == [[layer.useful_rank, layer.kv_lora_rank, *layer.singular_values] for layer in layers]
    slots = values(page.table("Rotary slots by frequency and layer"))
    assert slots == [[slot.frequency for slot in layer.rope_slots] for layer in layers]


def test_quality(page: Page, receipt: EvaluationReceipt) -> None:
    quality = receipt.quality
    assert quality is not None
    names = ("source_perplexity", "target_perplexity", "ratio", "kl", "top1", "top5", "ece_source", "ece_target")
    texts = [*quality.domains, quality.overall]
    expected = [
        [text.windows, text.tokens, *(value for name in names for value in spread(getattr(text, name)))]
        for text in texts
    ]

    assert values(page.table("Quality by domain")) == expected
    buckets = [
        [b.first, b.last, b.tokens, b.source_perplexity, b.target_perplexity, *spread(b.ratio), *spread(b.kl)]
        for b in (*quality.buckets, *quality.long_context)
    ]
    assert values(page.table("Quality by position")) == buckets


def test_tasks(page: Page, receipt: EvaluationReceipt) -> None:
    assert receipt.tasks is not None
    expected = {
        needle: [
            [
                *(value for value in (cell.length, cell.depth, cell.prompts, cell.answer_tokens) if value is not None),
                cell.source_logprob,
                cell.target_logprob,
                cell.chance_logprob,
                *spread(cell.difference),
                cell.source_match,
                cell.target_match,
            ]
            for cell in receipt.tasks.cells
            if (cell.task == "needle") is needle
        ]
        for needle in (True, False)
    }

    assert values(page.table("Needle in a haystack: source and converted")) == expected[True]
    assert values(page.table("Position and retrieval tasks")) == expected[False]


def test_drift_and_decomposition(page: Page, receipt: EvaluationReceipt) -> None:
    assert receipt.ladder is not None
    assert receipt.decomposition is not None
    drift = receipt.ladder.drift
    expected = [drift.first_quarter_kl, drift.last_quarter_kl, drift.one_pass_kl, drift.one_pass_error, *drift.kl]

    assert values(page.table("Drift over decode steps")) == [[value] for value in expected]
    parts = page.table("Where the error comes from")
    assert [row[2][1] for row in parts.rows] == [part.error for part in receipt.decomposition.parts]


def test_systems(page: Page, receipt: EvaluationReceipt) -> None:
    assert receipt.systems is not None
    rows = [
        [
            *(row.prompt_tokens, row.new_tokens, row.batch, row.repeats),
            *(row.ttft_s, row.tpot_s, row.tokens_per_s, row.goodput_tokens_per_s, row.peak_bytes),
        ]
        for row in receipt.systems.rows
    ]

    assert values(page.table("Speed beside the source")) == rows
    cache = page.table("Cache, bytes per token; formula and rows are per token, the rest in all")
    for found, figures in zip(values(cache), receipt.systems.cache, strict=True):
        fields = figures.model_dump(exclude={"subject", "dtype"})
        assert found == [value for value in fields.values() if value is not None]


def test_frontier_and_gates(page: Page, full_input: ReportInput, receipt: EvaluationReceipt) -> None:
    assert full_input.frontier is not None
    table = page.table("The frontier: divergence against cache")
    assert [row[3][1] for row in table.rows] == [point.predicted_kl for point in full_input.frontier.points]
    measured = [None if p.measured is None else p.measured.kl for p in full_input.frontier.points]
    assert [row[4][1] for row in table.rows] == measured

    gates = page.table("Bars and what was measured")
    assert [row[3][1] for row in gates.rows] == [gate.measured for gate in receipt.gates]
    assert [row[4][0] for row in gates.rows] == ["failed", "held"]


def test_key_figures(page: Page, receipt: EvaluationReceipt) -> None:
    assert receipt.quality is not None
    assert receipt.systems is not None
    overall, rows = receipt.quality.overall, receipt.systems.rows
    source, target = (
        next(row for row in rows if (row.subject, row.prompt_tokens, row.batch) == (subject, 2048, 1))
        for subject in ("source", "target")
    )
    assert source.tokens_per_s is not None
    assert target.tokens_per_s is not None
    shown = [float(element.attributes["value"]) for element in page.with_tag("data")][:6]

    quality = [overall.ratio.value, overall.kl.value, overall.top1.value, overall.top5.value]
    cache = receipt.systems.cache[1].payload_bytes_per_token
    assert shown == [*quality, cache, target.tokens_per_s / source.tokens_per_s]


def test_what_is_read_is_what_is_meant(page: Page) -> None:
    """The rounded text beside each unrounded value."""
    seen = 0
    for element in page.with_tag("data"):
        value, text = float(element.attributes["value"]), element.text
        if text.endswith(" %"):
            value, text = 100 * value, text.removesuffix(" %")
        number = float(text.split(" (pair ")[0].replace(",", ""))
        assert number == pytest.approx(value, rel=FOUR_DIGITS, abs=0.05 if element.text.endswith("%") else 0)
        seen += 1
    assert seen > 500


def test_the_documents_are_the_files(page: Page, full_input: ReportInput, receipt: EvaluationReceipt) -> None:
    documents = [element.text for element in page.with_tag("pre")]

    assert receipt.to_json_text().strip() in [document.strip() for document in documents]
    assert full_input.manifest.to_json_text().strip() in [document.strip() for document in documents]
