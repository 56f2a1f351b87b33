"""Text that the source writes itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_convert.cache_dir import cache_root
from mla_convert.convert import self_text as module
from mla_convert.convert.chat_text import ChatTemplate
from mla_convert.convert.checkpoint import SourceCheckpoint, open_source
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert
from mla_convert.convert.self_prompts import PROMPTS
from mla_convert.convert.self_text import SelfText, SelfTextSettings, write_self_text
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import InputRefused
from tests.conftest import PicoFactory
from tests.convert.support import edit_json
from tests.pico import make_pico

SETTINGS = SelfTextSettings(tokens=300, length=80, seed=0)


@pytest.fixture(scope="module")
def source(pico: PicoFactory) -> SourceCheckpoint:
    return open_source(str(pico("llama", num_layers=2, chat_template=True)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "cache"))


def write(source: SourceCheckpoint, settings: SelfTextSettings = SETTINGS, digest: str = "sha256:x") -> SelfText:
    return write_self_text(source, digest, load_tokenizer(source.location.folder), settings)


def lengths(source: SourceCheckpoint, found: SelfText) -> list[int]:
    tokenizer = load_tokenizer(source.location.folder)
    return [len(tokenizer(item.text, add_special_tokens=False)["input_ids"]) for item in found.corpus.documents]


def test_as_much_as_was_asked_for_in_documents_that_are_not_too_long(source: SourceCheckpoint) -> None:
    found = write(source)

    assert sum(lengths(source, found)) >= SETTINGS.tokens
    assert max(lengths(source, found)) <= SETTINGS.length
    assert found.corpus.kind == found.corpus.name == "self"
    assert all(document.spelled_out for document in found.corpus.documents)
    assert found.record.prompts + found.record.unprompted == len(found.corpus.documents)
    assert abs(found.record.prompts - found.record.unprompted) <= 1
    assert (found.record.temperature, found.record.top_p, found.record.seed) == (1.0, 0.95, 0)


def test_half_begin_with_a_prompt_in_the_chat_template(source: SourceCheckpoint) -> None:
    found = write(source, SelfTextSettings(tokens=500, length=160, seed=0))

    prompted = [item.text for item in found.corpus.documents if item.text.startswith("user: ")]
    asked = [text.removeprefix("user: ").partition("\n")[0] for text in prompted]
    assert len(asked) == len(set(asked)) >= 2
    # The tiny tokenizer knows ASCII only.
    assert {text for text in asked if "<unk>" not in text} <= set(PROMPTS)
    assert set(asked) & set(PROMPTS)


def test_the_same_again_and_once(source: SourceCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = write(source)
    assert torch.equal(torch.get_rng_state(), state)
    with monkeypatch.context() as patch:
        patch.delattr(module, "SourceWriter")
        assert write(source) == first
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "other"))
    torch.manual_seed(2)
    assert write(source) == first

    others = [write(source, replace(SETTINGS, seed=1)), write(source, digest="sha256:y")]
    assert others[0].corpus.sha256 != first.corpus.sha256
    assert len({first.record.digest, *(other.record.digest for other in others)}) == 3
    assert len(list((cache_root() / "self-text").iterdir())) == 3


def test_text_is_drawn_from_what_the_model_predicts(tmp_path: Path) -> None:
    """And not from what its generation settings make of that."""
    folder = make_pico(tmp_path / "source", num_layers=1)
    edit_json(folder / "generation_config.json", repetition_penalty=50.0, max_length=7, eos_token_id=None)
    edit_json(folder / "config.json", eos_token_id=None)

    found = write(open_source(str(folder)), SelfTextSettings(tokens=200, length=160, seed=0))

    assert max(lengths(open_source(str(folder)), found)) == 160
    # With a penalty of 50 no letter would come twice before nearly all have come.
    assert len(set(found.corpus.documents[-1].text[-60:])) < 50


def test_documents_end_with_the_end_token_and_are_made_up_for_within_bounds(tmp_path: Path) -> None:
    """A third of the vocabulary ends the text, so that documents have a few tokens each."""
    folder = make_pico(tmp_path / "source", num_layers=1)
    ends = list(range(2, 97, 3))
    edit_json(folder / "generation_config.json", eos_token_id=ends)

    found = write(open_source(str(folder)), SelfTextSettings(tokens=160, length=32, seed=0))

    tokenizer = load_tokenizer(folder)
    assert 5 < len(found.corpus.documents) <= module.MOST_ATTEMPTS * 5
    for document in found.corpus.documents:
        ids = tokenizer(document.text, add_special_tokens=False)["input_ids"]
        assert ids[-1] in ends or len(ids) == 32


def test_without_chat_template_prompts_are_plain_and_long_ones_left_out(pico: PicoFactory) -> None:
    tokenizer = load_tokenizer(pico())

    openings = module._openings(tokenizer, ChatTemplate(tokenizer), SelfTextSettings(tokens=1, length=100, seed=0))

    assert openings[::2] == [[1]] * (len(openings) // 2)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in openings[1::2]]
    assert set(texts) & set(PROMPTS)
    assert max(len(ids) for ids in openings) <= 50
    assert 0 < len(texts) < len(PROMPTS)
    assert module._openings(tokenizer, ChatTemplate(tokenizer), SelfTextSettings(1, 8, 0)) == [[1]]


def test_texts_begin_with_the_token_between_texts_where_nothing_opens_them(pico: PicoFactory) -> None:
    class Plain:
        """A tokenizer that adds nothing."""

        bos_token_id: Any = None
        eos_token_id: Any = 2

        def __call__(self, _text: str) -> dict[str, list[int]]:
            return {"input_ids": []}

    plain = Plain()
    assert module._beginning(plain) == [2]
    plain.bos_token_id = 1
    assert module._beginning(plain) == [1]
    plain.bos_token_id = plain.eos_token_id = None
    with pytest.raises(InputRefused, match="no token to begin"):
        module._beginning(plain)


def test_a_conversion_without_any_data(source: SourceCheckpoint, tmp_path: Path) -> None:
    options = ConvertOptions(
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        calibration=("self",),
        calibration_tokens=256,
        calibration_window=64,
    )

    done = convert(source, tmp_path / "out", options)

    record = done.manifest.calibration
    assert record is not None
    assert record.self_text is not None
    assert (record.tokens, record.texts[0].kind) == (256, "self")
    assert record.chat_template_sha256 is not None
    assert done.manifest.reload_check.passed
