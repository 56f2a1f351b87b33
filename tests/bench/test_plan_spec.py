"""The short form of a plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_convert.bench.plan_spec import PlanSpec
from mla_convert.errors import UsageFault


@given(
    profile=st.sampled_from(["engine", "hf", "full"]),
    rope=st.integers(0, 999),
    latent=st.integers(0, 999),
    policy=st.sampled_from(["optimal", "high", "low", "uniform", "2-norm", "greedy", "rorope", "mean"]),
)
def test_what_is_printed_reads_back(profile: str, rope: int, latent: int, policy: str) -> None:
    spec = PlanSpec(profile, rope, latent, policy)  # type: ignore[arg-type]

    assert PlanSpec.parse(str(spec)) == spec
    assert PlanSpec.parse(f"{profile}:{rope}+{latent}:{policy}") == spec
    assert spec.width == rope + latent


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine", "profile:rope\\+latent"),
        ("engine:40", "profile:rope\\+latent"),
        ("engine:40+", "profile:rope\\+latent"),
        ("engine:-4+8", "profile:rope\\+latent"),
        (" engine:40+152", "profile:rope\\+latent"),
        ("engine:40+152:", "profile:rope\\+latent"),
        ("vllm:40+152", "no such profile; expected engine, hf, full; found vllm"),
        ("hf:40+152:high:low", "more than one rope policy or recipe"),
        ("hf:40+152:self:block", "no such rope policy or recipe; expected optimal, .*; found self"),
        ("hf:40+152:best", "no such rope policy or recipe; expected optimal, .*; found best"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageFault, match=message):
        PlanSpec.parse(text)


def test_the_conversion_it_stands_for() -> None:
    options = PlanSpec.parse("hf:48+144:2-norm").options("text.jsonl", tokens=640, seed=3)

    assert (options.profile, options.qk_rope_head_dim, options.kv_lora_rank) == ("hf", 48, 144)
    assert (options.rope_policy, options.calibration) == ("2-norm", ("text.jsonl",))
    assert (options.calibration_tokens, options.seed) == (640, 3)


@given(
    policy=st.sampled_from(["optimal", "high"]),
    refine=st.sampled_from([None, "block", "e2e"]),
    own_text=st.booleans(),
)
def test_refinement_and_own_text_read_back(policy: str, refine: str | None, own_text: bool) -> None:
    spec = PlanSpec("engine", 40, 152, policy, None, refine, own_text)  # type: ignore[arg-type]

    assert PlanSpec.parse(str(spec)) == spec
    options = spec.options("text.jsonl", tokens=640, seed=3)
    assert options.refine == refine
    assert options.calibration == (("text.jsonl", "self") if own_text else ("text.jsonl",))


def test_a_recipe_stands_where_a_policy_does() -> None:
    spec = PlanSpec.parse("hf:32+160:transmla")
    options = spec.options("text.jsonl", tokens=640, seed=3)

    assert str(spec) == "hf:32+160:transmla"
    assert (spec.recipe, spec.policy) == ("transmla", "optimal")
    assert (options.recipe, options.rope_policy) == ("transmla", "optimal")
    assert options.calibration == ("text.jsonl",)
    assert PlanSpec.parse("hf:32+160:optimal").recipe is None
    # A recipe that measures nothing is given no text: it would be refused.
    assert PlanSpec.parse("hf:16+160:x-ecomla").options("text.jsonl", tokens=640, seed=3).calibration == ()
