"""`convert --width`, `--budget`, `--cache-bytes`, `--max-kl` and `--measure` as they are typed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mla_convert.cli.main import run
from mla_convert.convert import choose as choose_module
from mla_convert.convert import reload_check, reload_child
from mla_convert.convert.calibration_mix import sample_windows
from mla_convert.convert.calibration_text import read_corpus
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import CheckFailed
from mla_convert.eval import held_out
from mla_convert.manifests.models import ConversionManifest, load
from mla_convert.manifests.verify import verify_folder
from tests.cli.test_convert import Ran, run_convert
from tests.conftest import PicoFactory
from tests.eval.helpers import write_text


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_CONVERT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "100")
        patch.setattr(reload_check, "_run_child", reload_child.compare)
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("texts")
    return (
        str(write_text(folder / "calibration.txt", 700, seed=3)),
        str(write_text(folder / "heldout.txt", 700, seed=4)),
    )


@pytest.fixture(scope="module")
def calibrated(texts: tuple[str, str]) -> tuple[str, ...]:
    return ("--calibration", texts[0], "--calibration-tokens", "512", "--calibration-window", "64")


@pytest.fixture(scope="module")
def budgeted(
    pico: PicoFactory, calibrated: tuple[str, ...], texts: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Ran:
    """`--budget 50% --measure`. Read only."""
    measured = ("--measure", texts[1], "--measure-tokens", "256")
    out = tmp_path_factory.mktemp("budget") / "out"
    return run_convert(pico("llama", kv_heads=2), out, "--budget", "50%", *calibrated, *measured, "--json")


def manifest_of(done: Ran) -> ConversionManifest:
    assert done.code == 0, done.messages
    return load(done.folder)


def test_a_budget_is_kept_and_the_choice_is_in_the_manifest(budgeted: Ran) -> None:
    manifest = manifest_of(budgeted)

    found, arch = budgeted.object, manifest.identity.architecture
    assert found["cache"]["target"]["bytes_per_token"] * 2 == found["cache"]["source"]["bytes_per_token"]
    assert manifest.prediction is not None
    assert manifest.prediction.chosen_for == "--budget 50%"
    assert len(manifest.prediction.candidates) == 6
    best = min(manifest.prediction.candidates, key=lambda candidate: candidate.predicted_kl)
    assert (best.qk_rope_head_dim, best.kv_lora_rank) == (arch.qk_rope_head_dim, arch.kv_lora_rank)
    assert best.predicted_kl == manifest.prediction.predicted_kl
    assert found["prediction"] == manifest.prediction.model_dump(mode="json")


def test_the_preview_says_what_is_expected_before_the_work(budgeted: Ran) -> None:
    arch = manifest_of(budgeted).identity.architecture

    assert "chosen for  --budget 50%" in budgeted.messages
    assert f"{arch.qk_rope_head_dim}+{arch.kv_lora_rank} of width 32; plans tried: 6" in budgeted.messages
    assert "nats per token, predicted by" in budgeted.messages


def test_what_was_measured_stands_beside_what_was_predicted(budgeted: Ran, texts: tuple[str, str]) -> None:
    manifest = manifest_of(budgeted)

    measured = manifest.measured
    assert measured is not None
    assert budgeted.object["measured"] == measured.model_dump(mode="json")
    assert measured.kl > 0
    assert measured.ratio == pytest.approx(measured.perplexity / measured.source_perplexity)
    assert measured.text == (texts[1],)
    assert (measured.tokens, measured.window, measured.stride) == (256, 256, 256)
    assert verify_folder(budgeted.folder).ok


def test_the_same_figures_come_out_of_eval(
    budgeted: Ran, pico: PicoFactory, texts: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--max-tokens", "256", "--seq-len", "256", "--json")
    source = str(pico("llama", kv_heads=2))
    assert run(["eval", str(budgeted.folder), "--source", source, "--text", texts[1], *sizes]) == 0

    found, measured = json.loads(capsys.readouterr().out), manifest_of(budgeted).measured
    assert measured is not None
    assert found["kl"] == measured.kl
    assert found["target"]["perplexity"] == measured.perplexity
    assert found["text"]["sha256"] == measured.text_sha256


def test_the_loss_on_calibration_text_is_that_of_the_files(budgeted: Ran) -> None:
    manifest = manifest_of(budgeted)

    loss, record = manifest.reload_check.calibration_loss, manifest.calibration
    assert loss is not None
    assert record is not None
    corpus = read_corpus(record.texts[0].name)
    ids = sample_windows((corpus,), load_tokenizer(budgeted.folder), tokens=512, length=64, seed=0).ids[:1]
    for folder, expected in ((budgeted.folder, loss.target), (Path(manifest.source.location), loss.source)):
        with torch.inference_mode():
            found = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids, labels=ids).loss
        assert float(found) == pytest.approx(expected, rel=1e-4)
    assert loss.tokens == 63


@pytest.mark.parametrize(
    ("goal", "width"), [(("--width", "20"), 20), (("--cache-bytes", "335"), 20), (("--max-kl", "1000"), 4)]
)
def test_each_goal_picks_a_plan_and_says_so(
    pico: PicoFactory, calibrated: tuple[str, ...], tmp_path: Path, goal: tuple[str, str], width: int
) -> None:
    done = run_convert(pico("llama", kv_heads=2), tmp_path / "out", *goal, *calibrated)

    manifest = manifest_of(done)
    arch = manifest.identity.architecture
    assert arch.qk_rope_head_dim + arch.kv_lora_rank == width
    assert manifest.prediction is not None
    assert manifest.prediction.chosen_for == " ".join(goal)
    assert manifest.measured is None
    assert f"expected              KL {manifest.prediction.predicted_kl:.3g} nats" in done.output


def test_widths_that_are_given_are_predicted_as_well(
    pico: PicoFactory, calibrated: tuple[str, ...], budgeted: Ran, tmp_path: Path
) -> None:
    """By the closed form that is written, without a second one."""
    chosen = manifest_of(budgeted)
    arch = chosen.identity.architecture
    widths = ("--qk-rope-head-dim", str(arch.qk_rope_head_dim), "--kv-lora-rank", str(arch.kv_lora_rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_module, "predict", lambda *_arguments: pytest.fail("a plan was predicted apart"))
        done = run_convert(pico("llama", kv_heads=2), tmp_path / "out", *widths, *calibrated)

    prediction = manifest_of(done).prediction
    assert prediction is not None
    assert chosen.prediction is not None
    assert (prediction.chosen_for, prediction.candidates) == (None, ())
    assert prediction.predicted_kl == chosen.prediction.predicted_kl
    assert prediction.per_layer == chosen.prediction.per_layer
    assert "chosen for" not in done.messages
    assert manifest_of(done).canonical_mla_id == chosen.canonical_mla_id


def test_without_text_nothing_is_predicted_or_measured_and_that_is_said(pico: PicoFactory, tmp_path: Path) -> None:
    done = run_convert(pico(), tmp_path / "out", "--lossless")

    manifest = manifest_of(done)
    assert (manifest.prediction, manifest.measured, manifest.reload_check.calibration_loss) == (None, None, None)
    assert "not measured: neither calibration text nor --measure was given" in done.output


def test_a_lossless_plan_can_be_measured(pico: PicoFactory, texts: tuple[str, str], tmp_path: Path) -> None:
    done = run_convert(pico(), tmp_path / "out", "--lossless", "--measure", texts[1], "--measure-tokens", "128")

    measured = manifest_of(done).measured
    assert measured is not None
    assert measured.kl < 1e-8
    assert measured.top1_agreement == 1
    assert "not measured" not in done.output


GOAL = ("--width", "20")
REFUSALS: dict[str, tuple[tuple[str, ...], str]] = {
    "two goals": ((*GOAL, "--budget", "50%"), "--width and --budget each say how wide the cache is"),
    "three goals": ((*GOAL, "--cache-bytes", "9", "--max-kl", "1"), "--width and --cache-bytes and --max-kl"),
    "goal and rank": ((*GOAL, "--kv-lora-rank", "12"), "--width and --kv-lora-rank each say"),
    "goal and rope": (("--max-kl", "1", "--qk-rope-head-dim", "8"), "--max-kl and --qk-rope-head-dim each say"),
    "goal and lossless": (("--budget", "50%", "--lossless"), "--budget and --lossless each say"),
    "goal and padding": ((*GOAL, "--pad-cache", "64+16"), "--width and --pad-cache each say"),
    "no percentage": (("--budget", "0.5"), "not a percentage"),
    "budget too small": (("--budget", "1%"), "expected 6.2% to 100.0% of the source's 64 numbers"),
    "bytes too few": (("--cache-bytes", "60"), "expected 64 to 1,024 bytes per token"),
    "width too large": (("--width", "65"), "expected 3 to 64"),
    "negative loss": (("--max-kl", "-1"), ""),
    "dry run": ((*GOAL, "--dry-run"), "mla-convert frontier prints the choice"),
    "weighting": ((*GOAL, "--weighting", "activation"), "found --weighting activation"),
    "tokens without text": ((*GOAL, "--measure-tokens", "64"), "--measure-tokens has no effect without --measure"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_comes_before_any_calibration(
    pico: PicoFactory, calibrated: tuple[str, ...], tmp_path: Path, case: str
) -> None:
    arguments, message = REFUSALS[case]
    text = () if "--lossless" in arguments else calibrated
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_module, "gather", lambda *_arguments: pytest.fail("something was calibrated"))
        done = run_convert(pico("llama", kv_heads=2), tmp_path / "out", *arguments, *text)

    assert done.code == 2
    assert message in " ".join(done.messages.split())
    assert list(tmp_path.iterdir()) == []


def test_a_goal_needs_calibration_text(pico: PicoFactory, tmp_path: Path) -> None:
    done = run_convert(pico(), tmp_path / "out", *GOAL)

    assert (done.code, list(tmp_path.iterdir())) == (2, [])
    assert "needs calibration text" in done.messages


def test_held_out_text_that_calibration_reads_is_refused_before_any_work(
    pico: PicoFactory, calibrated: tuple[str, ...], texts: tuple[str, str], tmp_path: Path
) -> None:
    done = run_convert(pico("llama", kv_heads=2), tmp_path / "out", *GOAL, *calibrated, "--measure", texts[0])

    assert (done.code, list(tmp_path.iterdir())) == (4, [])
    assert "were calibration text" in done.messages


def test_a_measurement_that_fails_undoes_the_conversion(
    pico: PicoFactory, texts: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise CheckFailed("scores that are not finite")

    monkeypatch.setattr(held_out, "evaluate_target", fail)
    existing = shutil.copytree(pico(), tmp_path / "out")
    before = sorted(path.name for path in existing.iterdir())

    done = run_convert(pico(), existing, "--lossless", "--measure", texts[1], "--overwrite")

    assert done.code == 3
    assert sorted(path.name for path in existing.iterdir()) == before
    assert list(tmp_path.iterdir()) == [existing]


def test_goals_in_a_plan_file(pico: PicoFactory, calibrated: tuple[str, ...], tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("max-kl: 1000\n", encoding="utf-8")
    done = run_convert(pico("llama", kv_heads=2), tmp_path / "out", "--config", str(plan), *calibrated)

    prediction = manifest_of(done).prediction
    assert prediction is not None
    assert prediction.chosen_for == "--max-kl 1000"
    plan.write_text("max-kl: high\n", encoding="utf-8")
    refused = run_convert(pico("llama", kv_heads=2), tmp_path / "other", "--config", str(plan), *calibrated)
    assert refused.code == 2
    assert "expected a number" in refused.messages
