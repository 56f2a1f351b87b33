"""An evaluation from folders and text to the published object, and what it refuses before any model runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mla_convert.assets.wikipedia import WikipediaSplits
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert
from mla_convert.errors import CheckFailed, InputRefused, MLAConvertError, UsageFault
from mla_convert.eval import evaluate as module
from mla_convert.eval.evaluate import EvalOptions, evaluate, evaluate_target, prepare
from mla_convert.manifests.digest import sha256_file
from mla_convert.manifests.models import MANIFEST_NAME, load
from tests.eval.helpers import LOSSLESS, SEQ_LEN, EvalPair, write_text
from tests.pico import make_pico
from tests.tolerances import FLOAT64_ALGEBRA, LOSSLESS_KL

SMALL = EvalOptions(max_tokens=4 * SEQ_LEN, seq_len=SEQ_LEN)


def test_the_published_object(lossy: EvalPair) -> None:
    done = evaluate(lossy.target, lossy.source_folder, [str(lossy.text)], SMALL, ["mla-convert", "eval"])
    found = json.loads(json.dumps(done.to_json(), allow_nan=False))

    ratio = found["target"]["perplexity"] / found["source"]["perplexity"]
    assert found["perplexity_ratio"] == pytest.approx(ratio, rel=FLOAT64_ALGEBRA)
    assert ratio != pytest.approx(1, abs=1e-3)
    assert found["kl"] > 0.01
    assert 0 < found["top1_agreement"] < 1
    assert found["cache_bytes_per_token"] == {"source": 4 * 64 * 4, "target": 4 * 36 * 4, "dtype": "float32"}
    assert (found["text"]["tokens"], found["text"]["windows"]) == (4 * SEQ_LEN, 4)
    assert found["text"]["scored_tokens"] == 4 * (SEQ_LEN - 1)
    assert (found["seq_len"], found["stride"], found["seed"]) == (SEQ_LEN, SEQ_LEN, 0)
    assert found["text"]["bos_policy"] == "per-document"
    assert found["intervals"]["ratio"]["low"] <= ratio <= found["intervals"]["ratio"]["high"]
    assert found["target"]["manifest_sha256"] == sha256_file(lossy.target / MANIFEST_NAME)
    assert found["target"]["canonical_mla_id"] == load(lossy.target).canonical_mla_id
    assert found["source"]["checkpoint_digest"] == lossy.digests.checkpoint
    assert found["environment"]["command"] == ["mla-convert", "eval"]
    assert len(found["windows"]["kl"]) == 4


def test_the_same_options_give_the_same_figures(lossy: EvalPair) -> None:
    runs = [evaluate(lossy.target, lossy.source_folder, [str(lossy.text)], SMALL) for _ in range(2)]

    assert runs[0].figures == runs[1].figures
    assert runs[0].intervals == runs[1].intervals
    assert runs[1].source_reused


def test_length_and_stride_move_the_figures_and_stand_beside_them(lossy: EvalPair) -> None:
    shorter = EvalOptions(max_tokens=4 * SEQ_LEN, seq_len=SEQ_LEN // 2, stride=SEQ_LEN // 4)
    first, second = (
        evaluate(lossy.target, lossy.source_folder, [str(lossy.text)], options) for options in (SMALL, shorter)
    )

    assert first.figures.source_perplexity != second.figures.source_perplexity
    assert (second.seq_len, second.stride) == (SEQ_LEN // 2, SEQ_LEN // 4)


def test_a_lossless_conversion_costs_nothing(lossless: EvalPair) -> None:
    done = evaluate(lossless.target, lossless.source_folder, [str(lossless.text)], SMALL)

    assert 0 <= done.figures.kl < LOSSLESS_KL
    assert done.figures.top1_agreement == 1
    assert done.figures.ratio == pytest.approx(1, abs=1e-5)


def test_one_window_has_no_interval(lossy: EvalPair) -> None:
    options = EvalOptions(max_tokens=SEQ_LEN, seq_len=SEQ_LEN)

    assert evaluate(lossy.target, lossy.source_folder, [str(lossy.text)], options).to_json()["intervals"] is None


def test_one_prepared_source_serves_several_targets(lossy: EvalPair, lossless: EvalPair) -> None:
    prepared = prepare(lossy.source_folder, [str(lossy.text)], SMALL)
    kl = [evaluate_target(prepared, pair.target).figures.kl for pair in (lossless, lossy)]

    assert kl[0] < LOSSLESS_KL < kl[1]


@pytest.fixture
def no_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals come before any model is loaded."""
    for name in ("load_model", "source_states"):
        monkeypatch.setattr(module, name, lambda *_args: pytest.fail("a model was loaded"))


def refused(target: Path, source: str, text: Path, options: EvalOptions = SMALL) -> str:
    with pytest.raises(MLAConvertError) as caught:
        evaluate(target, source, [str(text)], options)
    assert isinstance(caught.value, InputRefused | UsageFault)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.usefixtures("no_model_runs")
