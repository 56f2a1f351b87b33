"""Published recipes through whole conversions of a tiny model, and what contradicts them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from mla_convert.convert.checkpoint import SourceCheckpoint, open_source
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import RecipeName
from mla_convert.convert.planning import make_plan
from mla_convert.convert.recipes import RECIPES, apply_recipe
from mla_convert.errors import InputRefused, UsageFault
from mla_convert.manifests.verify import verify_folder
from tests.conftest import PicoFactory
from tests.convert.conftest import ConvertedFactory
from tests.convert.support import read_json

GROUPED = {"kv_heads": 2}
WIDTHS: dict[str, Any] = {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
POLICIES = {
    "transmla": "rorope",
    "mha2mla": "2-norm",
    "care": "rorope",
    "x-ecomla": "mean",
    "elitekv": "greedy",
    "optimal": "optimal",
}


@pytest.fixture(scope="module")
def calibrated(text: Path) -> dict[str, Any]:
    return {"calibration": (str(text),), "calibration_tokens": 1024, "calibration_window": 64}


@pytest.fixture(scope="module")
def source(pico: PicoFactory) -> SourceCheckpoint:
    return open_source(str(pico(**GROUPED)))


def test_every_recipe_is_in_the_table_and_sets_options_that_exist() -> None:
    assert set(RECIPES) == set(get_args(RecipeName)) == set(POLICIES)
    known = {field.name for field in fields(ConvertOptions)}
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        assert set(recipe.settings) <= known
        assert recipe.settings["rope_policy"] == POLICIES[name]


@pytest.mark.parametrize("recipe", get_args(RecipeName))
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_recipe_converts_and_says_what_it_is(
    converted: ConvertedFactory, calibrated: dict[str, Any], recipe: str, family: str
) -> None:
    given = calibrated if RECIPES[recipe].calibrated else {}  # type: ignore[index]
    done = converted(family, source=GROUPED, profile="hf", recipe=recipe, **WIDTHS, **given)
    method = done.manifest.method

    assert (method.recipe, method.rope_policy) == (recipe, POLICIES[recipe])
    if recipe != "optimal":
        assert RECIPES[recipe].paper in method.paper_contracts  # type: ignore[index]
        assert method.gamma == "one"
    assert done.manifest.reload_check.passed
    assert verify_folder(done.folder, done.source).ok
    frequencies = [slot.frequency for slot in done.manifest.layers[0].rope_slots]
    for layer in done.manifest.layers:
        assert [slot.frequency for slot in layer.rope_slots] == frequencies
    assert done.manifest.identity.position.frequencies == pytest.approx(frequencies, rel=1e-9)


def test_the_frequencies_of_rorope_lie_at_a_uniform_stride_and_mix_a_fold(
    converted: ConvertedFactory, calibrated: dict[str, Any]
) -> None:
    done = converted(source=GROUPED, profile="hf", rope_policy="rorope", freqfold="4", **WIDTHS, **calibrated)
    slots = done.manifest.layers[0].rope_slots

    assert [slot.pair for slot in slots] == [0, 2, 4, 6]
    assert [slot.mixes for slot in slots] == [(0, 1, 2, 3), (0, 1, 2, 3), (4, 5, 6, 7), (4, 5, 6, 7)]
    assert [slot.component for slot in slots] == [0, 1, 0, 1]
    assert done.manifest.method.freqfold == 4
    assert done.manifest.reload_check.passed


def test_a_fold_that_is_chosen_is_one_that_could_be_given(
    converted: ConvertedFactory, calibrated: dict[str, Any]
) -> None:
    chosen = converted(source=GROUPED, profile="hf", recipe="transmla", **WIDTHS, **calibrated)

    assert chosen.plan.freqfold == "auto"
    assert chosen.manifest.method.freqfold in (1, 2, 4, 8)


@pytest.mark.parametrize(("stride", "pairs"), [(0.5, [0, 0, 1, 1]), (2.0, [0, 2, 4, 6])])
def test_the_engine_profile_holds_other_grids(
    converted: ConvertedFactory, calibrated: dict[str, Any], stride: float, pairs: list[int]
) -> None:
    done = converted(source=GROUPED, profile="engine", rope_stride=stride, **WIDTHS, **calibrated)
    slots = done.manifest.layers[0].rope_slots
    rope = read_json(done.folder / "config.json")["rope_parameters"]

    assert [slot.pair for slot in slots] == pairs
    assert [slot.component for slot in slots] == [pairs[:i].count(pair) for i, pair in enumerate(pairs)]
    assert [slot.frequency for slot in slots] == pytest.approx([1e4 ** (-2 * stride * j / 16) for j in range(4)])
    assert rope == {"rope_type": "default", "rope_theta": pytest.approx(1e4 ** (stride * 8 / 16))}
    assert done.manifest.method.rope_stride == stride
    assert done.manifest.reload_check.passed
    assert verify_folder(done.folder, done.source).ok


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("transmla", {"rope_policy": "high"}, "contradict --recipe transmla.*--rope-policy rorope.*found.*high"),
        ("mha2mla", {"factorization": "split"}, "contradict --recipe mha2mla.*joint.*found.*split"),
        ("care", {"weighting": "output", "rank_rule": "spectra"}, "contradict --recipe care.*--weighting activation"),
        ("elitekv", {"balance": "transmla"}, "contradict --recipe elitekv.*--balance none.*transmla"),
        ("optimal", {"gamma": "one"}, "contradict --recipe optimal.*--gamma measured"),
    ],
)
def test_options_that_contradict_a_recipe_are_refused_all_at_once(
    recipe: RecipeName, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageFault, match=message):
        apply_recipe(ConvertOptions(recipe=recipe, **changes))


def test_options_that_agree_with_a_recipe_are_kept() -> None:
    found = apply_recipe(ConvertOptions(recipe="mha2mla", weighting="weight", dtype="bfloat16", seed=5))

    assert (found.rope_policy, found.weighting, found.dtype, found.seed) == ("2-norm", "weight", "bfloat16", 5)
    # The papers leave the fold to be tuned.
    assert apply_recipe(ConvertOptions(recipe="transmla", freqfold="4")).freqfold == "4"
    assert apply_recipe(ConvertOptions(rope_policy="low")) == ConvertOptions(rope_policy="low")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freqfold": "2"}, "--freqfold is for --rope-policy rorope"),
        ({"rope_policy": "rorope", "freqfold": "8", "qk_rope_head_dim": 6}, "divi|stride"),
        ({"rank_rule": "care"}, "--rank-rule is for --factorization split"),
        ({"rank_rule": "care", "factorization": "split", "key_rank": 4}, "--rank-rule is for"),
        ({"balance": "transmla"}, "no effect with --weighting output"),
        ({"balance": "transmla", "weighting": "activation", "factorization": "split"}, "--balance is for"),
        ({"rope_stride": 0.5, "profile": "hf"}, "engine"),
        ({"rope_stride": 0.5, "rope_policy": "high"}, "--rope-stride is for"),
        ({"rope_stride": 3.0}, "out of range"),
        ({"rope_stride": 2.0, "qk_rope_head_dim": 10, "profile": "engine"}, "at most 4 slots"),
        ({"damping": "none", "weighting": "weight"}, "--damping has no effect"),
        ({"centring": "none", "weighting": "weight"}, "--centring has no effect"),
        ({"rope_policy": "mean", "qk_rope_head_dim": 18, "weighting": "weight"}, "from 2 to 16"),
    ],
)
def test_options_of_one_method_that_would_do_nothing_are_refused(
    source: SourceCheckpoint, calibrated: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((UsageFault, InputRefused), match=message):
        make_plan(source, ConvertOptions(**{**WIDTHS, **calibrated, **options}))


def test_one_key_head_has_no_second_component(pico: PicoFactory, calibrated: dict[str, Any]) -> None:
    alone = open_source(str(pico(kv_heads=1)))

    with pytest.raises(InputRefused, match="holds 2 components of each pair, and the source has 1 KV heads"):
        make_plan(alone, ConvertOptions(profile="engine", rope_stride=0.5, **WIDTHS, **calibrated))


@pytest.mark.parametrize("policy", ["greedy", "rorope"])
def test_policies_that_measure_need_text(source: SourceCheckpoint, policy: Any) -> None:
    with pytest.raises(UsageFault, match=f"--rope-policy {policy} needs calibration text"):
        make_plan(source, ConvertOptions(rope_policy=policy, **WIDTHS))
