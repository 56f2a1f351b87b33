"""What absorbed attention cannot take is refused, and a refusal leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from mla_convert import use_absorbed
from mla_convert.decode.absorbed_module import AbsorbedOptions
from mla_convert.decode.rows import RowFormat
from mla_convert.errors import InputRefused
from tests.decode.stock import LATENT, ROPE, VOCABULARY, tiny
from tests.tolerances import ABSORBED_LOGITS

IDS = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))


def test_a_bias_on_the_up_projection_is_refused() -> None:
    model = tiny()
    projection = model.model.layers[1].self_attn.kv_b_proj
    projection.bias = torch.nn.Parameter(torch.randn(projection.out_features))
    with pytest.raises(InputRefused, match=r"layers\.1.*kv_b_proj.*bias"):
        use_absorbed(model)


def test_flex_attention_s_masks_are_refused() -> None:
    model = tiny(attn_implementation="flex_attention")
    with use_absorbed(model), torch.no_grad(), pytest.raises(InputRefused, match="an attention mask of another kind"):
        model(IDS, use_cache=True)


def test_a_cache_made_in_inference_mode_goes_on_outside_of_it() -> None:
    model = tiny()
    with use_absorbed(model) as handle:
        cache = handle.new_cache()
        with torch.inference_mode():
            model(IDS[:, :5], cache=cache)
        with torch.no_grad():
            found = model(IDS[:, 5:], cache=cache).logits
    with torch.no_grad():
        expected = model(IDS).logits[:, 5:]
    assert float((found - expected).abs().max()) <= ABSORBED_LOGITS * float(expected.abs().max())


def test_a_refused_first_chunk_does_not_fix_the_batch() -> None:
    model = tiny()
    with use_absorbed(model) as handle, torch.no_grad():
        cache = handle.new_cache()
        wrong = torch.ones(3, 1, 6, 6, dtype=torch.bool)
        with pytest.raises(InputRefused, match="not causal"):
            model(IDS[:1].expand(3, -1), attention_mask=wrong, cache=cache)
        found = model(IDS, cache=cache).logits
    assert found.shape[0] == 2


def test_a_cache_of_another_row_format_is_refused() -> None:
    model = tiny()
    with use_absorbed(model, options=AbsorbedOptions(row_format=RowFormat.grouped_fp8(LATENT, ROPE))) as handle:
        cache = handle.new_cache()
        with torch.no_grad():
            model(IDS, cache=cache)
    with use_absorbed(model), torch.no_grad(), pytest.raises(InputRefused, match="another model or row format"):
        model(IDS[:, :1], cache=cache)


def test_a_plain_row_of_two_dtypes_is_refused() -> None:
    with pytest.raises(InputRefused, match="two dtypes"):
        RowFormat("x", 1, 32, 8, "float32", "bfloat16")