class TestRefusals:
    def test_another_source(self, lossy: EvalPair, tmp_path: Path) -> None:
        other = make_pico(tmp_path / "other", "llama", kv_heads=2, seed=1)

        assert "source's weights differs" in refused(lossy.target, str(other), lossy.text)

    def test_a_source_with_another_configuration(self, lossy: EvalPair, tmp_path: Path) -> None:
        other = shutil.copytree(lossy.source_folder, tmp_path / "other")
        config = json.loads((other / "config.json").read_text(encoding="utf-8"))
        config["rope_parameters"]["rope_theta"] = 500.0
        (other / "config.json").write_text(json.dumps(config), encoding="utf-8")

        assert "source's configuration differs" in refused(lossy.target, str(other), lossy.text)

    def test_another_tokenizer(self, lossy: EvalPair, tmp_path: Path) -> None:
        other = shutil.copytree(lossy.source_folder, tmp_path / "other")
        path = other / "tokenizer.json"
        path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")

        assert "tokenizer differs" in refused(lossy.target, str(other), lossy.text)

    def test_a_changed_target(self, lossy: EvalPair, tmp_path: Path) -> None:
        changed = shutil.copytree(lossy.target, tmp_path / "changed")
        (changed / "generation_config.json").write_text("{}", encoding="utf-8")

        message = refused(changed, lossy.source_folder, lossy.text)
        assert "does not verify: changed file:generation_config.json" in message

    def test_a_folder_that_is_no_conversion(self, lossy: EvalPair) -> None:
        folder = Path(lossy.source_folder)

        assert "missing file:mla_manifest.json" in refused(folder, lossy.source_folder, lossy.text)

    def test_text_shorter_than_a_window(self, lossy: EvalPair, tmp_path: Path) -> None:
        text = write_text(tmp_path / "short.txt", SEQ_LEN - 2, seed=0)

        assert "shorter than one window" in refused(lossy.target, lossy.source_folder, text)

    def test_windows_beyond_the_positions(self, lossy: EvalPair) -> None:
        options = EvalOptions(seq_len=513)

        message = refused(lossy.target, lossy.source_folder, lossy.text, options)
        assert "at most 512; found 513" in message

    def test_no_text(self, lossy: EvalPair) -> None:
        with pytest.raises(UsageFault, match="at least one --text"):
            evaluate(lossy.target, lossy.source_folder, [], SMALL)


@pytest.fixture
def calibrated(lossy: EvalPair, tmp_path: Path) -> tuple[Path, Path]:
    """A conversion calibrated on a text, and that text."""
    text = write_text(tmp_path / "calibration.txt", 600, seed=2)
    options = ConvertOptions(
        profile="hf",
        qk_rope_head_dim=16,
        kv_lora_rank=20,
        calibration=(str(text),),
        calibration_tokens=128,
        calibration_window=64,
    )
    convert(lossy.source_folder, tmp_path / "out", options)
    return tmp_path / "out", text


def test_calibration_text_is_refused_unless_allowed_and_then_named(
    lossy: EvalPair, calibrated: tuple[Path, Path]
) -> None:
    target, text = calibrated
    message = refused(target, lossy.source_folder, text)
    allowed = EvalOptions(max_tokens=4 * SEQ_LEN, seq_len=SEQ_LEN, allow_overlap=True)
    done = evaluate(target, lossy.source_folder, [str(text)], allowed)
    held_out = evaluate(target, lossy.source_folder, [str(lossy.text)], SMALL)

    assert "'calibration.txt' (same text)" in message
    assert [item.name for item in done.text.shared_with_calibration] == ["calibration.txt"]
    assert held_out.text.shared_with_calibration == ()


def test_a_target_that_computes_nan_ends_without_figures(lossy: EvalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def broken(folder: Path) -> object:
        model = lossy.model()
        with torch.no_grad():
            model.model.embed_tokens.weight.fill_(float("inf"))
        return model

    monkeypatch.setattr(module, "load_model", broken)
    with pytest.raises(CheckFailed, match="target gives scores that are not finite"):
        evaluate(lossy.target, lossy.source_folder, [str(lossy.text)], replace(SMALL, backend="stock"))
    with pytest.raises(CheckFailed, match="expected finite numbers"):
        evaluate(lossy.target, lossy.source_folder, [str(lossy.text)], SMALL)


def test_several_texts_count_together(lossy: EvalPair, tmp_path: Path) -> None:
    other = write_text(tmp_path / "second.txt", 100, seed=5)
    done = evaluate(lossy.target, lossy.source_folder, [str(lossy.text), str(other)], SMALL)

    assert (done.text.documents, done.text.characters) == (2, 500)
    assert done.text.names == (str(lossy.text), str(other))


def test_the_real_model_lossless(smollm2: Path, wikipedia: WikipediaSplits, tmp_path: Path) -> None:
    """SmolLM2 with everything kept, 512 tokens of real text: no divergence, the same cache."""
    convert(str(smollm2), tmp_path / "out", LOSSLESS)
    options = EvalOptions(max_tokens=512, seq_len=256)
    done = evaluate(tmp_path / "out", str(smollm2), [str(wikipedia.heldout)], options)

    assert abs(done.figures.kl) < LOSSLESS_KL
    assert done.figures.top1_agreement == 1
    assert 10 < done.figures.source_perplexity < 60
    assert done.source_cache.numbers_per_token_per_layer == (384,) * 30
    assert done.target_cache.numbers_per_token_per_layer == (384,) * 30
