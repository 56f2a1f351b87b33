"""Case 24: a first loss above ln(vocabulary) is reported with a loud warning, in the output and in the manifest."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from mla_convert.cli.convert_result import ConvertResult
from mla_convert.convert import reload_check, reload_child
from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.inspection import preview_conversion
from mla_convert.convert.loss_check import chance_warning
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import Conversion, convert
from mla_convert.eval.held_out import HeldOut
from mla_convert.manifests.models import load

FOLDER = Path(__file__).resolve().parent.parent / "data" / "tiny_trained"
DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
VOCABULARY = 2048
# The slowest pairs and a latent of one number, chosen by the weights alone.
BAD = {"rope_policy": "low", "qk_rope_head_dim": 8, "kv_lora_rank": 1, "weighting": "weight"}
GOOD = {"qk_rope_head_dim": 32, "kv_lora_rank": 64}


@pytest.fixture(scope="module", autouse=True)
def _here(tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_CONVERT_CACHE", str(own_cache))
        patch.setattr(reload_check, "_run_child", reload_child.compare)
        yield


def made(out: Path, widths: dict[str, object], *, measured: bool) -> Conversion:
    """A conversion of the tiny trained model, calibrated on this repository's documentation."""
    options = ConvertOptions(
        calibration=(str(DOCS / "manifest.md"),),
        calibration_window=256,
        profile="hf",
        **widths,
    )
    source = open_source(str(FOLDER))
    held_out = HeldOut.of(source, [str(DOCS / "method.md")], options, 2048) if measured else None
    return convert(source, out, options, measure=held_out)


def printed(done: Conversion) -> str:
    preview = preview_conversion(open_source(str(FOLDER)), done.plan, done.folder)
    output = io.StringIO()
    ConvertResult(done, preview, 1.0).render(Console(file=output, width=400))
    return output.getvalue()


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """Read only."""
    return made(tmp_path_factory.mktemp("bad") / "out", BAD, measured=True)


def test_worse_than_chance_is_said_of_both_texts_in_manifest_and_output(bad: Conversion) -> None:
    loss, measured = bad.manifest.reload_check.calibration_loss, bad.manifest.measured

    assert loss is not None
    assert measured is not None
    assert loss.uniform == pytest.approx(math.log(VOCABULARY))
    assert loss.source < loss.uniform < loss.target
    assert measured.source_perplexity < VOCABULARY < measured.perplexity
    alarms = [warning for warning in bad.manifest.warnings if warning.startswith("WORSE THAN CHANCE")]
    assert len(alarms) == 2
    assert f"loses {loss.target:.2f} nats per token on its calibration text" in alarms[0]
    assert f"ln(vocabulary) = {math.log(VOCABULARY):.2f}; the source {loss.source:.2f}" in alarms[0]
    assert f"loses {math.log(measured.perplexity):.2f} nats per token on {DOCS / 'method.md'}" in alarms[1]
    for alarm in alarms:
        assert alarm in printed(bad)


def test_the_alarm_is_on_disk_with_the_files(bad: Conversion) -> None:
    assert load(bad.folder).warnings == bad.manifest.warnings
    assert "WORSE THAN CHANCE" in (bad.folder / "mla_manifest.json").read_text(encoding="utf-8")


def test_a_good_plan_raises_no_alarm(tmp_path: Path) -> None:
    done = made(tmp_path / "out", GOOD, measured=False)

    loss = done.manifest.reload_check.calibration_loss
    assert loss is not None
    assert loss.source < loss.target < loss.uniform
    assert not [warning for warning in done.manifest.warnings if "CHANCE" in warning]
    assert "CHANCE" not in printed(done)
    assert f"{loss.source:.3f} → {loss.target:.3f} nats per token on 255 tokens" in printed(done)


@pytest.mark.parametrize(("loss", "alarm"), [(4.0, False), (4.5747, False), (4.5748, True), (9.0, True)])
def test_the_bar_is_the_logarithm_of_the_vocabulary(loss: float, alarm: bool) -> None:
    found = chance_warning(loss, math.log(97), 3.0, "text")

    assert (found is not None) is alarm
