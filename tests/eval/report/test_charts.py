"""Charts as files of their own, and their colours in the page."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from PIL import Image

from mla_convert.eval.report.chart import PAPER_DOTS_PER_INCH, VARIABLES, Chart
from mla_convert.eval.report.grids import COLOURS, linear_scale, log_scale
from mla_convert.eval.report.inputs import ReportInput
from mla_convert.eval.report.layer_charts import LINE_COLOURS, rope_chart, spectra_chart
from mla_convert.eval.report.page import TEMPLATES, Report
from mla_convert.eval.report.quality_charts import drift_chart
from tests.eval.report import inputs, receipts
from tests.eval.report.conftest import LAYERS, MakeManifest

CONTRAST_TEXT, CONTRAST_LINE = 4.5, 3.0
KEYS = ["layer-errors", "spectra", "rope-slots", "positions", "domains", "needle", "drift", "decomposition"]
KEYS += ["cache", "speed", "frontier"]


@pytest.fixture(scope="module")
def charts(full_input: ReportInput) -> tuple[Chart, ...]:
    return Report.of(full_input).charts


def test_the_charts_are_in_the_order_of_the_page(charts: tuple[Chart, ...]) -> None:
    assert [chart.key for chart in charts] == KEYS


def test_svg_files_are_drawings_without_text_elements(charts: tuple[Chart, ...], tmp_path: Path) -> None:
    for chart in charts:
        path = chart.write(tmp_path, "svg")
        root = ElementTree.parse(path).getroot()
        tags = {element.tag.rsplit("}", 1)[-1] for element in root.iter()}

        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert float(root.attrib["width"].removesuffix("pt")) == pytest.approx(72 * chart.width)
        assert "path" in tags
        assert {"text", "image"} & tags == set()
        assert "var(" not in path.read_text(encoding="utf-8")
    assert {path.stem for path in tmp_path.iterdir()} == set(KEYS)


@pytest.mark.parametrize("key", ["needle", "cache"])
def test_png_files_have_the_resolution_of_print(charts: tuple[Chart, ...], tmp_path: Path, key: str) -> None:
    chart = next(chart for chart in charts if chart.key == key)
    with Image.open(chart.write(tmp_path, "png")) as image:
        assert image.format == "PNG"
        assert image.width == round(chart.width * PAPER_DOTS_PER_INCH)
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
        assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 50


def test_a_file_is_the_same_each_time(charts: tuple[Chart, ...], tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    for kind in ("png", "svg"):
        assert charts[-1].write(first, kind).read_bytes() == charts[-1].write(second, kind).read_bytes()  # type: ignore[arg-type]


def test_settings_of_matplotlib_are_put_back(charts: tuple[Chart, ...]) -> None:
    before = dict(matplotlib.rcParams)
    charts[-1].inline()

    assert dict(matplotlib.rcParams) == before


def test_the_users_settings_change_nothing(charts: tuple[Chart, ...]) -> None:
    expected = charts[-1].inline()
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9}):
        assert charts[-1].inline() == expected


def test_every_colour_of_the_theme_is_a_variable_in_the_page(full_page: str) -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", full_page, flags=re.DOTALL))

    assert [colour for colour in VARIABLES if colour in drawn] == []
    assert {variable for variable in VARIABLES.values() if f"var({variable})" in drawn} == set(VARIABLES.values())


def test_no_colour_of_a_map_is_taken_for_one_of_the_theme() -> None:
    for colours in (COLOURS, LINE_COLOURS):
        steps = {matplotlib.colors.to_hex(colours(step)) for step in range(colours.N)}
        assert steps & set(VARIABLES) == set()


def themes() -> dict[str, dict[str, str]]:
    css = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    blocks = re.findall(r"(:root[^{]*)\{([^}]*)\}", css)
    return {selector.strip(): dict(re.findall(r"(--\w+): (#[0-9a-f]{6})", body)) for selector, body in blocks}


def luminance(colour: str) -> float:
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio by WCAG 2.2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_stand_out_in_both_themes_and_in_print() -> None:
    found = themes()

    assert len(found) == 4
    for selector, theme in found.items():
        for ground in ("--surface", "--page"):
            for name in ("--ink", "--muted", "--link", "--fault"):
                assert contrast(theme[name], theme[ground]) >= CONTRAST_TEXT, (selector, name)
            for name in ("--source", "--target", "--third"):
                assert contrast(theme[name], theme[ground]) >= CONTRAST_LINE, (selector, name)


def test_the_dark_theme_is_the_same_by_preference_and_by_choice() -> None:
    found = themes()

    assert found[':root:not([data-theme="light"])'] == found[':root[data-theme="dark"]']


def test_a_rank_beyond_the_kept_values_is_said_and_drawn(make_manifest: MakeManifest) -> None:
    layers = tuple(inputs.layer_receipt(index, rank=152) for index in range(LAYERS))
    chart = spectra_chart(make_manifest(LAYERS).model_copy(update={"layers": layers}))

    assert chart is not None
    assert "the rank that is kept (152)" in chart.description
    assert "the kept rank lies to the right of the lines" in chart.description
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", chart.inline())
    assert any(label.isdecimal() and int(label) >= 140 for label in labels)


def test_a_manifest_without_spectra_or_slots_has_no_such_chart(make_manifest: MakeManifest) -> None:
    bare = tuple(
        layer.model_copy(update={"singular_values": (), "rope_slots": ()}) for layer in make_manifest(LAYERS).layers
    )
    manifest = make_manifest(LAYERS).model_copy(update={"layers": bare})

    assert spectra_chart(manifest) is None
    assert rope_chart(manifest) is None
    assert {"spectra-section", "rope-section"} <= set(Report.of(inputs.given(manifest, None)).missing)


def test_slots_that_do_not_turn_are_said_to_be_left_out(make_manifest: MakeManifest) -> None:
    layer = inputs.layer_receipt(0)
    still = tuple(slot.model_copy(update={"frequency": 0.0}) for slot in layer.rope_slots[:1])
    layer = layer.model_copy(update={"rope_slots": (*still, *layer.rope_slots[1:])})
    chart = rope_chart(make_manifest(1).model_copy(update={"layers": (layer,)}))

    assert chart is not None
    assert "1 slots do not turn at all" in chart.description
    assert chart.table.rows[0].cells[1].value == 0.0
    assert "<svg" in chart.inline()


def test_scales() -> None:
    assert log_scale([0.0]) is None
    assert linear_scale([]) is None
    one = log_scale([0.0, 1e-3])
    assert one is not None
    assert (one.vmin, one.vmax) == pytest.approx((1e-4, 1e-2))
    two = log_scale([0.0, 1e-3, 10.0])
    assert two is not None
    assert (two.vmin, two.vmax) == (1e-3, 10.0)


def test_rounding_below_zero_leaves_the_drift_linear() -> None:
    drift = receipts.ladder_section(1).drift
    mixed = drift.model_copy(update={"kl": (-1e-9, *drift.kl[1:])})

    assert "0.01" in drift_chart(drift).inline()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inline = drift_chart(mixed).inline()
    assert "0.15" in inline


def test_dollar_signs_are_no_formulas(charts: tuple[Chart, ...]) -> None:
    chart = charts[KEYS.index("domains")]
    quality = receipts.full(text="$\\undefined{$").quality

    assert quality is not None
    from mla_convert.eval.report.quality_charts import domain_chart

    assert "$" in domain_chart(quality).inline()
    assert replace(chart, title="a & b").inline().count("<title") == 1
    assert "a &amp; b" in replace(chart, title="a & b").inline()
