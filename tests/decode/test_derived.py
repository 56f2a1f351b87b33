"""Absorbed products: keyed by what they are made of, and an error once that has changed. LoRA on `kv_b_proj`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from mla_convert.decode.absorbed_module import AbsorbedHandle, AbsorbedOptions, use_absorbed
from mla_convert.decode.adapters import content_digest, effective_weight
from mla_convert.decode.derived import DerivedSources, derive
from mla_convert.errors import CheckFailed, InputRefused
from tests.convert.support import normal
from tests.decode.stock import apart, continuation, left_padded, logits, tiny, token_ids
from tests.tolerances import ABSORBED_FLOAT64, ABSORBED_LOGITS

FACTORS = AbsorbedOptions(page_size=4, expand_from=10_000)
PRODUCT = AbsorbedOptions(page_size=4, expand_from=10_000, value_side="product")
IDS = token_ids(1, 20)


def adapted(**options: Any) -> PeftModel:
    """A tiny model with LoRA whose `B` is not zero."""
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["kv_b_proj", "o_proj"], **options)
    model = get_peft_model(tiny(), config).eval()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            if "lora_B" in name:
                parameter.copy_(normal(*parameter.shape, seed=number).float() * 0.3)
    return model


def run(model: Any, handle: AbsorbedHandle) -> torch.Tensor:
    """Absorbed logits of two chunks on a new cache."""
    cache = handle.new_cache()
    return torch.cat([logits(model, input_ids=part, cache=cache) for part in IDS.split([13, 7], dim=1)], dim=1)


@pytest.mark.parametrize("options", [FACTORS, PRODUCT])
def test_lora_gives_equal_results_expanded_and_absorbed(options: AbsorbedOptions) -> None:
    model = adapted()
    expected, tokens = logits(model, input_ids=IDS), continuation(model, left_padded(2, 13))
    assert apart(expected, logits(tiny(), input_ids=IDS)) > 100 * ABSORBED_LOGITS

    with use_absorbed(model, options=options) as handle:
        assert apart(run(model, handle), expected) < ABSORBED_LOGITS
        assert torch.equal(continuation(model, left_padded(2, 13)), tokens)


def test_an_adapter_added_while_absorbed_is_used_and_stays() -> None:
    base = tiny()
    handle = use_absorbed(base, options=FACTORS)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False)).eval()
    found = run(model, handle)
    handle.restore()
    assert apart(found, logits(model, input_ids=IDS)) < ABSORBED_LOGITS


def loaded(model: PeftModel) -> None:
    base = model.get_base_model()
    base.load_state_dict({name: tensor * 1.01 for name, tensor in base.state_dict().items()})


def halved(model: PeftModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.double()


def scaled(model: PeftModel) -> None:
    for part in model.modules():
        if hasattr(part, "scaling") and isinstance(part.scaling, dict):
            part.scaling["default"] *= 2


def trained(model: PeftModel) -> None:
    with torch.no_grad():
        next(parameter for name, parameter in model.named_parameters() if "kv_b_proj.lora_A" in name).mul_(2)


def disabled(model: PeftModel) -> None:
    model.base_model.disable_adapter_layers()


CHANGES: dict[str, tuple[Callable[[PeftModel], Any], str]] = {
    "merged": (lambda model: model.merge_adapter(), "adapters"),
    "disabled": (disabled, "adapters"),
    "rescaled": (scaled, "adapters"),
    "trained on": (trained, "adapters"),
    "loaded": (loaded, "adapters|source_versions"),
    "another dtype": (halved, "adapters|quantisation"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [FACTORS, PRODUCT])
def test_a_changed_source_makes_the_product_an_error_until_it_is_derived_anew(
    change: str, options: AbsorbedOptions
) -> None:
    model = adapted()
    make, field = CHANGES[change]
    with use_absorbed(model, options=options) as handle:
        cache = handle.new_cache()
        logits(model, input_ids=IDS, cache=cache)
        make(model)
        with pytest.raises(CheckFailed, match=f"stale.*({field})"):
            logits(model, input_ids=IDS[:, :1], cache=cache)
        if change == "another dtype":
            return
        handle.refresh()
        found = run(model, handle)
    assert apart(found, logits(model, input_ids=IDS)) < ABSORBED_LOGITS


def test_unmerging_makes_the_merged_product_an_error() -> None:
    model = adapted()
    model.merge_adapter()
    with use_absorbed(model, options=PRODUCT) as handle:
        run(model, handle)
        model.unmerge_adapter()
        with pytest.raises(CheckFailed, match="adapters"):
            run(model, handle)


def test_a_reloaded_base_makes_the_contracted_product_an_error() -> None:
    model = tiny()
    with use_absorbed(model, options=PRODUCT) as handle:
        expected = run(model, handle)
        model.load_state_dict(model.state_dict())
        with pytest.raises(CheckFailed, match="source_versions"):
            run(model, handle)
        handle.refresh()
        assert torch.equal(run(model, handle), expected)


def test_a_write_behind_torchs_back_is_found_when_a_text_begins() -> None:
    model = tiny()
    with use_absorbed(model, options=PRODUCT) as handle:
        run(model, handle)
        model.model.layers[1].self_attn.kv_b_proj.weight.data.mul_(2)
        with pytest.raises(CheckFailed, match="base_digest"):
            run(model, handle)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"use_dora": True}, "variant"), ({"lora_dropout": 0.5}, "dropout"), ({"lora_bias": True}, "bias")],
)
def test_adapters_that_are_no_fixed_matrix_are_refused(options: dict[str, Any], what: str) -> None:
    model = adapted(**options).train()
    with pytest.raises(InputRefused, match=what):
        use_absorbed(model)


def test_dropout_is_no_obstacle_in_evaluation() -> None:
    model = adapted(lora_dropout=0.5)
    with use_absorbed(model, options=FACTORS) as handle:
        assert apart(run(model, handle), logits(model, input_ids=IDS)) < ABSORBED_LOGITS
        model.train()
        with pytest.raises(InputRefused, match="dropout"):
            run(model, handle)


def test_projections_that_are_no_matrix_are_refused() -> None:
    model = tiny()
    model.model.layers[0].self_attn.kv_b_proj = torch.nn.Sequential(model.model.layers[0].self_attn.kv_b_proj)
    with pytest.raises(InputRefused, match="Sequential"):
        use_absorbed(model)
    hooked = tiny()
    hooked.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(InputRefused, match="hooks"):
        use_absorbed(hooked)


def test_the_effective_weight_is_what_the_module_multiplies_by() -> None:
    part = adapted().get_base_model().model.layers[0].self_attn.kv_b_proj.double()
    inputs = normal(4, part.in_features, seed=2)

    assert apart(inputs @ effective_weight(part).T, part(inputs).detach()) < ABSORBED_FLOAT64


def test_the_key_names_the_shard_and_the_layout() -> None:
    attention = tiny().model.layers[0].self_attn
    made = [
        derive(DerivedSources(attention.kv_b_proj, attention.o_proj, 4, 8, side, shard, "layer"))
        for side, shard in (("factors", "0/1"), ("factors", "0/2"), ("product", "0/1"))
    ]
    assert len({(one.key.shard, one.key.layout) for one in made}) == 3
    for one in made[1:]:
        with pytest.raises(CheckFailed, match=r"shard|layout|adapters"):
            one.require_current(DerivedSources(attention.kv_b_proj, attention.o_proj, 4, 8, "factors", "0/1", "layer"))
    assert made[0].key.base_digest == (content_digest(attention.kv_b_proj),)
