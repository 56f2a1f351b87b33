"""Gradients of an absorbed model: those of stock, or a refusal; never a part of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from mla_convert import mla_decode, use_absorbed
from mla_convert.errors import InputRefused
from tests.convert.support import normal
from tests.decode.stock import VOCABULARY, tiny
from tests.tolerances import ABSORBED_LOGITS

TOKENS = 5  # fewer than are expanded anyway


def _lora(*targets: str) -> Callable[[Any], Any]:
    def add(model: Any) -> Any:
        torch.manual_seed(0)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False))
        return adapted.eval()

    return add


def _only(*parts: str) -> Callable[[Any], Any]:
    def freeze(model: Any) -> Any:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in parts))
        return model

    return freeze


TRAINED: dict[str, Callable[[Any], Any]] = {
    "all": lambda model: model,
    "kv_b_proj": _only("kv_b_proj"),
    "o_proj": _only("o_proj"),
    "adapters on kv_b_proj": _lora("kv_b_proj"),
    "adapters on kv_b_proj and o_proj": _lora("kv_b_proj", "o_proj"),
}


def _gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model(ids, labels=ids, use_cache=True).loss.backward()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(parameter.grad is not None for parameter in named.values())
    return {name: parameter.grad.clone() for name, parameter in named.items()}


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("trained", TRAINED)
def test_gradients_of_a_short_chunk_are_stock_s(trained: str, backend: str) -> None:
    ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    expected = _gradients(TRAINED[trained](tiny()), ids)
    model = TRAINED[trained](tiny())

    with use_absorbed(model, backend):
        found = _gradients(model, ids)

    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        size = float(gradient.abs().max())
        assert float((found[name] - gradient).abs().max()) <= ABSORBED_LOGITS * size, name


def test_gradients_over_cached_rows_are_refused() -> None:
    model = _only("kv_b_proj")(tiny())
    ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with use_absorbed(model) as handle:
        cache = handle.new_cache()
        with torch.no_grad():
            model(ids, cache=cache)
        with pytest.raises(InputRefused, match="gradients do not flow through cached rows"):
            model(ids[:, :1], cache=cache)


@pytest.mark.parametrize("backend", ["torch", "reference", "triton-interpret"])
@pytest.mark.parametrize("part", ["query", "pool"])
def test_a_decode_call_that_wants_a_gradient_is_refused(backend: str, part: str) -> None:
    query, pool = normal(1, 1, 2, 40, seed=1).float(), normal(2, 16, 40, seed=2).float()
    (query if part == "query" else pool).requires_grad_()
    table, lengths = torch.arange(2)[None].int(), torch.tensor([20], dtype=torch.int32)

    with pytest.raises(InputRefused, match="gradients do not flow"):
        mla_decode(query, pool, table, lengths, 32, 0.2, backend=backend)
    with torch.no_grad():
        mla_decode(query, pool, table, lengths, 32, 0.2, backend="torch")
