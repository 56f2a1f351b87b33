"""The choice of a split: which are tried, what is predicted of them, and that more width is never predicted worse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_convert.convert import choose as module
from mla_convert.convert.budget import Goal
from mla_convert.convert.calibration_run import gather
from mla_convert.convert.checkpoint import SourceCheckpoint, open_source
from mla_convert.convert.choose import Choice, Search, choose, search_widths, split_plans
from mla_convert.convert.closed_form import ClosedForm
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.predict import Prediction, predict, rotation_loss
from mla_convert.convert.receipts import digest_of_source
from mla_convert.convert.selection import Measured
from mla_convert.errors import InputRefused, UsageFault
from tests.conftest import PicoFactory


@pytest.fixture(scope="module")
def source(pico: PicoFactory) -> SourceCheckpoint:
    return open_source(str(pico(kv_heads=2)))


@pytest.fixture
def options(text: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> ConvertOptions:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(own_cache))
    return ConvertOptions(calibration=(str(text),), calibration_tokens=512, calibration_window=64)


@pytest.fixture
def search(source: SourceCheckpoint, options: ConvertOptions) -> Search:
    plan = split_plans(source, options, 32)[0]
    evidence = gather(source, digest_of_source(source), plan)
    assert evidence is not None
    return Search(source, options, evidence.store)


def splits(plans: tuple[ConversionPlan, ...]) -> list[tuple[int, int]]:
    return [(plan.qk_rope_head_dim, plan.kv_lora_rank) for plan in plans]


def test_splits_are_shares_of_the_width_and_legal(source: SourceCheckpoint, options: ConvertOptions) -> None:
    plans = split_plans(source, options, 32)

    assert splits(plans) == [(4, 28), (6, 26), (8, 24), (10, 22), (14, 18), (16, 16)]
    assert {plan.profile for plan in plans} == {"engine"}


def test_splits_of_the_real_models_widths_are_aligned(pico: PicoFactory, options: ConvertOptions) -> None:
    """The sizes of SmolLM2-135M; eight splits or more, among them those that were measured best."""
    source = open_source(str(pico(heads=9, kv_heads=3, head_dim=64, hidden_size=576, num_layers=1)))
    found = {width: splits(split_plans(source, replace(options, profile="hf"), width)) for width in (192, 128, 96)}

    assert [len(plans) for plans in found.values()] == [8, 8, 8]
    assert {(40, 152), (48, 144), (32, 160)} <= set(found[192])
    assert (32, 96) in found[128]
    assert {(24, 72), (32, 64)} <= set(found[96])
    assert all(rope % 8 == rank % 8 == 0 for rope, rank in found[192])


def test_engine_is_preferred_and_hf_carries_the_rest(source: SourceCheckpoint, options: ConvertOptions) -> None:
    """The engine profile holds eight pairs here: 16 numbers of rope."""
    hf = split_plans(source, replace(options, profile="hf"), 60)
    auto = split_plans(source, options, 60)

    assert max(rope for rope, _ in splits(hf)) == 30
    assert max(rope for rope, _ in splits(auto)) == 16
    assert {plan.profile for plan in split_plans(source, options, 60, slots=(10, 12))} == {"hf"}
    assert splits(split_plans(source, options, 40, slots=(5, 3, 3))) == [(6, 34), (10, 30)]


def test_what_no_split_can_do_is_refused_with_the_rules_own_words(
    source: SourceCheckpoint, options: ConvertOptions
) -> None:
    with pytest.raises(InputRefused, match="one component per frequency"):
        split_plans(source, replace(options, profile="engine"), 60, slots=(10,))
    with pytest.raises(UsageFault, match="--kv-lora-rank is out of range"):
        split_plans(source, options, 64, slots=(1,))
    with pytest.raises(UsageFault, match="--calibration-window is longer"):
        split_plans(source, replace(options, calibration_window=4096, calibration_tokens=4096), 32)


def test_more_width_is_predicted_to_lose_less(search: Search) -> None:
    predicted = [search.best(width).prediction.kl for width in (8, 16, 32, 48, 64)]

    assert predicted == sorted(predicted, reverse=True)
    assert predicted[0] > 2 * predicted[-1]


def test_the_best_split_is_the_least_of_those_tried_and_each_is_tried_once(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = search.best(32)

    assert best.prediction.kl == min(candidate.prediction.kl for candidate in search.considered)
    assert len(search.considered) == 6
    monkeypatch.setattr(module, "predict", lambda *_arguments: pytest.fail("predicted twice"))
    assert search.best(32) == best


def test_a_prediction_is_a_sum_over_layers_and_repeatable(search: Search, source: SourceCheckpoint) -> None:
    plan = split_plans(source, search.options, 32)[2]
    found = predict(source, search.store, plan)

    assert len(found.per_layer) == 4
    assert min(found.per_layer) > 0
    assert found.kl == pytest.approx(sum(found.per_layer))
    assert predict(source, search.store, plan) == found


def test_rotations_that_are_all_kept_lose_nothing(search: Search, source: SourceCheckpoint) -> None:
    statistics, weights = search.store.load(0), source.layer_weights(0)
    losses = []
    for slots in (1, 4, 16):
        plan = split_plans(source, replace(search.options, profile="hf"), 2 * slots + 4, slots=(slots,))[0]
        kept = ClosedForm.of(source, plan, Measured(search.store, None)).convert(0, weights, statistics).slots
        losses.append(rotation_loss(kept, statistics, measured_gamma=True))
        assert rotation_loss(kept, statistics, measured_gamma=False) >= losses[-1]

    assert losses[0] > losses[1] > 0
    assert losses[2] == pytest.approx(0, abs=1e-9 * losses[0])


def test_a_budget_takes_the_best_split_of_its_width(source: SourceCheckpoint, options: ConvertOptions) -> None:
    choice = choose(source, options, Goal(budget=0.5))

    assert isinstance(choice, Choice)
    assert (choice.best.width, len(choice.considered)) == (32, 6)
    assert choice.options.qk_rope_head_dim == choice.best.plan.qk_rope_head_dim
    assert choice.options.kv_lora_rank == choice.best.plan.kv_lora_rank
    record = choice.record()
    assert record.chosen_for == "--budget 50%"
    assert record.predicted_kl == min(candidate.predicted_kl for candidate in record.candidates)
    assert {candidate.width for candidate in record.candidates} == {32}


@pytest.mark.parametrize("curve", [lambda width: 10 / width, lambda width: 64.0 - width], ids=["convex", "linear"])
def test_a_loss_takes_the_narrowest_width_that_keeps_it(
    source: SourceCheckpoint, options: ConvertOptions, monkeypatch: pytest.MonkeyPatch, curve: Any
) -> None:
    """On a made-up loss with its best split at a quarter, found without trying every width."""

    def made_up(_source: object, _store: object, plan: ConversionPlan) -> Prediction:
        width = plan.qk_rope_head_dim + plan.kv_lora_rank
        return Prediction(curve(width) * (1 + abs(plan.qk_rope_head_dim / width - 0.25)), ())

    monkeypatch.setattr(module, "predict", made_up)
    widths = search_widths(source, options)
    assert widths == tuple(range(4, 65, 2))
    for wanted in (6, 20, 40, 64):
        limit = curve(wanted) * 1.02
        choice = choose(source, options, Goal(max_kl=limit))
        assert choice.best.prediction.kl <= limit
        exact = [width for width in widths if best_loss(source, options, width, made_up) <= limit]
        assert choice.best.width == exact[0]
        assert len({candidate.width for candidate in choice.considered}) <= 7


def best_loss(source: SourceCheckpoint, options: ConvertOptions, width: int, loss: Any) -> float:
    return min(loss(None, None, plan).kl for plan in split_plans(source, options, width))


def test_a_loss_that_no_width_keeps_is_refused_with_what_can_be_had(
    source: SourceCheckpoint, options: ConvertOptions
) -> None:
    with pytest.raises(UsageFault, match=r"--max-kl is out of range; expected .* \(width 64\) to .* \(width 4\)"):
        choose(source, options, Goal(max_kl=0.0))


@pytest.mark.parametrize(
    "changes", [{"weighting": "activation"}, {"calibration": (), "rope_policy": "high"}], ids=["weighting", "no text"]
)
def test_what_cannot_be_predicted_is_refused(
    source: SourceCheckpoint, options: ConvertOptions, changes: dict[str, Any]
) -> None:
    with pytest.raises(UsageFault, match="needs a predicted loss"):
        choose(source, replace(options, **changes), Goal(width=32))
