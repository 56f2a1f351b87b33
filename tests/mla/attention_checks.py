"""What is asked of the attention module, as functions of the module, so that damaged copies can be put to them too.

The golden values come from stock `DeepseekV3Attention` (see `attention_stock`), computed as the checks run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_convert.errors import InputRefused
from tests.convert.support import normal
from tests.mla.attention_stock import (
    BATCH,
    LENGTH,
    SIZES,
    Check,
    Modules,
    difference,
    factors_of,
    places,
    stock_layer,
    stock_run,
    tokens,
)
from tests.tolerances import ABSORBED_FLOAT64, FLOAT64_ALGEBRA, HAND_EXAMPLE, STOCK_NORM_FLOAT32


def check_hand_example(modules: Modules) -> None:
    """Seed 2, section 3, with its printed numbers."""
    att = modules.attention
    one = torch.ones(1, dtype=torch.float64)
    factors = att.MLAFactors(
        q_down=None,
        q_down_bias=None,
        q_norm=None,
        q_up=torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64),
        kv_down=torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64),
        kv_down_bias=None,
        latent_norm=att.Norm(one, 1e-6),
        w_uk=2 * one[None, None],
        w_uv=3 * one[None, None],
        w_o=torch.tensor([[[1.0], [0.0]]], dtype=torch.float64),
        output_bias=None,
        rope=att.Rope(one * math.pi / 2, interleaved=True),
        scale=att.softmax_scale(1, 2),
    )
    inputs = torch.tensor([[[1.0, 1.0], [0.0, -1.0]]], dtype=torch.float64)
    product = att.value_output_product(factors.w_o, factors.w_uv)
    assert product.flatten().tolist() == [3.0, 0.0]
    for step in (
        att.expanded(factors, inputs, places(1, 2)),
        att.absorbed(factors, inputs, places(1, 2)),
        att.absorbed(factors, inputs, places(1, 2), w_vo=product),
    ):
        _near(step.output[0], [[3.0, 0.0], [0.842745, 0.0]])
        _near(step.weights[0, 0], [[1.0, 0.0], [0.640457, 0.359543]])
        _near(step.held.latent[0], [[1.0], [-1.0]])
        _near(step.held.rope[0], [[1.0, 1.0], [0.0, -1.0]])
        assert sum(part[0, 0].numel() for part in (step.held.latent, step.held.rope)) == 3
        _near((step.weights[0, 0] @ step.held.latent[0])[1], [0.280915])
    nope, rope = att.project_query(factors, inputs, places(1, 2))
    _near(att.absorb_query(nope, factors.w_uk)[0, 1], [[0.0]])
    _near(rope[0, 1], [[1.0, 0.0]])


def _near(found: Tensor, expected: Any) -> None:
    assert (found - torch.tensor(expected, dtype=torch.float64)).abs().max() < HAND_EXAMPLE


def check_names_and_shapes(modules: Modules) -> None:
    """Names, order and shapes of the stock state; one missing, one too many or a wrong size is refused."""
    nope, rope, value = SIZES["nope"], SIZES["rope"], SIZES["value"]
    shared = {
        "kv_a_proj_with_mqa.weight": (SIZES["latent"] + rope, SIZES["hidden"]),
        "kv_a_layernorm.weight": (SIZES["latent"],),
        "kv_b_proj.weight": (SIZES["heads"] * (nope + value), SIZES["latent"]),
        "o_proj.weight": (SIZES["hidden"], SIZES["heads"] * value),
    }
    plain = {"q_proj.weight": (SIZES["heads"] * (nope + rope), SIZES["hidden"])}
    low_rank = {
        "q_a_proj.weight": (SIZES["bottleneck"], SIZES["hidden"]),
        "q_a_layernorm.weight": (SIZES["bottleneck"],),
        "q_b_proj.weight": (SIZES["heads"] * (nope + rope), SIZES["bottleneck"]),
    }
    layers = {bottleneck: stock_layer(bottleneck=bottleneck) for bottleneck in (False, True)}
    for bottleneck, query in ((False, plain), (True, low_rank)):
        state = layers[bottleneck].state_dict()
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == query | shared
        assert list(state)[-4:] == list(shared)
        factors_of(modules, layers[bottleneck])
    shape = modules.stock.StockShape(
        SIZES["heads"], nope, modules.attention.Rope(torch.ones(rope // 2).double(), True), 1e-6
    )
    state = dict(layers[False].state_dict())
    for wrong in (
        {name: tensor for name, tensor in state.items() if name != "kv_a_layernorm.weight"},
        {**state, "q_b_proj.weight": state["q_proj.weight"]},
        {**state, "q_a_proj.bias": state["q_proj.weight"][:, 0]},
        {**state, "o_proj.weight": state["o_proj.weight"][:, : SIZES["heads"]]},
        {**state, "kv_a_proj_with_mqa.weight": state["kv_a_proj_with_mqa.weight"][1:]},
    ):
        with pytest.raises(InputRefused):
            modules.stock.stock_factors(wrong, shape)


def check_golden(modules: Modules) -> None:
    """Outputs and cached rows of the stock layer: plain and low-rank queries, both layouts, biases, YaRN."""
    att = modules.attention
    for arguments in (
        {},
        {"bottleneck": True},
        {"interleave": False},
        {"bottleneck": True, "interleave": False, "bias": True},
        {"bias": True, "yarn": True},
    ):
        layer = stock_layer(**arguments)
        factors = factors_of(modules, layer)
        expected, latent, rope = stock_run(layer, tokens(), places(first=3))
        product = att.value_output_product(factors.w_o, factors.w_uv)
        for step in (
            att.expanded(factors, tokens(), places(first=3)),
            att.absorbed(factors, tokens(), places(first=3)),
            att.absorbed(factors, tokens(), places(first=3), w_vo=product),
        ):
            assert difference(step.output, expected) < STOCK_NORM_FLOAT32
            assert difference(step.held.latent, latent) < STOCK_NORM_FLOAT32
            assert difference(step.held.rope, rope) < FLOAT64_ALGEBRA
        assert factors.scale == pytest.approx(layer.scaling, rel=1e-12)


def chunked(modules: Modules, factors: Any, chunks: tuple[int, ...], form: str, keep: Tensor | None = None) -> Any:
    """One sequence in chunks: all outputs, and the last step. `form` is expanded, absorbed or contracted."""
    att = modules.attention
    product = att.value_output_product(factors.w_o, factors.w_uv) if form == "contracted" else None
    held, outputs, start = None, [], 0
    step = None
    for size in chunks:
        new, where = tokens()[:, start : start + size], places()[:, start : start + size]
        start += size
        seen = None if keep is None else keep[:, :start]
        if form == "expanded":
            step = att.expanded(factors, new, where, held, seen)
        else:
            step = att.absorbed(factors, new, where, held, seen, product)
        held = step.held
        outputs.append(step.output)
    return torch.cat(outputs, dim=1), step


CHUNKS = ((LENGTH,), (1,) * LENGTH, (4, 1, 1, 3), (2, 5, 2), (8, 1))


def check_absorbed_equals_expanded(modules: Modules) -> None:
    """Repeated prefill and append, each form on its own cache, to 1e-12."""
    for bottleneck in (False, True):
        factors = factors_of(modules, stock_layer(bottleneck=bottleneck, bias=True))
        for chunks in CHUNKS:
            expected, last = chunked(modules, factors, chunks, "expanded")
            for form in ("absorbed", "contracted"):
                found, step = chunked(modules, factors, chunks, form)
                assert difference(found, expected) < ABSORBED_FLOAT64
                assert difference(step.weights, last.weights) < ABSORBED_FLOAT64
                assert torch.equal(step.held.latent, last.held.latent)


def check_chunks_equal_one_pass(modules: Modules) -> None:
    """Any chunking is the one pass, to 1e-12, and leaves the same rows."""
    factors = factors_of(modules, stock_layer(bias=True))
    whole = modules.attention.expanded(factors, tokens(), places())
    for form in ("expanded", "absorbed", "contracted"):
        for chunks in CHUNKS:
            found, step = chunked(modules, factors, chunks, form)
            assert difference(found, whole.output) < ABSORBED_FLOAT64
            assert difference(step.held.rope, whole.held.rope) < ABSORBED_FLOAT64
            assert step.held.length == LENGTH


def check_cache_bytes(modules: Modules) -> None:
    """`d_c + d_R` numbers a token, whatever the number of heads (case 18 of the reference)."""
    factors = factors_of(modules, stock_layer())
    held = modules.attention.absorbed(factors, tokens(), places()).held
    size = sum(part.numel() * part.element_size() for part in (held.latent, held.rope))
    assert size == BATCH * LENGTH * (SIZES["latent"] + SIZES["rope"]) * 8


def check_relative_positions(modules: Modules) -> None:
    """Shifting every position changes nothing; shifting some does."""
    for interleave in (True, False):
        factors = factors_of(modules, stock_layer(interleave=interleave))
        for form in (modules.attention.expanded, modules.attention.absorbed):
            here = form(factors, tokens(), places()).output
            assert difference(form(factors, tokens(), places(first=57)).output, here) < FLOAT64_ALGEBRA
            assert difference(form(factors, tokens(), places() * 2).output, here) > STOCK_NORM_FLOAT32


def check_padding(modules: Modules) -> None:
    """Padded keys are hidden in all forms, and a row that sees nothing gives 0 (the bias alone)."""
    att = modules.attention
    layer = stock_layer(bias=True)
    factors = factors_of(modules, layer)
    pads = 4
    keep = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    keep[1, :pads] = False
    alone, _, _ = stock_run(layer, tokens()[1:, pads:], places(1, LENGTH - pads, first=pads))
    for form in ("expanded", "absorbed", "contracted"):
        for chunks in CHUNKS:
            found, step = chunked(modules, factors, chunks, form, keep)
            assert difference(found[1:, pads:], alone) < STOCK_NORM_FLOAT32
            assert torch.equal(found[1, :pads], factors.output_bias.expand(pads, -1))
            assert bool((step.weights[1, ..., :pads] == 0).all())
    nothing = att.visibility(2, 5, torch.zeros(1, 5, dtype=torch.bool))
    assert bool((att.attention_weights(normal(1, 3, 2, 5, seed=1), nothing) == 0).all())


GRADED = ("q_down", "q_down_bias", "q_up", "kv_down", "kv_down_bias", "w_uk", "w_uv", "w_o", "output_bias")


def check_gradients(modules: Modules) -> None:
    """Central differences in float64 reach every factor, both norms included, through the expanded form."""
    att = modules.attention
    factors = factors_of(modules, stock_layer(bottleneck=True, bias=True))
    inputs, positions = tokens(1, 3), places(1, 3)
    leaves = [getattr(factors, name).detach().clone().requires_grad_() for name in GRADED]
    norms = [norm.weight.detach().clone().requires_grad_() for norm in (factors.q_norm, factors.latent_norm)]

    def run(x: Tensor, q_weight: Tensor, latent_weight: Tensor, *parts: Tensor) -> Tensor:
        changed = replace(
            factors,
            q_norm=att.Norm(q_weight, factors.q_norm.eps),
            latent_norm=att.Norm(latent_weight, factors.latent_norm.eps),
            **dict(zip(GRADED, parts, strict=True)),
        )
        output: Tensor = att.expanded(changed, x, positions).output
        return output

    graph = run(inputs, *norms, *leaves).square().sum()
    reached = torch.autograd.grad(graph, [*norms, *leaves], allow_unused=True)
    for name, gradient in zip(("q_norm", "latent_norm", *GRADED), reached, strict=True):
        assert gradient is not None, name
        assert bool(gradient.abs().max() > 0), name
    arguments = (inputs.clone().requires_grad_(), *norms, *leaves)
    assert torch.autograd.gradcheck(run, arguments, fast_mode=True)


def check_product_gradients(modules: Modules) -> None:
    """The chain rule of the contracted product is what autograd finds."""
    att = modules.attention
    factors = factors_of(modules, stock_layer())
    w_o, w_uv = factors.w_o.clone().requires_grad_(), factors.w_uv.clone().requires_grad_()
    product = att.value_output_product(w_o, w_uv)
    product.retain_grad()
    att.absorbed(factors, tokens(), places(), w_vo=product).output.square().sum().backward()
    d_o, d_uv = att.product_gradients(product.grad, w_o.detach(), w_uv.detach())
    assert difference(d_o, w_o.grad) < ABSORBED_FLOAT64
    assert difference(d_uv, w_uv.grad) < ABSORBED_FLOAT64


def check_latent_rows(modules: Modules) -> None:
    """Appending copies, keeps order, counts, and refuses a ragged chunk."""
    att = modules.attention
    first = att.LatentRows(normal(2, 3, 4, seed=1), normal(2, 3, 2, seed=2))
    second = att.LatentRows(normal(2, 1, 4, seed=3), normal(2, 1, 2, seed=4))
    both = first.append(second)
    assert (first.length, second.length, both.length) == (3, 1, 4)
    assert torch.equal(both.latent, torch.cat([first.latent, second.latent], dim=1))
    assert torch.equal(both.rope, torch.cat([first.rope, second.rope], dim=1))
    both.latent.zero_()
    assert bool((first.latent != 0).all())
    with pytest.raises(InputRefused, match="cache"):
        first.append(att.LatentRows(normal(2, 2, 4, seed=5), normal(2, 1, 2, seed=6)))


def check_validation(modules: Modules) -> None:
    """Wiring faults fail loudly; the scale is that of the whole key."""
    att = modules.attention
    factors = factors_of(modules, stock_layer())
    assert att.softmax_scale(128, 64) == pytest.approx(192**-0.5, rel=1e-15)
    assert att.softmax_scale(128, 64, 1.5) == pytest.approx(2.25 * 192**-0.5, rel=1e-15)
    assert att.yarn_mscale(1.0, 0.7) == 1.0
    assert att.yarn_mscale(0.5, 1.0) == 1.0
    assert att.yarn_mscale(1.5, 1.0) == pytest.approx(0.1 * math.log(1.5) + 1, rel=1e-15)
    assert att.yarn_mscale(40.0, 1.0) == pytest.approx(0.1 * math.log(40) + 1, rel=1e-15)
    for part, wrong in (
        ("q_up", factors.q_up[:, 1:]),
        ("kv_down", factors.kv_down[:, 1:]),
        ("w_uv", factors.w_uv[..., 1:]),
        ("w_o", factors.w_o[1:]),
        ("rope", att.Rope(factors.rope.frequencies[1:], True)),
        ("scale", 0.0),
        ("scale", math.inf),
    ):
        with pytest.raises(InputRefused):
            replace(factors, **{part: wrong})
    for form in (att.expanded, att.absorbed):
        with pytest.raises(InputRefused, match="positions"):
            form(factors, tokens(), places(length=LENGTH - 1))
        with pytest.raises(InputRefused, match="keep"):
            form(factors, tokens(), places(), keep=torch.ones(BATCH, LENGTH - 1, dtype=torch.bool))
        with pytest.raises(InputRefused, match="keep"):
            form(factors, tokens(), places(), keep=torch.ones(BATCH, LENGTH))
    with pytest.raises(InputRefused, match="visibility"):
        att.visibility(3, 2, None)
    assert att.visibility(2, 3, None).tolist() == [[[True, True, False], [True, True, True]]]
    shape = modules.stock.StockShape(SIZES["heads"], SIZES["nope"], factors.rope, 1e-6)
    assert shape.mscale == 1.0
    held = att.LatentRows(normal(1, 2, 3, seed=1), normal(1, 2, 3, seed=2))
    step = att.Step(held.latent, held, held.rope)
    for frozen in (factors, factors.rope, factors.latent_norm, held, step, shape):
        with pytest.raises(FrozenInstanceError):
            frozen.anything = None


# The rows of seed 2's test table.
CHECKS: Mapping[str, Check] = {
    "hand_example": check_hand_example,
    "state_dict_keys_and_shapes_are_hf": check_names_and_shapes,
    "mla_golden": check_golden,
    "absorbed_decode_equals_naive": check_absorbed_equals_expanded,
    "cache_chunks_equal_full_forward": check_chunks_equal_one_pass,
    "cache_bytes": check_cache_bytes,
    "scores_see_relative_position_only": check_relative_positions,
    "padding_mask_and_fully_masked_rows": check_padding,
    "gradcheck_through_the_latent": check_gradients,
    "product_gradients": check_product_gradients,
    "concat_latent_cache": check_latent_rows,
    "validation": check_validation,
}
