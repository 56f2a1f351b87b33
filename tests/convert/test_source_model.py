"""The source run layer by layer, our reading of it, and the probe carried beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mla_convert.convert import source_model
from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.probe import ReferenceProbe, probe_ids
from mla_convert.convert.source_model import BATCH, BATCH_TOKENS, BatchPass, StreamedSource, batches_of
from mla_convert.convert.source_reading import check_reading
from mla_convert.convert.states import StateStore
from mla_convert.errors import CheckFailed
from mla_convert.mla.reference import decoder_layer
from tests.conftest import PicoFactory
from tests.convert.support import load_stock, random_ids, relative_difference
from tests.pico import FAMILIES
from tests.tolerances import FLOAT64_ALGEBRA

LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
SOURCES: list[tuple[str, dict[str, Any]]] = [
    *((family, {"kv_heads": 2}) for family in FAMILIES),
    ("llama", {"kv_heads": 2, "config": {"attention_bias": True}, "rope_parameters": LINEAR}),
    ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "dtype": "bfloat16"}),
]


@torch.inference_mode()
def whole_model(folder: Path, ids: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Hidden states before each layer and after the last (before its norm), and the logits, of the source's class."""
    model = load_stock(folder)
    states: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _a, out: states.append(out)) for layer in model.model.layers]
    logits: Tensor = model(ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return tuple(states), logits


@pytest.mark.parametrize(("family", "sizes"), SOURCES)
def test_layer_by_layer_is_the_whole_model(pico: PicoFactory, family: str, sizes: dict[str, Any]) -> None:
    folder = pico(family, **sizes)
    source, ids = open_source(str(folder)), random_ids(97, BATCH + 2, 30, seed=1)
    states, logits = whole_model(folder, ids)
    streamed = StreamedSource(source)

    done = [list(one.batches) for one in streamed.layers(ids, "testing")]

    assert [[batch.layer for batch in one] for one in done] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    for one, expected in zip(done, states, strict=True):
        assert [batch.windows for batch in one] == [slice(0, BATCH), slice(BATCH, BATCH + 2)]
        for batch in one:
            assert relative_difference(batch.hidden, expected[batch.windows]) <= 1e-5
            weights = source.layer_weights(batch.layer)
            check_reading(weights, source.rope.frequencies, batch, windows=len(batch.hidden))
    last = torch.cat([batch.hidden for batch in done[-1]])
    assert relative_difference(streamed.logits(last), logits) <= 1e-5
    assert streamed.forward_seconds.wall > 0


def test_one_layer_is_in_memory_at_a_time(pico: PicoFactory) -> None:
    streamed = StreamedSource(open_source(str(pico())))

    def held() -> set[str]:
        loaded = (name for name, value in streamed._model.named_parameters() if value.device.type != "meta")
        return {".".join(name.split(".")[:2]) for name in loaded}

    for done in streamed.layers(random_ids(97, 1, 8, seed=1), "testing"):
        assert held() == set()
        for _ in done.batches:
            assert held() == {f"layers.{done.layer}"}
        assert held() == set()


def test_what_is_not_read_of_a_layer_is_run_all_the_same(pico: PicoFactory) -> None:
    source, ids = open_source(str(pico())), random_ids(97, BATCH + 1, 8, seed=1)
    read = [list(done.batches)[-1].hidden for done in StreamedSource(source).layers(ids, "testing")]

    passes = StreamedSource(source).layers(ids, "testing")
    for _ in range(3):
        next(passes)
    assert torch.equal(list(next(passes).batches)[-1].hidden, read[-1])


def test_states_past_the_budget_are_on_disk_and_the_same(pico: PicoFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    source, ids = open_source(str(pico())), random_ids(97, BATCH + 1, 8, seed=1)
    spilled: list[bool] = []

    class Seen(StateStore):
        def close(self) -> None:
            spilled.append(self.spilled)
            super().close()

    monkeypatch.setattr(source_model, "StateStore", Seen)
    kept, stored = (
        [batch for done in StreamedSource(source, budget).layers(ids, "testing") for batch in done.batches]
        for budget in (1 << 20, 0)
    )

    assert spilled == [False, True]
    for ours, theirs in zip(kept, stored, strict=True):
        assert torch.equal(ours.hidden, theirs.hidden)
        assert torch.equal(ours.attention_input, theirs.attention_input)
        assert torch.equal(ours.attention_output, theirs.attention_output)


def test_long_windows_go_one_at_a_time() -> None:
    with StateStore(3, BATCH_TOKENS, 2, 1 << 20, Path("unused")) as states:
        assert list(batches_of(states)) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    with StateStore(6, BATCH_TOKENS // BATCH, 2, 1 << 20, Path("unused")) as states:
        assert list(batches_of(states)) == [slice(0, 4), slice(4, 6)]


@pytest.fixture(scope="module")
def first_layer(pico: PicoFactory) -> tuple[Any, BatchPass]:
    source = open_source(str(pico("qwen2", kv_heads=2)))
    passes = StreamedSource(source).layers(random_ids(97, 2, 30, seed=2), "testing")
    (batch,) = next(passes).batches
    return source, batch


@pytest.mark.parametrize(
    "fault", ["scale", "rope layout", "key bias", "query bias", "value bias", "head order", "frequencies"]
)
def test_a_wrong_reading_is_caught(first_layer: tuple[Any, BatchPass], fault: str) -> None:
    source, done = first_layer
    weights, frequencies = source.layer_weights(0), source.rope.frequencies
    interleaved = weights.q.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    changed = {
        "scale": replace(weights, softmax_scale=weights.softmax_scale * 1.1),
        "rope layout": replace(weights, q=interleaved),
        "key bias": replace(weights, k_bias=None),
        "query bias": replace(weights, q_bias=None),
        "value bias": replace(weights, v_bias=None),
        "head order": replace(weights, o=weights.o.flip(0)),
        "frequencies": weights,
    }[fault]

    check_reading(weights, frequencies, done, windows=2)
    with pytest.raises(CheckFailed, match="our reading") as caught:
        check_reading(changed, frequencies / 4 if fault == "frequencies" else frequencies, done, windows=2)
    assert caught.value.where == "layer 0"


def test_the_probe_is_the_reference_carried_through_the_layers(pico: PicoFactory, tmp_path: Path) -> None:
    """With all pairs rotated and full rank the reference is the source, in float64."""
    from mla_convert.convert.layer import LayerPlan, convert_layer
    from mla_convert.convert.probe import block_weights
    from mla_convert.convert.rope_select import head_slots

    source = open_source(str(pico("qwen2", kv_heads=2)))
    streamed = StreamedSource(source)
    probe = ReferenceProbe.start(source, streamed, tmp_path, seed=0)
    plan = LayerPlan(
        slots=head_slots(source.shape, ((0, 1),) * 8, source.rope.frequencies),
        qk_nope_head_dim=8,
        kv_lora_rank=32,
        factorization="joint",
        key_rank=None,
        weighting="weight",
        measured_gamma=False,
        output_constant=True,
        damping=0.0,
    )
    for layer in range(4):
        converted, _ = convert_layer(source.layer_weights(layer), None, plan)
        before = probe.hidden
        probe.advance(layer, converted)
        after, trace = decoder_layer(block_weights(source, layer), converted, before)
        assert torch.allclose(probe.hidden, after, rtol=0, atol=FLOAT64_ALGEBRA)
        stages = load_file(tmp_path / f"layer_{layer:04d}.safetensors")
        assert torch.equal(stages["input"], before.float())
        assert torch.equal(stages["hidden"], after.float())
        assert torch.equal(stages["latent"], trace.latent.float())

    assert torch.equal(probe.ids, probe_ids(97, 0))
    _, logits = whole_model(pico("qwen2", kv_heads=2), probe.ids)
    assert relative_difference(probe.logits(streamed), logits.double()) <= 1e-5
