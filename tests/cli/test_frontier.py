"""`mla-convert frontier` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_convert.cli.main import run
from mla_convert.convert import reload_check, reload_child
from tests.conftest import PicoFactory
from tests.eval.helpers import write_text


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_CONVERT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(reload_check, "_run_child", reload_child.compare)
        yield


@pytest.fixture(scope="module")
def base(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Source, calibration text, widths and two slot counts."""
    text = write_text(tmp_path_factory.mktemp("text") / "calibration.txt", 700, seed=5)
    sizes = ("--calibration-tokens", "512", "--calibration-window", "64")
    source = str(pico("llama", kv_heads=2))
    return ("frontier", source, "--calibration", str(text), *sizes, "--widths", "50%,20", "--slots", "2,4")


@pytest.fixture(scope="module")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    text = write_text(tmp_path_factory.mktemp("text") / "heldout.txt", 700, seed=6)
    return ("--text", str(text), "--max-tokens", "512")


def test_predictions_alone_need_no_other_text(base: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*base, "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert [(point["name"], point["width"]) for point in found["points"]] == [
        ("engine:4+28", 32),
        ("engine:8+24", 32),
        ("engine:4+16", 20),
        ("engine:8+12", 20),
    ]
    assert {point["measured"] for point in found["points"]} == {None}
    assert (found["text"], found["source"]["perplexity"], found["plot"]) == (None, None, None)
    assert found["rank_agreement"] == []


def test_the_table_marks_the_best_and_measures_it(
    base: tuple[str, ...], heldout: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "frontier.png"
    assert run([*base, *heldout, "--measure", "--plot", str(picture)]) == 0

    lines = capsys.readouterr().out.splitlines()
    plans = [line.split() for line in lines if line.strip().startswith("engine:")]
    marked = [row for row in plans if row[1] == "*"]
    assert [row[2] for row in marked] == ["32", "20"]
    assert all(len(row) == 9 for row in marked)  # KL, perplexity, ratio, agreement; one window has no interval
    assert all(len(row) == 4 for row in plans if row[1] != "*")
    assert any("Spearman of predicted with measured KL, all plans (2):" in line for line in lines)
    assert any(line.startswith("tokens") and "512 in windows of 512" in line for line in lines)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_everything_measured_is_compared_within_each_width(
    base: tuple[str, ...], heldout: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*base, *heldout, "--measure-all", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert all(point["measured"]["kl"] > 0 for point in found["points"])
    assert [(row["width"], row["plans"]) for row in found["rank_agreement"]] == [(None, 4), (32, 2), (20, 2)]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--measure",), "nothing to measure on"),
        (("--plot", "picture.jpg"), "a name that ends in .png"),
        (("--plot", "/nowhere/picture.png"), "no folder for the picture"),
        (("--slots", "2,x"), "not numbers of slots"),
        (("--slots", "0"), "not numbers of slots"),
        (("--widths", "wide"), "not a percentage"),
        (("--recipe", "mha2mla"), "--recipe has no effect"),
        (("--calibration-window", "1024"), "longer than the source's positions"),
    ],
)
def test_what_is_refused_is_a_usage_error(
    base: tuple[str, ...], capsys: pytest.CaptureFixture[str], extra: tuple[str, ...], message: str
) -> None:
    tokens = ("--calibration-tokens", "2048") if "--calibration-window" in extra else ()

    assert run([*base, *extra, *tokens]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
