"""The page: a sound document that stands alone, whatever the texts in it say."""

from __future__ import annotations

import itertools
import re

import pytest

from mla_convert.eval.report.inputs import ReportInput
from mla_convert.eval.report.page import Report
from mla_convert.eval.report.summary import failing, verdict
from tests.eval.report import inputs, receipts
from tests.eval.report.conftest import LAYERS, MakeManifest
from tests.eval.report.parse import Page

PAGES = ("full_page", "hostile_page", "bare_page", "lossless_page")
REFERENCES = ("href", "src", "xlink:href", "action", "data", "poster", "srcset")


@pytest.fixture(params=PAGES)
def text(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


def test_elements_close_in_order_and_ids_are_unique(text: str) -> None:
    page = Page(text)
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]

    assert page.faults == []
    assert sorted(ids) == sorted(set(ids))


def test_every_reference_has_its_target_in_the_page(text: str) -> None:
    page = Page(text)
    ids = {element.attributes["id"] for element in page.elements if "id" in element.attributes}
    targets = set()
    for element in page.elements:
        for name in ("aria-labelledby", "aria-describedby", "aria-controls"):
            targets |= set(element.attributes.get(name, "").split())
        for name in REFERENCES:
            if name in element.attributes:
                assert element.attributes[name].startswith("#"), element
                targets.add(element.attributes[name][1:])
        targets |= set(re.findall(r"url\(#([^)]*)\)", " ".join(element.attributes.values())))

    assert targets - ids == set()
    assert len(targets) > 10


def test_nothing_is_fetched(text: str) -> None:
    page = Page(text)
    styles = " ".join(element.text for element in page.with_tag("style"))
    styles += " ".join(element.attributes.get("style", "") for element in page.elements)

    assert page.with_tag("link", "img", "image", "iframe", "object", "embed", "audio", "video", "base", "form") == []
    assert len(page.with_tag("script")) == 1
    assert re.findall(r"@import|https?:|url\((?!#)", styles) == []
    assert "default-src 'none'" in text


def test_headings_descend_one_level_at_a_time_from_one_h1(text: str) -> None:
    levels = [int(element.tag[1]) for element in Page(text).with_tag("h1", "h2", "h3", "h4")]

    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_every_section_is_reached_from_the_navigation_and_named(text: str) -> None:
    page = Page(text)
    sections = page.with_tag("section")
    links = [element.attributes["href"] for element in page.with_tag("a")]

    assert links == ["#content", *(f"#{section.attributes['id']}" for section in sections)]
    assert all("aria-labelledby" in section.attributes for section in sections)
    assert [len(page.with_tag(tag)) for tag in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]


def test_every_chart_has_a_title_a_description_and_a_table(text: str) -> None:
    page = Page(text)
    charts = [element for element in page.with_tag("svg") if element.attributes.get("role") == "img"]

    assert len(charts) == len(page.with_tag("svg")) == len(page.with_tag("figure")) == len(page.with_tag("desc"))
    captions = {table.caption.split(";")[0] for table in page.tables}
    for figure in page.with_tag("figure"):
        assert any(caption and caption in figure.text for caption in captions)
    assert all(element.text.strip() for element in page.with_tag("title", "desc"))


def test_hostile_texts_stay_texts(hostile_page: str) -> None:
    page = Page(hostile_page)

    assert len(page.with_tag("script")) == 1
    assert page.with_tag("img") == []
    assert not any(name.startswith("on") for element in page.elements for name in element.attributes)
    shown = "".join(element.text for element in page.with_tag("bdi"))
    assert "<script>alert(1)</script>" in shown
    assert "漢字" in shown
    assert {"\x00", "\x1b", "\u202e"} & set(hostile_page) == set()
    assert "⟨U+202E⟩" in shown
    assert "$\\frac$" in shown


def test_an_ampersand_in_a_label_of_a_chart_is_escaped_once(hostile_page: str) -> None:
    labels = [element.text for element in Page(hostile_page).with_tag("text")]

    assert any(label.startswith("wikipedia <sc") for label in labels)
    assert not any("&lt;" in label or "&amp;" in label for label in labels)


