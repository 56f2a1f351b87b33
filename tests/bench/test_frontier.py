"""The frontier of a tiny model: points, their order, JSON, and the picture with the data in it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mla_convert.bench import frontier as module
from mla_convert.bench.frontier import FrontierRequest, recipe_options, run_frontier
from mla_convert.bench.frontier_plot import draw, series_of, source_label, title_of
from mla_convert.bench.frontier_report import FrontierPoint, FrontierReport
from mla_convert.convert import reload_check, reload_child
from mla_convert.convert.checkpoint import SourceCheckpoint, open_source
from mla_convert.convert.choose import split_plans
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import RecipeName
from mla_convert.convert.recipes import RECIPES
from mla_convert.errors import InputRefused, UsageFault
from tests.conftest import PicoFactory
from tests.eval.helpers import write_text

Change = Callable[[FrontierPoint], FrontierPoint]


@pytest.fixture(scope="module")
def source(pico: PicoFactory) -> SourceCheckpoint:
    return open_source(str(pico("llama", kv_heads=2)))


@pytest.fixture(scope="module")
def request_of_pico(tmp_path_factory: pytest.TempPathFactory) -> FrontierRequest:
    folder = tmp_path_factory.mktemp("frontier")
    calibration = str(write_text(folder / "calibration.txt", 1500, seed=1))
    return FrontierRequest(
        options=ConvertOptions(calibration=(calibration,), calibration_tokens=1024, calibration_window=128),
        widths="20,75%",
        text=(str(write_text(folder / "heldout.txt", 1500, seed=2)),),
        slots=(2, 4),
        recipes=("mha2mla",),
        measure="all",
        max_tokens=1024,
    )


@pytest.fixture(scope="module")
def report(
    source: SourceCheckpoint, request_of_pico: FrontierRequest, tmp_path_factory: pytest.TempPathFactory
) -> FrontierReport:
    """Two splits of two widths and a recipe at each, all measured; the reload checks run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_CONVERT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(reload_check, "_run_child", reload_child.compare)
        return run_frontier(source, request_of_pico, ["mla-convert", "frontier"])


def test_every_split_is_a_point_widest_first_and_one_of_each_width_is_best(report: FrontierReport) -> None:
    ours = [point for point in report.points if point.recipe is None]

    assert [point.name for point in ours] == ["engine:4+44", "engine:8+40", "engine:4+16", "engine:8+12"]
    assert [point.bytes_per_token for point in ours] == [48 * 16, 48 * 16, 20 * 16, 20 * 16]
    for width in (48, 20):
        among = [point for point in ours if point.width == width]
        assert [point.best for point in among].count(True) == 1
        assert min(among, key=lambda point: point.predicted_kl or 0).best


def test_more_width_loses_less_predicted_and_measured(report: FrontierReport) -> None:
    wide, narrow = (point for point in report.points if point.best)

    assert wide.predicted_kl is not None
    assert narrow.predicted_kl is not None
    assert 0 < wide.predicted_kl < narrow.predicted_kl
    assert wide.measured is not None
    assert narrow.measured is not None
    assert 0 < wide.measured.figures.kl < narrow.measured.figures.kl
    assert wide.measured.target_cache.bytes_per_token == wide.bytes_per_token


def test_recipes_are_measured_at_the_split_nearest_to_the_best(report: FrontierReport) -> None:
    rivals = [point for point in report.points if point.recipe is not None]

    assert [(point.recipe, point.width, point.predicted_kl) for point in rivals] == [
        ("mha2mla", 48, None),
        ("mha2mla", 20, None),
    ]
    for rival in rivals:
        best = next(point for point in report.points if point.best and point.width == rival.width)
        assert abs(rival.qk_rope_head_dim - best.qk_rope_head_dim) <= 4
        assert rival.measured is not None
        assert best.measured is not None
        assert rival.measured.figures.kl > best.measured.figures.kl


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_plans_at_a_width(
    source: SourceCheckpoint, request_of_pico: FrontierRequest, name: RecipeName
) -> None:
    plans = split_plans(source, recipe_options(request_of_pico.options, name), 48)

    assert plans
    for plan in plans:
        assert plan.qk_rope_head_dim + plan.kv_lora_rank == 48
        assert plan.recipe == name
        assert {option: getattr(plan, option) for option in RECIPES[name].settings} == RECIPES[name].settings
        assert (plan.calibration is not None) == RECIPES[name].calibrated


def test_the_source_is_measured_on_the_same_text(report: FrontierReport) -> None:
    assert (report.source.width, report.source.bytes_per_token) == (64, 1024)
    measured = [point.measured for point in report.points if point.measured is not None]
    assert len(measured) == 6
    for done in measured:
        assert done.figures.source_perplexity == pytest.approx(report.source.perplexity, rel=1e-12)


