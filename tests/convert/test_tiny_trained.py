"""Lossy conversions of the tiny trained model: a model that is low-rank by accident would prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_convert.assets.wikipedia import WikipediaSplits
from mla_convert.convert.calibration_mix import sample_windows
from mla_convert.convert.calibration_text import read_corpus
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.tokenizer import load_tokenizer
from tests.convert.conftest import Converted, run_conversion
from tests.convert.support import load_stock

FOLDER = Path(__file__).resolve().parent.parent / "data" / "tiny_trained"
QUARTER = {"kv_lora_rank": 24, "qk_rope_head_dim": 8}  # 32 of the source's 128 numbers
Convert = Callable[..., Converted]


@pytest.fixture(scope="module")
def heldout(wikipedia: WikipediaSplits) -> Tensor:
    """(64, 256) tokens of articles that neither training nor calibration has seen."""
    corpus = read_corpus(str(wikipedia.heldout))
    return sample_windows((corpus,), load_tokenizer(FOLDER), tokens=64 * 256, length=256, seed=0).ids


@pytest.fixture(scope="module")
def convert_tiny(wikipedia: WikipediaSplits, tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> Convert:
    made: dict[str, Converted] = {}

    def get(**options: Any) -> Converted:
        chosen = ConvertOptions(
            calibration=(str(wikipedia.calibration),), calibration_window=256, profile="hf", **{**QUARTER, **options}
        )
        if repr(chosen) not in made:
            scratch = tmp_path_factory.mktemp("tiny")
            made[repr(chosen)] = run_conversion(FOLDER, scratch / "out", chosen, scratch / "probe", own_cache)
        return made[repr(chosen)]

    return get


@torch.inference_mode()
def loss(folder: Path, ids: Tensor) -> float:
    """Mean cross-entropy of the next token, nats."""
    model, total = load_stock(folder), 0.0
    for window in ids.split(8):
        total += float(model(input_ids=window, labels=window, use_cache=False).loss) * len(window)
    return total / len(ids)


def test_a_quarter_of_the_cache_costs_something(convert_tiny: Convert, heldout: Tensor) -> None:
    best = convert_tiny()
    source = loss(FOLDER, heldout)

    cost = loss(best.folder, heldout) - source

    assert best.plan.profile == "hf"
    assert (best.plan.rope_policy, best.plan.weighting) == ("optimal", "output")
    assert 4.0 < source < 4.6
    assert cost >= 0.1


def test_what_we_measure_beats_what_looks_at_nothing(convert_tiny: Convert, heldout: Tensor) -> None:
    ours, plain = convert_tiny(), convert_tiny(rope_policy="high", weighting="weight")
    half = convert_tiny(kv_lora_rank=48, qk_rope_head_dim=16)

    losses = [loss(done.folder, heldout) for done in (half, ours, plain)]

    assert losses == sorted(losses)
    assert losses[2] - losses[1] >= 0.1


def test_losses_are_predicted_in_their_order(convert_tiny: Convert, heldout: Tensor) -> None:
    """More width, less predicted error, less loss."""
    made = [convert_tiny(kv_lora_rank=rank) for rank in (16, 24, 56)]
    predicted = [sum(float(layer.predicted_output_error or 0) for layer in done.manifest.layers) for done in made]

    assert predicted == sorted(predicted, reverse=True)
    losses = [loss(done.folder, heldout) for done in made]
    assert losses == sorted(losses, reverse=True)


def test_all_of_it_costs_nothing(convert_tiny: Convert, heldout: Tensor) -> None:
    scratch = convert_tiny(kv_lora_rank=64, qk_rope_head_dim=64, rope_policy="high")

    assert loss(scratch.folder, heldout) == pytest.approx(loss(FOLDER, heldout), abs=1e-4)