def test_the_same_input_gives_the_same_bytes(full_input: ReportInput, full_page: str) -> None:
    assert Report.of(full_input).html() == full_page


def test_what_has_not_been_run_is_said(bare_page: str, make_manifest: MakeManifest) -> None:
    page = Page(bare_page)
    report = Report.of(inputs.given(make_manifest(LAYERS), None))
    absent = {element.text for element in page.with_tag("p") if element.attributes.get("class") == "absent"}

    assert {"quality", "tasks", "generation", "systems", "gates", "faults", "frontier-section"} <= set(report.missing)
    assert len(absent) == len(report.missing)
    assert "The folder has not been evaluated: the quality part has not been run." in absent
    assert "Nothing has been evaluated yet" in bare_page
    assert [element.attributes["id"] for element in page.with_tag("figure")] == [
        "layer-errors",
        "spectra",
        "rope-slots",
    ]


def test_a_part_that_was_not_asked_for_is_told_from_no_evaluation(make_manifest: MakeManifest) -> None:
    report = Report.of(inputs.given(make_manifest(LAYERS), receipts.minimal()))
    missing = {section.key: section.missing for section in report.sections}

    assert missing["quality"] == "This evaluation did not ask for it: the quality part has not been run."
    assert missing["gates"] == "No gates were set."
    assert "The ladder was not run, so nothing is said about faults" in verdict(report.given)


def test_the_verdict_names_faults_worst_layer_and_worst_domain(
    full_input: ReportInput, make_manifest: MakeManifest
) -> None:
    receipt = full_input.receipt
    assert receipt is not None
    assert receipt.ladder is not None
    sentence = verdict(full_input)

    assert sentence.startswith("1 fault was found, the first in value map of layer 1; the worst layer is ")
    assert f"the worst layer is {receipt.ladder.worst_layer} " in sentence
    assert "the worst domain is python code" in sentence
    assert sentence.endswith("1 of 2 gates failed.")
    assert failing(receipt)
    clean = receipt.model_copy(update={"ladder": receipts.ladder_section(LAYERS), "gates": receipt.gates[1:]})
    sentence = verdict(inputs.given(make_manifest(LAYERS), clean))
    assert sentence.startswith("No faults were found; ")
    assert sentence.endswith("every gate held.")
    assert not failing(clean)


def test_withheld_speed_is_said_and_no_speed_is_drawn(lossless_page: str) -> None:
    page = Page(lossless_page)

    assert "Speed is withheld: 4 fallbacks were not observed" in lossless_page
    assert "speed" not in [element.attributes["id"] for element in page.with_tag("figure")]
    runs = page.table("Runs whose speed is withheld")
    assert all(text == "–" for row in runs.rows for text, _ in row[5:])


def test_uninformative_cells_are_muted_and_counted(lossless_page: str, full_page: str) -> None:
    page = Page(lossless_page)
    muted = [element for element in page.with_tag("tr") if element.attributes.get("class") == "muted"]

    assert len(muted) == len(receipts.tasks_section().cells)
    assert "25 of 25 cells are uninformative" in lossless_page
    assert "hatched" in full_page


def test_the_command_to_repeat_is_shown_as_it_is_typed(full_page: str) -> None:
    commands = [element.text for element in Page(full_page).with_tag("pre")]

    assert "mla-convert eval OUT --text 'a b.txt'" in commands


def test_eighty_layers_fit(make_manifest: MakeManifest) -> None:
    report = Report.of(inputs.given(make_manifest(80), receipts.full(layers=80)))
    chart = next(chart for chart in report.charts if chart.key == "layer-errors")
    labels = [element.text for element in Page(f"<p>{chart.inline()}</p>").with_tag("text")]

    assert len(chart.table.rows) == 80
    assert {"0", "75", "layer"} <= set(labels)
    assert len(labels) < 60
