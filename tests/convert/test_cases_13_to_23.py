"""Cases 13 to 23 of cases.md; see `test_cases_1_to_12.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.planning import make_plan
from mla_convert.errors import InputRefused, UsageFault
from tests.conftest import PicoFactory
from tests.convert.conftest import Converted, ConvertedFactory
from tests.convert.mutants import Mutant, blame, error
from tests.convert.support import load_stock, logits_of, random_ids, read_json
from tests.pico import make_pico
from tests.tolerances import LOGITS_FLOAT32


def test_case_13_the_head_size_is_not_hidden_over_heads(fixture_f: Converted) -> None:
    config = read_json(fixture_f.folder / "config.json")

    assert config["hidden_size"] / config["num_attention_heads"] != config["v_head_dim"] == 16
    # The widths of cases.md: the latent is the value head, eight columns of zeros are the content keys.
    assert [config[n] for n in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")] == [16, 16, 8]
    target, source = load_stock(fixture_f.folder), load_stock(fixture_f.source)
    ids = random_ids(97, 2, 40, seed=2)
    assert float((logits_of(target, ids) - logits_of(source, ids)).abs().max()) <= 1e-3


@pytest.mark.parametrize("equal", [True, False], ids=["d_N = d_V", "d_N ≠ d_V"])
def test_case_14_the_up_projection_is_laid_out_per_head(
    converted: ConvertedFactory, partial: Converted, text: Path, tmp_path: Path, equal: bool
) -> None:
    done = partial
    if equal:
        done = converted(
            source={"kv_heads": 2},
            kv_lora_rank=24,
            qk_rope_head_dim=16,
            rope_policy="2-norm",
            calibration=(str(text),),
            calibration_window=64,
            calibration_tokens=512,
        )

    def by_head(mutant: Mutant, weight: Tensor) -> tuple[Tensor, Tensor]:
        heads = weight.unflatten(0, (mutant.sizes.heads, -1))
        return heads[:, : mutant.sizes.nope], heads[:, mutant.sizes.nope :]

    def all_keys_then_all_values(mutant: Mutant) -> None:
        mutant.change("kv_b_proj.weight", lambda w: torch.cat([part.flatten(0, 1) for part in by_head(mutant, w)]))

    def values_first(mutant: Mutant) -> None:
        mutant.change("kv_b_proj.weight", lambda w: torch.cat(by_head(mutant, w)[::-1], dim=1).flatten(0, 1))

    sizes = read_json(done.folder / "config.json")
    assert (sizes["qk_nope_head_dim"] == sizes["v_head_dim"]) is equal
    assert done.manifest.reload_check.passed
    assert done.manifest.identity.architecture.fused_orders.kv_b_per_head == ("k_nope", "value")
    key_rows = "model.layers.0.self_attn.kv_b_proj.weight (content key rows)"
    assert blame(done, tmp_path / "all", all_keys_then_all_values) == key_rows
    assert blame(done, tmp_path / "first", values_first) == key_rows


def test_case_15_a_sliding_window_is_refused(tmp_path: Path) -> None:
    folder = make_pico(tmp_path, "mistral", config={"sliding_window": 8})

    with pytest.raises(InputRefused, match="sliding window") as caught:
        open_source(str(folder))
    assert "sliding_window=8" in str(caught.value.found)


@pytest.mark.parametrize("profile", ["hf", "engine"])
def test_case_16_tied_embeddings(converted: ConvertedFactory, tmp_path: Path, profile: str) -> None:
    done = converted(source={"tie_word_embeddings": True, "rms_norm_eps": 1e-5}, lossless=True, profile=profile)
    weights = load_file(done.folder / "model.safetensors")
    source = load_file(done.source / "model.safetensors")
    embedding = source["model.embed_tokens.weight"]

    def random_head(mutant: Mutant) -> None:
        generator = torch.Generator().manual_seed(1)
        mutant.state["lm_head.weight"] = torch.randn(97, 48, generator=generator) * 0.3
        mutant.config["tie_word_embeddings"] = False

    assert error(done) <= LOGITS_FLOAT32
    assert read_json(done.folder / "config.json")["tie_word_embeddings"] is (profile == "hf")
    assert ("lm_head.weight" in weights) is (profile == "engine")
    if profile == "engine":
        # The stream is scaled for the epsilon; the head is the embedding as it was.
        assert torch.equal(weights["lm_head.weight"], embedding)
        assert torch.allclose(weights["model.embed_tokens.weight"], embedding / 10**0.5)
        assert "model.embed_tokens.weight" in done.manifest.method.rerounded_tensors
    else:
        assert torch.equal(weights["model.embed_tokens.weight"], embedding)
    assert blame(done, tmp_path / "out", random_head) == "logits"


def test_case_17_a_rank_beyond_what_is_useful_is_refused_or_padded(pico: PicoFactory) -> None:
    # Qwen2.5-0.5B: 14 heads, 2 KV heads of 64, hidden 896.
    shape = {"heads": 14, "kv_heads": 2, "head_dim": 64, "hidden_size": 896, "num_layers": 1, "intermediate_size": 16}
    source = open_source(str(pico("qwen2", **shape)))
    options = {"qk_rope_head_dim": 64, "rope_policy": "uniform"}

    with pytest.raises(UsageFault) as caught:
        make_plan(source, ConvertOptions(kv_lora_rank=512, **options))
    assert caught.value.exit_code == 2
    assert str(caught.value.expected).startswith("1 to 192, from min(hidden 896, 256 cached numbers - 64 rotary)")
    assert caught.value.found == "512"
    assert "--pad-cache" in str(caught.value.remedy)

    plan = make_plan(source, ConvertOptions(kv_lora_rank=192, pad_cache=(512, 64), **options))
    assert (plan.useful_rank, plan.kv_lora_rank, plan.qk_rope_head_dim) == (192, 512, 64)
    assert plan.padded


def test_case_17_padding_is_said_and_is_zeros(converted: ConvertedFactory) -> None:
    done = converted(source={"kv_heads": 2}, lossless=True, pad_cache=(64, 80))

    assert done.plan.padded
    assert done.manifest.method.padding == "64+80 holds 32+32"
    assert error(done) <= LOGITS_FLOAT32
    for layer in range(4):
        name = f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight"
        down = load_file(done.folder / "model.safetensors")[name]
        assert down.shape == (144, 48)
        assert not down[32:64].any()
        assert not down[96:].any()
        assert bool(down[:32].abs().amax(1).min() > 0)


def cached_numbers(model: Any) -> float:
    """Numbers per token and layer in the real cache after 40 tokens."""
    with torch.inference_mode():
        cache = model(random_ids(97, 1, 40, seed=3), use_cache=True).past_key_values
    return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) / 40 / len(cache.layers)


def test_case_18_the_cache_holds_the_latent_and_nothing_else(
    fixture_f: Converted, grouped: Converted, partial: Converted
) -> None:
    for done, expected in ((fixture_f, 16 + 16), (grouped, 32 + 32), (partial, 24 + 16)):
        assert cached_numbers(load_stock(done.folder)) == expected
    assert cached_numbers(load_stock(grouped.source)) == 64
    assert partial.manifest.identity.cache.bytes_per_token_per_layer == 40 * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_case_22_half_precision_is_computed_in_double_and_written_as_it_came(
    converted: ConvertedFactory, dtype: str
) -> None:
    half = converted(source={"kv_heads": 2, "dtype": dtype}, kv_lora_rank=24, qk_rope_head_dim=16, rope_policy="high")
    full = converted(
        source={"kv_heads": 2, "dtype": dtype},
        kv_lora_rank=24,
        qk_rope_head_dim=16,
        rope_policy="high",
        dtype="float32",
        latent_norm=half.plan.latent_norm,
    )
    written, exact = (load_file(done.folder / "model.safetensors") for done in (half, full))

    kind = getattr(torch, dtype)
    assert {value.dtype for value in written.values()} == {kind}
    # One rounding from the float64 result, of which float32 is a faithful copy: at most half a unit in the last place.
    # The norm's fixed factor is split between its weight and kv_b_proj in each dtype's own way, to a 20th of a unit.
    for name, value in exact.items():
        unit = torch.finfo(kind).eps / 2
        subnormal = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
        if name.endswith("kv_a_layernorm.weight"):
            continue
        if name.endswith("kv_b_proj.weight"):
            norm = name.replace("kv_b_proj", "kv_a_layernorm")
            value = value * (exact[norm][0] / written[norm][0].float())
        bound = value.abs() * unit * 1.05 + subnormal
        assert bool(((written[name].float() - value).abs() <= bound).all()), name


def test_case_22_float16_is_refused_where_the_profile_cannot_hold_it(pico: PicoFactory) -> None:
    source = open_source(str(pico(dtype="float16")))

    with pytest.raises(InputRefused, match="engine profile cannot hold float16"):
        make_plan(source, ConvertOptions(lossless=True, profile="engine"))
    with pytest.raises(UsageFault, match="epsilon route does not fit float16"):
        make_plan(source, ConvertOptions(lossless=True, latent_norm="epsilon"))
    assert make_plan(source, ConvertOptions(lossless=True)).latent_norm == "constant"
    assert make_plan(source, ConvertOptions(lossless=True, dtype="bfloat16")).profile == "engine"


def test_case_23_a_grouped_model_is_exact_at_full_rank(grouped: Converted, tmp_path: Path) -> None:
    def as_if_every_head_had_its_own(mutant: Mutant) -> None:
        """Heads numbered as in MHA: the groups' value rows in the order 0 1 0 1 instead of 0 0 1 1."""
        order = torch.tensor([0, 2, 1, 3])
        mutant.change("kv_b_proj.weight", lambda w: w.unflatten(0, (4, -1))[order].flatten(0, 1))

    assert error(grouped) <= LOGITS_FLOAT32
    found = blame(grouped, tmp_path / "out", as_if_every_head_had_its_own)
    assert found == "model.layers.0.self_attn.kv_b_proj.weight (value rows)"
