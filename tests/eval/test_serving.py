"""A converted model runs from its latent cache by default, says so, and gives what stock transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert
from mla_convert.errors import EnvironmentFault, InputRefused, UsageFault
from mla_convert.eval.evaluate import EvalOptions, evaluate
from mla_convert.eval.generate import GenerateOptions, Generation, generate
from mla_convert.eval.loading import hidden_states, load_model
from mla_convert.eval.serving import served
from tests.tolerances import FLOAT32_ATTENTION

TINY_TRAINED = Path(__file__).resolve().parent.parent / "data" / "tiny_trained"
PROMPT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "
TOKENS = 24


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "out"
    convert(str(TINY_TRAINED), out, ConvertOptions(lossless=True, profile="hf"))
    return out


def run(folder: Path, backend: str) -> Generation:
    return generate(str(folder), GenerateOptions(PROMPT, max_new_tokens=TOKENS, backend=backend))


def test_generation_by_default_decodes_from_pages_and_gives_stocks_tokens(converted: Path) -> None:
    ours, stock = run(converted, "auto"), run(converted, "stock")

    assert ours.new_ids == stock.new_ids
    receipt = ours.to_json()["receipt"]
    assert isinstance(receipt, dict)
    assert (receipt["requested"], receipt["ran"]) == ("auto", "torch")
    layers = load_model(converted).config.num_hidden_layers
    # One call for each layer and new token but the first, which the prefill gives.
    assert receipt["calls"] == layers * (len(ours.new_ids) - 1)
    assert receipt["fallbacks"] == 0
    assert stock.receipt["ran"] == "stock"
    assert stock.receipt["calls"] == 0


def test_the_live_cache_holds_latent_rows_and_nothing_else(converted: Path) -> None:
    ours, stock = run(converted, "auto"), run(converted, "stock")
    config = load_model(converted).config
    numbers = config.kv_lora_rank + config.qk_rope_head_dim

    for cache in (ours.cache, stock.cache):
        assert cache.numbers_per_token_per_layer == (numbers,) * config.num_hidden_layers
        assert cache.bytes_per_token == 4 * numbers * config.num_hidden_layers
    assert ours.cache.tokens == stock.cache.tokens
    assert ours.cache.pool_bytes is not None
    assert ours.cache.pool_bytes >= ours.cache.bytes_per_token * ours.cache.tokens
    assert stock.cache.pool_bytes is None


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_whole_windows_can_be_read_from_the_pages(converted: Path, backend: str) -> None:
    model = load_model(converted)
    ids = torch.arange(70) * 7 % model.config.vocab_size
    expected = hidden_states(model, ids)

    with served(model, backend, from_pages=True) as running:
        found = running.hidden_states(ids)
        receipt = running.receipt

    assert (found - expected).abs().max() <= FLOAT32_ATTENTION * expected.abs().max()
    assert receipt["calls"] == model.config.num_hidden_layers
    assert torch.equal(hidden_states(model, ids), expected)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_a_window_in_chunks_gives_the_states_of_the_whole(converted: Path, chunk: int) -> None:
    model = load_model(converted)
    ids = torch.randint(3, 90, (29,))
    whole = hidden_states(model, ids)
    with served(model, "auto", from_pages=True) as running:
        in_chunks = running.hidden_states(ids, chunk)
    with served(model, "stock") as running:
        stock = running.hidden_states(ids, chunk)

    assert in_chunks.shape == whole.shape
    assert float((in_chunks - whole).abs().max() / whole.abs().max()) < FLOAT32_ATTENTION
    assert torch.equal(stock, whole)


def test_evaluation_says_what_the_target_ran_on(converted: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some words about nothing in particular. " * 60)

    def figures(backend: str) -> tuple[float, object]:
        options = EvalOptions(max_tokens=128, seq_len=64, backend=backend)
        done = evaluate(converted, str(TINY_TRAINED), [str(text)], options)
        return done.figures.target_perplexity, done.receipt["ran"]

    ours, ran = figures("auto")
    stock, plain = figures("stock")
    assert (ran, plain) == ("torch", "stock")
    assert ours == pytest.approx(stock, rel=1e-5)


def test_a_source_runs_by_stock_and_says_why() -> None:
    done = run(TINY_TRAINED, "auto")

    assert done.receipt["ran"] == "stock"
    (rejected,) = done.receipt["rejected"]  # type: ignore[misc]
    assert "no latent cache" in rejected["reason"]
    with pytest.raises(InputRefused, match="without a latent cache"):
        run(TINY_TRAINED, "torch")


def test_a_backend_asked_for_by_name_runs_or_is_refused(converted: Path) -> None:
    assert run(converted, "reference").receipt["ran"] == "reference"
    with pytest.raises(UsageFault, match="unknown decode backend"):
        run(converted, "cuda")
    if not torch.cuda.is_available():
        with pytest.raises(EnvironmentFault, match="triton"):
            run(converted, "triton")


def test_stock_is_as_it_was_afterwards(converted: Path) -> None:
    model = load_model(converted)
    before = {name: type(part) for name, part in model.named_modules()}
    with served(model, "auto"):
        assert {name: type(part) for name, part in model.named_modules()} != before
    assert {name: type(part) for name, part in model.named_modules()} == before
    assert type(model) is type(AutoModelForCausalLM.from_pretrained(converted))


def test_a_run_that_ends_with_its_prefill_says_so(converted: Path) -> None:
    done = generate(str(converted), GenerateOptions(PROMPT, max_new_tokens=1))

    layers = load_model(converted).config.num_hidden_layers
    assert (done.receipt["ran"], done.receipt["expanded_calls"], done.receipt["calls"]) == (
        "expanded prefill",
        layers,
        0,
    )


@pytest.mark.parametrize("backend", ["flashmla", "flashinfer"])
def test_a_backend_that_is_not_here_is_refused_even_where_no_call_would_need_it(converted: Path, backend: str) -> None:
    with pytest.raises(EnvironmentFault, match="not installed"):
        generate(str(converted), GenerateOptions(PROMPT, max_new_tokens=1, backend=backend))


def test_an_unknown_name_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="unknown decode backend"):
        generate(str(tmp_path / "nothing"), GenerateOptions(PROMPT, backend="TORCH"))