def test_the_order_is_compared_over_all_plans_and_within_each_width(report: FrontierReport) -> None:
    rows = report.rank_agreement()

    assert [(row.width, row.plans) for row in rows] == [(None, 4), (48, 2), (20, 2)]
    assert all(row.spearman is not None and -1 <= row.spearman <= 1 for row in rows)


def test_json_holds_every_field(report: FrontierReport) -> None:
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))

    assert set(found) == {
        "schema_version",
        "model",
        "predictor",
        "source",
        "points",
        "rank_agreement",
        "text",
        "calibration",
        "environment",
    }
    assert found["schema_version"] == "mla-convert/frontier/v1"
    assert set(found["points"][0]) == {
        "name",
        "width",
        "profile",
        "qk_rope_head_dim",
        "kv_lora_rank",
        "recipe",
        "bytes_per_token",
        "dtype",
        "predicted_kl",
        "best",
        "measured",
    }
    assert set(found["points"][0]["measured"]) == {
        "source_perplexity",
        "target_perplexity",
        "ratio",
        "kl",
        "top1_agreement",
        "intervals",
    }
    assert found["text"]["tokens"] == 1024
    assert found["calibration"]["tokens"] == 1024
    assert found["environment"]["command"] == ["mla-convert", "frontier"]


def test_the_picture_holds_every_point_once(report: FrontierReport) -> None:
    drawn = {series.label: series for series in series_of(report)}
    points = report.points

    best = drawn["predicted, best split of each width"]
    assert best.x == (320, 768)
    assert best.y == tuple(point.predicted_kl for point in reversed([point for point in points if point.best]))
    assert (best.joined, best.filled) == (True, False)
    measured = drawn["measured, best split of each width"]
    assert measured.x == best.x
    assert measured.y == tuple(
        point.measured.figures.kl for point in reversed(points) if point.best and point.measured is not None
    )
    assert drawn["measured, recipe mha2mla"].x == (320, 768)
    assert len(drawn["predicted, other splits"].x) == len(drawn["measured, other splits"].x) == 2
    assert sum(len(series.x) for series in drawn.values()) == 4 + 6
    assert len({(series.colour, series.marker) for series in drawn.values()}) == len(drawn)


def test_what_has_no_place_on_a_logarithmic_axis_is_left_out(report: FrontierReport) -> None:
    lossless = replace(report, points=tuple(replace(point, predicted_kl=0.0) for point in report.points))

    assert [series.label for series in series_of(lossless) if "predicted" in series.label] == []


def test_the_picture_is_titled_with_model_text_and_tokens(report: FrontierReport) -> None:
    model, conditions = title_of(report).splitlines()

    assert model == Path(report.model).name
    assert conditions == "1,024 held-out tokens of heldout.txt; calibrated on 1,024"
    assert f"perplexity {report.source.perplexity:.2f}" in source_label(report)
    unmeasured = replace(report, text=None, source=replace(report.source, perplexity=None))
    assert "nothing was measured" in title_of(unmeasured)
    assert "perplexity" not in source_label(unmeasured)


def test_the_picture_is_a_png_of_its_size_and_not_blank(report: FrontierReport, tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "frontier.png"
    draw(report, path)

    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24]) == (1260, 770)
    pixels = imread(path)[..., :3]
    colours = {tuple(colour) for colour in (pixels.reshape(-1, 3) * 255).round().astype(int).tolist()}
    # The palette's blue, vermilion and green are each somewhere in it.
    assert {(0, 114, 178), (213, 94, 0), (0, 158, 115)} <= colours
    again = tmp_path / "again.png"
    draw(report, again)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": ()}, "nothing to measure on"),
        ({"measure": "none"}, "--recipe has no effect"),
        ({"widths": "70"}, "--width is out of range"),
        ({"recipes": ("nobody",)}, "no such recipe"),
        ({"options": ConvertOptions(rope_policy="high")}, "needs a predicted loss"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(
    source: SourceCheckpoint,
    request_of_pico: FrontierRequest,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    message: str,
) -> None:
    monkeypatch.setattr(module, "gather", lambda *_arguments: pytest.fail("something was calibrated"))

    with pytest.raises(UsageFault, match=message):
        run_frontier(source, replace(request_of_pico, **changes))


def test_text_that_calibration_reads_is_refused_before_any_work(
    source: SourceCheckpoint, request_of_pico: FrontierRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "gather", lambda *_arguments: pytest.fail("something was calibrated"))

    with pytest.raises(InputRefused, match="were calibration text"):
        run_frontier(source, replace(request_of_pico, text=request_of_pico.options.calibration))
