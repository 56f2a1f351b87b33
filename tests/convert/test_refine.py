"""Refinement: the fitted attention is the reference's, fits never end worse on held-out windows, runs can go on."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mla_convert.convert import refine_block, reload_check, reload_child
from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.refinable import RefinableAttention
from mla_convert.convert.refine_fit import FitSettings, fit, split_windows
from mla_convert.convert.run import convert
from mla_convert.errors import InputRefused, UsageFault
from mla_convert.manifests.models import load
from mla_convert.manifests.verify import verify_folder
from mla_convert.mla.reference import mla_attention
from mla_convert.mla.weights import MLALayerWeights
from tests import tolerances
from tests.conftest import PicoFactory

TINY_TRAINED = Path(__file__).resolve().parent.parent / "data" / "tiny_trained"
H, G, D, NOPE, SLOTS, RANK, VALUE = 6, 2, 24, 8, 3, 10, 8


def random_weights(bias: bool) -> MLALayerWeights:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def pairs(*shape: int) -> Tensor:
        return torch.complex(draw(*shape), draw(*shape))

    return MLALayerWeights(
        q_nope=draw(H, NOPE, D),
        q_nope_bias=draw(H, NOPE) if bias else None,
        q_rope=pairs(H, SLOTS, D),
        q_rope_bias=pairs(H, SLOTS) if bias else None,
        k_rope=pairs(SLOTS, D),
        k_rope_bias=pairs(SLOTS) if bias else None,
        latent=draw(RANK, D),
        k_up=draw(G, NOPE, RANK),
        v_up=draw(G, VALUE, RANK),
        output=draw(H, D, VALUE),
        output_bias=draw(D) if bias else None,
        frequencies=torch.tensor([1.0, 0.3, 0.3], dtype=torch.float64),
        softmax_scale=0.05,
    )


@pytest.fixture(autouse=True)
def _reload_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fresh process costs four seconds a conversion; `test_reload_check.py` has it."""
    monkeypatch.setattr(reload_check, "_run_child", reload_child.compare)


@pytest.mark.parametrize("bias", [False, True])
def test_what_is_fitted_computes_what_the_reference_computes(bias: bool) -> None:
    weights = random_weights(bias)
    inputs = torch.randn(2, 11, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = mla_attention(weights, inputs).output
    attention = RefinableAttention(weights)

    with torch.no_grad():
        found = attention(inputs.float()).double()
    again = mla_attention(attention.to_weights(), inputs).output

    assert (found - expected).abs().max() <= tolerances.FLOAT32_ATTENTION * expected.abs().max()
    assert (again - expected).abs().max() <= tolerances.FLOAT32_ATTENTION * expected.abs().max()
    assert attention.to_weights().heads_per_group == 1


def test_every_parameter_but_the_sources_own_projection_takes_part() -> None:
    attention = RefinableAttention(random_weights(bias=True))
    attention(torch.randn(1, 7, D, generator=torch.Generator().manual_seed(1))).square().sum().backward()

    gradients = {name: parameter.grad for name, parameter in attention.named_parameters()}
    assert len(gradients) == 9
    assert gradients.pop("output") is None
    assert all(gradient is not None and bool(gradient.abs().max() > 0) for gradient in gradients.values())


class Line(nn.Module):
    """`y = slope·x`, for fits whose outcome is known."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([slope]))


def line_loss(line: Line, slopes: Sequence[float], windows: Sequence[int]) -> Tensor:
    return torch.stack([(line.slope - slopes[window]).square().sum() for window in windows]).mean()


def test_a_fit_finds_the_minimum_and_keeps_it() -> None:
    line, settings = Line(1.0), FitSettings(steps=200, batch=2, rate=0.05, checks=4, seed=0)
    trace = fit(line, lambda windows: line_loss(line, [2.0] * 8, windows), range(7), [7], settings)

    assert trace.before == pytest.approx(1.0)
    assert trace.after < 1e-4
    assert float(line.slope.detach()) == pytest.approx(2.0, abs=1e-2)


def test_a_fit_that_makes_held_out_windows_worse_is_undone() -> None:
    line, settings = Line(1.0), FitSettings(steps=40, batch=1, rate=0.05, checks=4, seed=0)
    trace = fit(line, lambda windows: line_loss(line, [5.0] * 7 + [1.0], windows), range(7), [7], settings)

    assert (trace.kept_step, trace.after) == (0, trace.before)
    assert float(line.slope.detach()) == 1.0


def test_steps_that_are_too_large_are_taken_back_and_made_smaller() -> None:
    line, settings = Line(1.0), FitSettings(steps=60, batch=1, rate=0.5, checks=12, seed=0)
    trace = fit(line, lambda windows: line_loss(line, [1.01] * 8, windows), range(7), [7], settings)

    assert trace.kept_step > 0
    assert trace.after < 0.1 * trace.before


def test_held_out_windows_are_never_fitted_to() -> None:
    seen: list[int] = []
    line = Line(1.0)

    def loss(windows: Sequence[int]) -> Tensor:
        if torch.is_grad_enabled():
            seen.extend(windows)
        return line_loss(line, [2.0] * 16, windows)

    train, held = split_windows(16, seed=3)
    fit(line, loss, train, held, FitSettings(steps=30, batch=3, rate=0.01, checks=1, seed=3))

    assert len(held) == 2
    assert sorted((*train, *held)) == list(range(16))
    assert set(seen) == set(train)
    assert {seen.count(window) for window in train} <= {6, 7}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(" ".join(f"word{number % 83} of line {number}" for number in range(900)))
    return path


def refined(text: Path, **options: object) -> ConvertOptions:
    wanted: dict[str, object] = {
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "calibration": (str(text),),
        "calibration_tokens": 16 * 32,
        "calibration_window": 32,
        "refine": "block",
        "refine_steps": 12,
        "refine_continued": 2 * 32,
        "refine_tokens": 10 * 2 * 32,
        **options,
    }
    return ConvertOptions(**wanted)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that a trained model has something to say about, and that is always at hand."""
    folder = tmp_path_factory.mktemp("prose")
    for name in sorted(topics)[:40]:
        (folder / f"{name}.txt").write_text(topics[name])
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by both kinds, which begin with the same layers."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("kind", ["block", "e2e"])
def test_a_refined_conversion_is_closer_and_says_so(
    prose: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(cache))
    source = TINY_TRAINED
    wanted = refined(
        prose,
        refine=kind,
        refine_steps=40,
        refine_batch=4,
        calibration_tokens=64 * 64,
        calibration_window=64,
        refine_tokens=40 * 4 * 64,
    )
    done = convert(str(source), tmp_path / "out", wanted)
    again = convert(str(source), tmp_path / "again", wanted)

    record = done.manifest.refinement
    assert record is not None
    assert record == load(tmp_path / "out").refinement
    assert all(layer.after <= layer.before for layer in record.layers)
    assert sum(layer.after for layer in record.layers) < 0.9 * sum(layer.before for layer in record.layers)
    assert not set(record.held_out_windows) & set(split_windows(record.windows, 0)[0])
    assert (record.end_to_end is None) == (kind == "block")
    if record.end_to_end is not None:
        assert record.end_to_end.after < record.end_to_end.before
        assert record.e2e_steps == 40
    assert verify_folder(tmp_path / "out", source).problems == ()
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "again")
    assert again.manifest.canonical_mla_id == done.manifest.canonical_mla_id


