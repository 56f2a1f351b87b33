"""What replaced attention modules compute, what they store, and what they leave behind."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from mla_convert.decode.abi import DecodeCall, DecodeOutput
from mla_convert.decode.absorbed_attention import AbsorbedAttention
from mla_convert.decode.absorbed_module import AbsorbedOptions, use_absorbed
from mla_convert.decode.reference import ReferenceBackend
from mla_convert.decode.rows import RowFormat
from mla_convert.errors import InputRefused, UsageFault
from tests.decode.stock import KINDS, LATENT, LAYERS, ROPE, apart, left_padded, logits, tiny, token_ids
from tests.tolerances import ABSORBED_LOGITS

ABSORB_ALL = AbsorbedOptions(page_size=4, expand_from=10_000)
LENGTH = 40


class Recording:
    """A decoder that keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[DecodeCall] = []

    def __call__(self, call: DecodeCall) -> DecodeOutput:
        self.calls.append(call)
        return ReferenceBackend().run(call)


def in_chunks(model: Any, cache: Any, ids: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """All logits, a chunk at a time."""
    edges = [0, *cuts, ids.shape[1]]
    return torch.cat([logits(model, input_ids=ids[:, a:b], cache=cache) for a, b in pairwise(edges)], dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("expand_from", [9, 10_000])
def test_logits_are_stock_however_the_text_is_cut(kind: str, expand_from: int) -> None:
    model = tiny(kind)
    ids = token_ids(2, LENGTH)
    expected = logits(model, input_ids=ids)

    with use_absorbed(model, options=AbsorbedOptions(page_size=4, expand_from=expand_from)) as handle:
        for cuts in ((), (17,), (1, 2, 12, 30, 34), tuple(range(1, 12))):
            assert apart(in_chunks(model, handle.new_cache(), ids, cuts), expected) < ABSORBED_LOGITS


def test_chunked_prefill_leaves_the_rows_of_one_pass() -> None:
    model = tiny()
    ids = token_ids(1, LENGTH)
    with use_absorbed(model) as handle:
        whole, cut = handle.new_cache(), handle.new_cache()
        in_chunks(model, whole, ids, ())
        in_chunks(model, cut, ids, (16, 33))

    for layer in range(LAYERS):
        rows = [cache.batch.cache.read(cache.batch.sequences[0], layer) for cache in (whole, cut)]
        assert apart(rows[1], rows[0]) < ABSORBED_LOGITS


def test_cached_rows_are_those_of_stock() -> None:
    model = tiny("biases")
    ids = token_ids(2, LENGTH)
    stock = DynamicCache(config=model.config)
    logits(model, input_ids=ids, cache=stock)
    with use_absorbed(model) as handle:
        cache = handle.new_cache()
        logits(model, input_ids=ids, cache=cache)

    for layer in range(LAYERS):
        for place, sequence in enumerate(cache.batch.sequences):
            expected = torch.cat([stock.layers[layer].keys[place, 0], stock.layers[layer].values[place, 0]], dim=-1)
            assert apart(cache.batch.cache.read(sequence, layer), expected) < ABSORBED_LOGITS


def test_case_18_bytes_in_the_live_cache() -> None:
    model = tiny()
    with use_absorbed(model, options=AbsorbedOptions(page_size=16)) as handle:
        cache = handle.new_cache(tokens=2 * 48)
        in_chunks(model, cache, token_ids(2, LENGTH), (30, 31, 32, 33))
    found = cache.batch.cache.residency()
    row = (LATENT + ROPE) * 4

    assert found.payload == 2 * LENGTH * row * LAYERS
    assert found.pools == 2 * 48 * row * LAYERS  # three pages of 16 for each sequence, not one more
    pools = [cache.batch.cache.pool(layer, handle.plan.form) for layer in range(LAYERS)]
    assert sum(pool.numel() * pool.element_size() for pool in pools) == found.pools
    expanded = 4 * (8 + ROPE + 12) * 4
    assert found.payload * 4 < 2 * LENGTH * expanded * LAYERS * 2


def test_padded_tokens_are_not_stored() -> None:
    model = tiny()
    with use_absorbed(model, options=ABSORB_ALL) as handle:
        cache = handle.new_cache()
        logits(model, **left_padded(3, 13), cache=cache)
    assert [cache.batch.cache.length(number) for number in cache.batch.sequences] == [8, 11, 13]
    assert cache.get_seq_length() == 13


@pytest.mark.parametrize("expand_from", [1, 10_000])
def test_padding_changes_no_logit(expand_from: int) -> None:
    model = tiny()
    padded = left_padded(3, 13)
    positions = (padded["attention_mask"].cumsum(1) - 1).clamp_min(0)
    with use_absorbed(model, options=AbsorbedOptions(page_size=4, expand_from=expand_from)) as handle:
        together = logits(model, **padded, position_ids=positions, cache=handle.new_cache())
        for row, pads in enumerate((5, 2, 0)):
            alone = logits(model, input_ids=padded["input_ids"][row : row + 1, pads:], cache=handle.new_cache())
            assert apart(together[row : row + 1, pads:], alone) < ABSORBED_LOGITS


def test_padding_at_the_right_is_expanded_and_not_stored() -> None:
    model = tiny()
    ids, mask = token_ids(2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[0, 4:] = 0
    expected = logits(model, input_ids=ids[:1, :4])
    record = Recording()
    with use_absorbed(model, record) as handle:
        cache = handle.new_cache()
        found = logits(model, input_ids=ids, attention_mask=mask, cache=cache)

    assert apart(found[:1, :4], expected) < ABSORBED_LOGITS
    assert [cache.batch.cache.length(number) for number in cache.batch.sequences] == [4, 6]
    assert not record.calls


def test_every_short_chunk_goes_through_a_decode_call() -> None:
    model = tiny()
    record = Recording()
    with use_absorbed(model, record) as handle:
        cache = handle.new_cache()
        in_chunks(model, cache, token_ids(2, 20), (15, 16))

    assert [call.q.shape for call in record.calls] == [(2, 1, 4, LATENT + ROPE)] * LAYERS + [
        (2, 4, 4, LATENT + ROPE)
    ] * LAYERS
    assert record.calls[-1].seq_lens.tolist() == [20, 20]
    assert record.calls[0].scale == pytest.approx(16**-0.5)


def test_a_failure_in_between_leaves_the_committed_rows() -> None:
    model = tiny()
    ids = token_ids(1, 12)

    class Failing(Recording):
        def __call__(self, call: DecodeCall) -> DecodeOutput:
            if len(self.calls) == 1:
                self.calls.append(call)
                raise RuntimeError("the machine is on fire")
            return super().__call__(call)

    expected = logits(model, input_ids=ids)[:, 10:]
    with use_absorbed(model, Failing()) as handle:
        cache = handle.new_cache()
        logits(model, input_ids=ids[:, :10], cache=cache)
        with pytest.raises(RuntimeError, match="fire"):
            logits(model, input_ids=ids[:, 10:], cache=cache)
        assert cache.get_seq_length() == 10
        found = logits(model, input_ids=ids[:, 10:], cache=cache)
        assert apart(found, expected) < ABSORBED_LOGITS
        assert cache.get_seq_length() == 12


def test_crop_and_select_follow_the_padding() -> None:
    model = tiny()
    padded = left_padded(3, 13)
    longer = torch.ones(3, 1, dtype=torch.int64)
    with use_absorbed(model, options=ABSORB_ALL) as handle:
        cache = handle.new_cache()
        logits(model, **padded, cache=cache)
        cache.crop(-4)
        assert [cache.batch.cache.length(number) for number in cache.batch.sequences] == [4, 7, 9]
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        assert [cache.batch.cache.length(number) for number in cache.batch.sequences] == [9, 9, 4, 4]
        mask = torch.cat([padded["attention_mask"][:, :9], longer], dim=1)[[2, 2, 0, 0]]
        step = padded["input_ids"][:, 9:10][[2, 2, 0, 0]]
        where = {"position_ids": torch.full((4, 1), 9)}
        found = logits(model, input_ids=step, attention_mask=mask, cache=cache, **where)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.batch.cache.allocator.free == cache.batch.cache.allocator.pages
    stock = logits(model, input_ids=padded["input_ids"][:, :10], attention_mask=padded["attention_mask"][:, :10])
    assert apart(found, stock[[2, 2, 0, 0], 9:]) < ABSORBED_LOGITS


def test_restore_gives_the_stock_model_back_bit_for_bit() -> None:
    model = tiny()
    ids = token_ids(2, LENGTH)
    before, modules = logits(model, input_ids=ids), list(model.modules())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    handle = use_absorbed(model)
    assert sum(isinstance(part, AbsorbedAttention) for part in model.modules()) == LAYERS
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    handle.restore()

    assert not handle.is_active
    assert list(model.modules()) == modules
    assert torch.equal(logits(model, input_ids=ids), before)


def test_without_a_cache_it_is_the_stock_module() -> None:
    model = tiny()
    ids = token_ids(2, LENGTH)
    before = logits(model, input_ids=ids, use_cache=False)
    with use_absorbed(model):
        assert torch.equal(logits(model, input_ids=ids, use_cache=False), before)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "self_attn" in name)


def test_weights_loaded_while_absorbed_are_used_and_stay() -> None:
    model, other = tiny(), tiny(seed=1)
    ids = token_ids(1, LENGTH)
    expected = logits(other, input_ids=ids)
    with use_absorbed(model, options=ABSORB_ALL):
        model.load_state_dict(other.state_dict())
        assert apart(logits(model, input_ids=ids), expected) < ABSORBED_LOGITS
    assert torch.equal(logits(model, input_ids=ids), expected)


def test_rows_in_another_dtype_are_read_as_they_are_stored() -> None:
    model = tiny()
    ids = token_ids(1, LENGTH)
    form = RowFormat.plain(LATENT, ROPE, "bfloat16")
    with use_absorbed(model, options=AbsorbedOptions(row_format=form)) as handle:
        whole = in_chunks(model, handle.new_cache(), ids, ())
        cut = in_chunks(model, handle.new_cache(), ids, (3, 16, 33, 34))
    assert apart(cut, whole) < ABSORBED_LOGITS
    assert apart(whole, logits(model, input_ids=ids)) > ABSORBED_LOGITS


def test_what_cannot_be_done_is_refused() -> None:
    model = tiny()
    ids = token_ids(2, 12)
    filled = DynamicCache(config=model.config)
    logits(model, input_ids=ids, cache=filled)
    with pytest.raises(InputRefused, match="DynamicCache"), use_absorbed(model):
        logits(model, input_ids=ids, cache=StaticCache(config=model.config, max_cache_len=20))
    with pytest.raises(InputRefused, match="12 tokens"), use_absorbed(model):
        logits(model, input_ids=ids, cache=filled)
    with use_absorbed(model) as handle:
        cache = handle.new_cache()
        with pytest.raises(InputRefused, match="not absorbed before"):
            use_absorbed(model)
        logits(model, input_ids=ids, cache=cache)
        with pytest.raises(InputRefused, match="2 sequences"):
            logits(model, input_ids=ids[:1], cache=cache)
        with pytest.raises(InputRefused, match="gradients"):
            model(input_ids=ids[:, :1], cache=cache)
        banded = torch.ones(2, 1, 3, 15, dtype=torch.bool).tril(12).triu(9)
        with pytest.raises(InputRefused, match="not causal"):
            logits(model, input_ids=ids[:, :3], attention_mask=banded, cache=cache)
        with pytest.raises(InputRefused, match="negative"):
            cache.crop(3)
    with pytest.raises(InputRefused, match="keys and values"):
        logits(model, input_ids=ids[:, :1], cache=cache)
    with pytest.raises(UsageFault, match="unknown decode backend"):
        use_absorbed(model, "flash-of-genius")
    with pytest.raises(InputRefused, match="20 \\+ 8"):
        use_absorbed(model, options=AbsorbedOptions(row_format=RowFormat.plain(LATENT, 4, "float32")))
    with pytest.raises(InputRefused, match="Linear"):
        use_absorbed(torch.nn.Linear(2, 2))
    assert not any(type(part) is AbsorbedAttention for part in model.modules())
    assert sum(type(part) is DeepseekV3Attention for part in model.modules()) == LAYERS


def test_a_backend_that_cannot_run_says_why() -> None:
    class Choosy(ReferenceBackend):
        name = "choosy"

        def unfit(self, call: DecodeCall) -> str | None:
            return "it is Monday"

    model = tiny()
    with use_absorbed(model, Choosy()), pytest.raises(InputRefused, match=r"choosy.*Monday"):
        logits(model, input_ids=token_ids(1, 2))


def test_scaled_rows_take_no_gradients() -> None:
    model = tiny()
    form = RowFormat.grouped_fp8(LATENT, ROPE)
    with use_absorbed(model, options=AbsorbedOptions(row_format=form)) as handle:
        with pytest.raises(InputRefused, match="gradients do not flow through scaled rows"):
            model(input_ids=token_ids(1, 12), cache=handle.new_cache())
        assert logits(model, input_ids=token_ids(1, 12), cache=handle.new_cache()).isfinite().all()


@pytest.mark.parametrize("options", [{"page_size": 0}, {"expand_from": 0}, {"value_side": "prodct"}])
def test_options_without_meaning_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputRefused):
        AbsorbedOptions(**options)


@pytest.mark.parametrize("way", ["select", "crop"])
def test_a_batch_that_has_lost_its_padding_needs_no_mask(way: str) -> None:
    """transformers gives none then."""
    model = tiny()
    ids = token_ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    token = token_ids(1, 1, seed=9)
    with use_absorbed(model) as handle:
        cache = handle.new_cache()
        logits(model, input_ids=ids, attention_mask=mask, cache=cache)
        if way == "select":
            cache.batch_select_indices(torch.tensor([0]))
            history, following = ids[:1], token
        else:
            cache.crop(-9)
            history, following = ids[:, :0], token.repeat(2, 1)
        found = logits(model, input_ids=following, cache=cache)
    expected = logits(model, input_ids=torch.cat([history, following], dim=1))[:, -1:]
    assert apart(found, expected) < ABSORBED_LOGITS
