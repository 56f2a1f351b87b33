"""The quality part from files to figures: equal to the plain evaluation, by domain, by position, deterministic."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import CheckFailed
from mla_convert.eval import text_quality as module
from mla_convert.eval.evaluate import EvalOptions, evaluate, prepare
from mla_convert.eval.suite_context import SuiteContext
from mla_convert.eval.text_quality import SIZES, Sizes, measure_quality
from mla_convert.manifests.evaluation.quality import QualitySection
from mla_convert.manifests.models import load
from tests.eval.helpers import SEQ_LEN, EvalPair, write_text
from tests.tolerances import FLOAT64_ALGEBRA, LOSSLESS_KL

SMALL = EvalOptions(max_tokens=8 * SEQ_LEN, seq_len=SEQ_LEN, resamples=200)
LETTERS, DIGITS = "abcdefgh ", "0123456789"


def context(
    pair: EvalPair, texts: list[Path], options: EvalOptions = SMALL, target: Path | None = None
) -> SuiteContext:
    prepared = prepare(pair.source_folder, [str(text) for text in texts], options)
    return SuiteContext(prepared, target or pair.target, load(pair.target), "quick")


def text_of(path: Path, characters: str, seed: int, count: int = 300) -> Path:
    path.write_text("".join(random.Random(seed).choices(characters, k=count)), encoding="utf-8")
    return path


def test_one_text_gives_the_figures_of_the_plain_evaluation(lossy: EvalPair) -> None:
    plain = evaluate(lossy.target, lossy.source_folder, [str(lossy.text)], SMALL)
    found = measure_quality(context(lossy, [lossy.text]))

    assert plain.intervals is not None
    for ours, theirs in (
        ("source_perplexity", "source_perplexity"),
        ("target_perplexity", "target_perplexity"),
        ("ratio", "ratio"),
        ("kl", "kl"),
        ("top1", "top1_agreement"),
    ):
        figure, ends = getattr(found.overall, ours), getattr(plain.intervals, theirs)
        assert figure.value == pytest.approx(getattr(plain.figures, theirs), rel=FLOAT64_ALGEBRA)
        assert [figure.low, figure.high] == pytest.approx([ends.low, ends.high], rel=FLOAT64_ALGEBRA)
    assert [item.kl for item in found.windows] == pytest.approx(plain.scores.kl.tolist(), rel=FLOAT64_ALGEBRA)
    assert (found.overall.windows, found.overall.tokens) == (8, 8 * (SEQ_LEN - 1))
    assert (found.overall.sha256, found.bos_policy, found.dtype) == (plain.text.sha256, "per-document", "float32")
    assert found.domains[0].model_dump(exclude={"name"}) == found.overall.model_dump(exclude={"name"})


def test_a_target_that_is_broken_on_one_domain_shows_there_alone(lossless: EvalPair, tmp_path: Path) -> None:
    """Digits lose their embeddings: text without digits must not notice."""
    letters, digits = text_of(tmp_path / "letters.txt", LETTERS, 1), text_of(tmp_path / "digits.txt", DIGITS, 2)
    broken = shutil.copytree(lossless.target, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    ids = load_tokenizer(broken)(DIGITS, add_special_tokens=False)["input_ids"]
    tensors["model.embed_tokens.weight"][ids] = tensors["model.embed_tokens.weight"][ids].roll(1, 0)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    sound = measure_quality(context(lossless, [letters, digits]))
    found = measure_quality(context(lossless, [letters, digits], target=broken))

    by_name = {Path(item.name).name: item for item in found.domains}
    assert by_name["letters.txt"].kl.value < LOSSLESS_KL < 0.1 < by_name["digits.txt"].kl.value
    assert found.worst_domain.name == str(digits)
    assert by_name["letters.txt"].top1.value == 1 > by_name["digits.txt"].top1.value
    assert by_name["letters.txt"].ratio.value == pytest.approx(1, abs=1e-5)
    assert all(item.kl.value < LOSSLESS_KL for item in sound.domains)
    assert {item.text for item in found.windows if item.kl > 0.1} == {str(digits)}


def test_domains_and_windows_add_up_to_the_whole(lossy: EvalPair, tmp_path: Path) -> None:
    texts = [text_of(tmp_path / "a.txt", LETTERS, 1), text_of(tmp_path / "b.txt", DIGITS, 2, 40)]
    found = measure_quality(context(lossy, texts))

    assert [item.windows for item in found.domains] == [7, 1]
    assert (found.domains[1].kl.low, found.domains[1].ece_target.high) == (None, None)
    tokens = sum(item.tokens for item in found.windows)
    assert found.overall.tokens == tokens == sum(item.tokens for item in found.domains)
    assert found.overall.kl.value == pytest.approx(sum(item.kl for item in found.windows) / tokens, rel=FLOAT64_ALGEBRA)
    assert len({item.ids_digest for item in found.windows}) == 8
    whole = sum(bucket.tokens * bucket.kl.value for bucket in found.buckets)
    assert whole / tokens == pytest.approx(found.overall.kl.value, rel=FLOAT64_ALGEBRA)
    assert [(bucket.first, bucket.last) for bucket in found.buckets] == [(1, 15), (16, SEQ_LEN - 1)]


def test_long_windows_have_the_model_length_or_are_left_out(lossy: EvalPair, tmp_path: Path) -> None:
    positions = int(lossy.source.config.max_position_embeddings)
    long = measure_quality(context(lossy, [write_text(tmp_path / "long.txt", positions + 10, seed=4)]))
    short = measure_quality(context(lossy, [lossy.text]))

    assert long.long_seq_len == positions == 512
    assert [bucket.first for bucket in long.long_context] == [1, 16, 32, 64, 128, 256]
    assert sum(bucket.tokens for bucket in long.long_context) == positions - 1
    assert (short.long_seq_len, short.long_context) == (None, ())


def test_the_suite_bounds_the_tokens_and_the_same_run_gives_the_same_section(
    lossy: EvalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SIZES, "quick": Sizes(tokens=3 * SEQ_LEN, long_length=SEQ_LEN, long_windows=1)}
    monkeypatch.setattr(module, "SIZES", sizes)
    quick = measure_quality(context(lossy, [lossy.text]))
    full = measure_quality(replace(context(lossy, [lossy.text]), suite="full"))

    assert (len(quick.windows), len(full.windows)) == (3, 8)
    assert measure_quality(context(lossy, [lossy.text])) == quick
    assert QualitySection.model_validate_json(quick.model_dump_json()) == quick


def test_a_target_that_computes_nan_ends_without_figures(lossy: EvalPair, tmp_path: Path) -> None:
    broken = shutil.copytree(lossy.target, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckFailed, match="window 0: the target gives scores that are not finite"):
        measure_quality(context(lossy, [lossy.text], target=broken))