def weights_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def test_a_run_that_was_interrupted_goes_on_with_the_layer_it_was_in(
    pico: PicoFactory, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(pico(num_layers=3)))
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "whole"))
    convert(source, tmp_path / "out", refined(text))
    fitted: list[int] = []
    original = refine_block._fit

    def counted(*arguments: object) -> object:
        if len(fitted) == 2 and not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            raise KeyboardInterrupt
        fitted.append(len(fitted))
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "halves"))
    monkeypatch.setattr(refine_block, "_fit", counted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "halves-out", refined(text))
    assert not (tmp_path / "halves-out").exists()
    convert(source, tmp_path / "halves-out", refined(text))

    assert len(fitted) == source.num_layers
    assert weights_of(tmp_path / "halves-out") == weights_of(tmp_path / "out")


def test_states_on_disk_change_nothing(
    pico: PicoFactory, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pico(num_layers=2)
    for name, budget in (("memory", 2**31), ("disk", 1)):
        monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / f"cache-{name}"))
        convert(str(source), tmp_path / name, refined(text), memory_budget_bytes=budget)

    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("memory", "disk"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_pass_end_to_end_is_the_same_when_layers_are_computed_twice(
    pico: PicoFactory, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pico(num_layers=2)
    for name, budget in (("kept", 2**31), ("twice", 1)):
        monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / f"cache-{name}"))
        convert(str(source), tmp_path / name, refined(text, refine="e2e"), memory_budget_bytes=budget)

    one, other = (load(tmp_path / name).refinement for name in ("kept", "twice"))
    assert one is not None
    assert other is not None
    assert one.end_to_end is not None
    assert other.end_to_end is not None
    assert one.end_to_end.after == pytest.approx(other.end_to_end.after, rel=1e-4)


def test_refinement_needs_text_and_two_windows(pico: PicoFactory, text: Path, tmp_path: Path) -> None:
    source = str(pico())
    with pytest.raises(UsageFault, match="needs calibration text"):
        convert(source, tmp_path / "out", refined(text, calibration=(), rope_policy="high", qk_rope_head_dim=16))
    with pytest.raises(UsageFault, match="needs calibration text"):
        convert(source, tmp_path / "out", ConvertOptions(lossless=True, refine="block"))
    with pytest.raises(InputRefused, match="too few calibration windows"):
        convert(source, tmp_path / "out", replace(refined(text), calibration_tokens=32))
    assert not (tmp_path / "out").exists()


def test_a_layer_whose_attention_adds_nothing_has_a_loss(
    pico: PicoFactory, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "cache"))
    silent = tmp_path / "silent"
    shutil.copytree(pico(), silent)
    tensors = load_file(silent / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"].zero_()
    save_file(tensors, silent / "model.safetensors", metadata={"format": "pt"})

    record = convert(str(silent), tmp_path / "out", refined(text, refine_steps=2)).manifest.refinement
    assert record is not None
    assert record.layers[0].before == 0
