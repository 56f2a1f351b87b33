"""Every policy, profile, factorisation and weighting through whole conversions, and what is refused beforehand."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mla_convert.convert import calibrate as calibration
from mla_convert.convert.calibrate import StatisticsStore, calibrate
from mla_convert.convert.calibration_mix import sample_windows
from mla_convert.convert.calibration_text import read_corpus
from mla_convert.convert.checkpoint import SourceCheckpoint, open_source
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.planning import make_plan
from mla_convert.convert.run import convert
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import InputRefused, MLAConvertError, UsageFault
from mla_convert.manifests.digest import digest_files
from mla_convert.manifests.models import MANIFEST_NAME, NO_SPLIT
from mla_convert.manifests.verify import verify_folder
from tests.conftest import PicoFactory
from tests.convert.conftest import Converted, ConvertedFactory, run_conversion
from tests.convert.support import load_stock, logits_of, read_json, tensors_of

GROUPED = {"kv_heads": 2}
WIDTHS: dict[str, Any] = {"kv_lora_rank": 24, "qk_rope_head_dim": 8}


@pytest.fixture(scope="module")
def calibrated(text: Path) -> dict[str, Any]:
    return {"calibration": (str(text),), "calibration_tokens": 1024, "calibration_window": 64}


@pytest.fixture(scope="module")
def source(pico: PicoFactory) -> SourceCheckpoint:
    return open_source(str(pico(**GROUPED)))


def loss(done: Converted, text: Path) -> float:
    """Mean KL of target from source on the calibration text, nats per token: what a weighting is to lower."""
    tokenizer = load_tokenizer(done.source)
    ids = sample_windows((read_corpus(str(text)),), tokenizer, tokens=512, length=64, seed=9).ids
    ours, theirs = (logits_of(load_stock(folder), ids).log_softmax(-1) for folder in (done.folder, done.source))
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@pytest.mark.parametrize(
    ("policy", "pairs", "heads"),
    [
        ("high", (0, 0, 1, 1), (0, 1, 0, 1)),
        ("low", (6, 6, 7, 7), (0, 1, 0, 1)),
        ("uniform", (0, 0, 4, 4), (0, 1, 0, 1)),
        ("2-norm", None, None),
        ("optimal", None, None),
    ],
)
def test_every_policy_in_the_hf_profile(
    converted: ConvertedFactory, calibrated: dict[str, Any], policy: str, pairs: Any, heads: Any
) -> None:
    done = converted(source=GROUPED, profile="hf", rope_policy=policy, **WIDTHS, **calibrated)

    assert done.plan.rope_policy == done.manifest.method.rope_policy == policy
    assert done.manifest.reload_check.passed
    assert verify_folder(done.folder, done.source).ok
    frequencies = open_source(str(done.source)).rope.frequencies
    for layer in done.manifest.layers:
        slots = layer.rope_slots
        assert len(slots) == 4
        if pairs is not None:
            assert tuple(slot.pair for slot in slots) == pairs
            assert tuple(slot.kv_head for slot in slots) == heads
        assert [slot.frequency for slot in slots] == [float(frequencies[slot.pair]) for slot in slots]
        assert all((slot.component is None) is (policy != "optimal") for slot in slots)
    # One list of frequencies for the model, and the same in the configuration.
    assert len({tuple(slot.pair for slot in layer.rope_slots) for layer in done.manifest.layers}) == 1
    assert done.manifest.identity.position.frequencies == pytest.approx(
        [slot.frequency for slot in done.manifest.layers[0].rope_slots], rel=1e-9
    )


@pytest.mark.parametrize("policy", ["high", "low", "uniform"])
def test_policies_that_look_at_nothing_need_no_text(converted: ConvertedFactory, policy: str) -> None:
    done = converted(source=GROUPED, rope_policy=policy, **WIDTHS)

    assert done.plan.weighting == "weight"
    assert done.manifest.calibration is None
    assert done.manifest.reload_check.passed


def test_optimal_in_the_engine_profile(converted: ConvertedFactory, calibrated: dict[str, Any]) -> None:
    done = converted(source={**GROUPED, "rms_norm_eps": 1e-5}, profile="engine", **WIDTHS, **calibrated)
    config = read_json(done.folder / "config.json")

    chosen = [slot.pair for slot in done.manifest.layers[0].rope_slots]
    assert chosen == [0, 1, 2, 3]
    assert config["rope_parameters"]["rope_type"] == "default"
    assert config["rope_parameters"]["rope_theta"] == pytest.approx(10_000 ** (8 / 16))
    assert config["attention_bias"] is False
    assert not [name for name in load_file(done.folder / "model.safetensors") if name.endswith("bias")]
    assert done.manifest.reload_check.passed


def test_auto_takes_engine_where_it_can(source: SourceCheckpoint, calibrated: dict[str, Any]) -> None:
    assert make_plan(source, ConvertOptions(**WIDTHS, **calibrated)).profile == "engine"
    assert make_plan(source, ConvertOptions(**WIDTHS, rope_policy="high")).profile == "hf"
    assert make_plan(source, ConvertOptions(kv_lora_rank=24, qk_rope_head_dim=18, **calibrated)).profile == "hf"


@pytest.mark.parametrize("policy", ["high", "low", "uniform", "2-norm"])
def test_what_engine_cannot_store_is_refused_with_what_it_can(
    source: SourceCheckpoint, calibrated: dict[str, Any], policy: Any
) -> None:
    with pytest.raises(InputRefused) as caught:
        make_plan(source, ConvertOptions(profile="engine", rope_policy=policy, **WIDTHS, **calibrated))

    message = str(caught.value)
    assert repr(policy) in message
    assert "--rope-policy optimal with at most 8 slots" in message
    assert "--profile hf" in message


def test_several_components_of_a_pair_are_refused_in_engine(
    source: SourceCheckpoint, calibrated: dict[str, Any]
) -> None:
    options = ConvertOptions(profile="engine", kv_lora_rank=24, qk_rope_head_dim=18, **calibrated)

    with pytest.raises(InputRefused, match="one component per frequency"):
        make_plan(source, options)


def test_the_full_profile_is_refused_with_the_ones_there_are(source: SourceCheckpoint) -> None:
    with pytest.raises(InputRefused, match="engine and hf"):
        make_plan(source, ConvertOptions(lossless=True, profile="full"))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no widths": ({}, "--lossless, or both"),
    "one width": ({"kv_lora_rank": 8}, "--lossless, or both"),
    "lossless and a width": ({"lossless": True, "kv_lora_rank": 8}, "Drop --kv-lora-rank"),
    "rank 0": ({**WIDTHS, "kv_lora_rank": 0, "rope_policy": "high"}, "1 to 48"),
    "rank too large": ({**WIDTHS, "kv_lora_rank": 49, "rope_policy": "high"}, "1 to 48"),
    "rope 0": ({**WIDTHS, "qk_rope_head_dim": 0, "rope_policy": "high"}, "a multiple of 4 from 4 to 32"),
    "rope too large": ({**WIDTHS, "qk_rope_head_dim": 36, "rope_policy": "high"}, "a multiple of 4 from 4 to 32"),
    "rope not of all heads": ({**WIDTHS, "qk_rope_head_dim": 6, "rope_policy": "high"}, "a multiple of 4"),
    "optimal without text": (WIDTHS, "--calibration"),
    "2-norm without text": ({**WIDTHS, "rope_policy": "2-norm"}, "--calibration"),
    "output weighting without text": ({**WIDTHS, "rope_policy": "high", "weighting": "output"}, "--calibration"),
    "activation without text": ({**WIDTHS, "rope_policy": "high", "weighting": "activation"}, "--calibration"),
    "key rank of joint": ({**WIDTHS, "rope_policy": "high", "key_rank": 4}, "--factorization split"),
    "key rank too large": (
        {**WIDTHS, "rope_policy": "high", "factorization": "split", "key_rank": 25},
        "0 to 24",
    ),
    "padding narrower": ({**WIDTHS, "rope_policy": "high", "pad_cache": (23, 8)}, "at least 24[+]8"),
    "padding odd": ({**WIDTHS, "rope_policy": "high", "pad_cache": (32, 9)}, "even"),
    "window longer than tokens": (
        {**WIDTHS, "calibration": ("x",), "calibration_tokens": 100, "calibration_window": 512},
        "--calibration-window",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_options_that_do_not_fit_are_refused_with_the_range(pico: PicoFactory, tmp_path: Path, case: str) -> None:
    options, match = BAD[case]

    with pytest.raises(UsageFault, match=match) as caught:
        convert(str(pico(**GROUPED)), tmp_path / "out", ConvertOptions(**options))

    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_split_shares_the_rank_and_says_how(converted: ConvertedFactory, calibrated: dict[str, Any]) -> None:
    free = converted(source=GROUPED, factorization="split", profile="hf", **WIDTHS, **calibrated)
    fixed = converted(source=GROUPED, factorization="split", key_rank=9, profile="hf", **WIDTHS, **calibrated)

    for layer in free.manifest.layers:
        assert layer.key_rank is not None
        assert layer.value_rank is not None
        assert layer.key_rank + layer.value_rank == layer.useful_rank == 24
    assert {(layer.key_rank, layer.value_rank) for layer in fixed.manifest.layers} == {(9, 15)}
    assert free.manifest.reload_check.passed
    assert fixed.manifest.reload_check.passed


def test_every_weighting_and_gamma_is_a_conversion_of_its_own(
    converted: ConvertedFactory, calibrated: dict[str, Any], text: Path
) -> None:
    options = {"source": GROUPED, "profile": "hf", **WIDTHS, **calibrated}
    made = {w: converted(weighting=w, **options) for w in ("output", "activation", "weight")}
    made["γ = 1"] = converted(weighting="output", gamma="one", **options)

    assert len({done.manifest.method.plan_id for done in made.values()}) == 4
    for name, done in made.items():
        assert done.manifest.method.weighting == name.replace("γ = 1", "output")
        assert done.manifest.method.gamma == ("one" if name == "γ = 1" else "measured")
        assert done.manifest.reload_check.passed
        predicted = [layer.predicted_output_error for layer in done.manifest.layers]
        assert all((value is None) is (done.plan.weighting != "output") for value in predicted)
    losses = {name: loss(done, text) for name, done in made.items()}
    assert losses["output"] < losses["weight"]
    assert losses["activation"] < losses["weight"]


def test_padding_is_zeros_in_both_profiles(converted: ConvertedFactory, calibrated: dict[str, Any]) -> None:
    for profile in ("engine", "hf"):
        options = {"source": GROUPED, "profile": profile, **WIDTHS, **calibrated}
        plain, padded = converted(**options), converted(pad_cache=(64, 32), **options)

        config = read_json(padded.folder / "config.json")
        assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (64, 32)
        assert padded.manifest.method.padding == "64+32 holds 24+8"
        down = load_file(padded.folder / "model.safetensors")["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
        assert not down[24:64].any()
        assert not down[72:].any()
        assert padded.manifest.reload_check.passed
        ids = torch.arange(3, 60)[None]
        ours, theirs = (logits_of(load_stock(done.folder), ids) for done in (padded, plain))
        assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-4


@pytest.mark.parametrize("profile", ["engine", "hf"])
def test_fewer_tokens_than_dimensions(converted: ConvertedFactory, text: Path, profile: str) -> None:
    options = {"calibration": (str(text),), "calibration_tokens": 32, "calibration_window": 16}
    done = converted(source=GROUPED, profile=profile, **WIDTHS, **options)

    record = done.manifest.calibration
    assert record is not None
    assert (record.tokens, record.windows, record.window_length) == (32, 2, 16)
    assert record.under_determined
    assert record.damping == 1e-3
    assert any("32 calibration tokens for 48 dimensions" in warning for warning in done.manifest.warnings)
    assert done.manifest.reload_check.passed


def test_calibration_is_recorded(converted: ConvertedFactory, calibrated: dict[str, Any], text: Path) -> None:
    done = converted(source=GROUPED, profile="hf", **WIDTHS, **calibrated)
    record, corpus = done.manifest.calibration, read_corpus(str(text))

    assert record is not None
    assert not record.under_determined
    assert (record.tokens, record.window_length, record.seed) == (1024, 64, 0)
    assert record.texts[0].sha256 == corpus.sha256
    assert record.texts[0].documents == 10
    known = {(document.name, document.sha256) for document in corpus.documents}
    assert {(document.id, document.sha256) for document in record.documents} <= known
    assert done.manifest.split == NO_SPLIT


def output_digests(done: Converted) -> dict[str, str]:
    return {file.path: file.sha256 for file in digest_files(done.folder, exclude=frozenset({MANIFEST_NAME}))}


def test_the_same_seed_gives_the_same_files(
    converted: ConvertedFactory, calibrated: dict[str, Any], tmp_path: Path
) -> None:
    """Into an empty cache, so that the measurement is repeated as well."""
    options = {"profile": "hf", **WIDTHS, **calibrated}
    first = converted(source=GROUPED, **options)

    again = run_conversion(
        first.source, tmp_path / "out", ConvertOptions(**options), tmp_path / "probe", tmp_path / "cache"
    )

    assert output_digests(again) == output_digests(first)
    assert again.manifest.canonical_mla_id == first.manifest.canonical_mla_id
    assert again.manifest.method.plan_id == first.manifest.method.plan_id


def test_another_seed_reads_other_windows(converted: ConvertedFactory, calibrated: dict[str, Any], text: Path) -> None:
    options = {"source": GROUPED, "profile": "hf", **WIDTHS, **calibrated}
    first, other = converted(**options), converted(seed=1, **options)

    assert first.manifest.calibration is not None
    assert other.manifest.calibration is not None
    assert first.manifest.calibration.statistics_digest != other.manifest.calibration.statistics_digest
    assert output_digests(first)["model.safetensors"] != output_digests(other)["model.safetensors"]
    tokenizer = load_tokenizer(first.source)
    windows = [
        sample_windows((read_corpus(str(text)),), tokenizer, tokens=1024, length=64, seed=s).ids for s in (0, 0, 1)
    ]
    assert torch.equal(windows[0], windows[1])
    assert not torch.equal(windows[0], windows[2])


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (4, 32), generator=torch.Generator().manual_seed(3))


def same(first: StatisticsStore, second: StatisticsStore, layer: int) -> bool:
    ours, theirs = tensors_of(first.load(layer)), tensors_of(second.load(layer))
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_statistics_are_measured_once(
    source: SourceCheckpoint, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "a"))
    first = calibrate(source, "sha256:source", ids)
    with monkeypatch.context() as patch:
        patch.delattr(calibration, "measure_layer")
        second = calibrate(source, "sha256:source", ids)
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "b"))
    fresh = calibrate(source, "sha256:source", ids)

    assert (first.reused, second.reused, fresh.reused) == (False, True, False)
    assert first.digest == second.digest == fresh.digest
    assert fresh.folders != first.folders
    for layer in range(4):
        assert same(first, second, layer)
        assert same(first, fresh, layer)


def test_the_key_of_the_statistics_is_what_they_depend_on(
    source: SourceCheckpoint, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path))
    other_tokens = ids.clone()
    other_tokens[0, 0] += 1

    stores = [
        calibrate(source, "sha256:source", ids),
        calibrate(source, "sha256:other", ids),
        calibrate(source, "sha256:source", other_tokens),
        calibrate(source, "sha256:source", ids.view(2, 64)),
    ]

    assert len({store.digest for store in stores}) == 4
    assert not any(store.reused for store in stores)


def test_an_interrupted_measurement_is_not_reused(
    source: SourceCheckpoint, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path))
    original, calls = calibration.measure_layer, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(calibration, "measure_layer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calibrate(source, "sha256:source", ids)

    assert list((tmp_path / "statistics").iterdir()) == []
    assert not calibrate(source, "sha256:source", ids).reused


def test_a_tokenizer_of_another_model_is_refused(pico: PicoFactory, text: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(pico(vocab_size=40, **GROUPED), tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(pico(**GROUPED) / name, folder / name)
    options = ConvertOptions(calibration=(str(text),), calibration_tokens=64, calibration_window=32, **WIDTHS)

    with pytest.raises(InputRefused, match="tokenizer is not the model's"):
        convert(str(folder), tmp_path / "out", options)


def test_calibration_without_a_tokenizer_is_refused(pico: PicoFactory, text: Path, tmp_path: Path) -> None:
    options = ConvertOptions(calibration=(str(text),), calibration_tokens=64, calibration_window=32, **WIDTHS)

    with pytest.raises(MLAConvertError, match="tokenizer") as caught:
        convert(str(pico(tokenizer=False, **GROUPED)), tmp_path / "out", options)
    assert isinstance(caught.value, InputRefused)
    assert list(tmp_path.iterdir()) == []


def test_a_lossless_plan_does_not_read_text(source: SourceCheckpoint, calibrated: dict[str, Any]) -> None:
    plan = make_plan(source, ConvertOptions(lossless=True, **calibrated))

    assert plan.calibration is None
    assert plan == make_plan(source, ConvertOptions(lossless=True))


def test_a_plan_has_an_identity(source: SourceCheckpoint) -> None:
    plan = make_plan(source, ConvertOptions(lossless=True))

    assert plan.plan_id == make_plan(source, ConvertOptions(lossless=True)).plan_id
    assert plan.plan_id != make_plan(source, replace(ConvertOptions(lossless=True), seed=1)).plan_id
    assert type(plan).model_validate_json(plan.model_dump_json()) == plan
