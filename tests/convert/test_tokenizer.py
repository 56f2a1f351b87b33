from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mla_convert.convert.tokenizer import SAMPLES, check_tokenizer, load_tokenizer
from mla_convert.errors import InputRefused
from tests.conftest import PicoFactory
from tests.convert.conftest import ConvertedFactory
from tests.convert.support import edit_json
from tests.pico import FAMILIES, make_pico


@pytest.mark.parametrize("family", FAMILIES)
def test_the_written_folder_reads_text_as_its_source_does(converted: ConvertedFactory, family: str) -> None:
    done = converted(family, {"kv_heads": 2})

    for text in SAMPLES:
        assert load_tokenizer(done.folder)(text)["input_ids"] == load_tokenizer(done.source)(text)["input_ids"]


def test_a_tokenizer_that_would_read_differently_is_refused(tmp_path: Path) -> None:
    """Beside `qwen2` transformers takes its own class whatever the file says; beside `deepseek_v3` it does not."""
    folder = make_pico(tmp_path, "qwen2")
    edit_json(folder / "tokenizer_config.json", tokenizer_class="TokenizersBackend")

    with pytest.raises(InputRefused, match=r"read text differently.* at token \d+") as caught:
        check_tokenizer(folder)
    assert "tokenizer_class" in str(caught.value.remedy)


def test_a_source_without_a_tokenizer_is_not_compared(pico: PicoFactory) -> None:
    check_tokenizer(pico(tokenizer=False))


def test_a_folder_without_a_tokenizer_has_none(pico: PicoFactory) -> None:
    with pytest.raises(InputRefused, match="no usable tokenizer"):
        load_tokenizer(pico(tokenizer=False))


def test_a_tokenizer_with_code_of_its_own_is_not_run(pico: PicoFactory, tmp_path: Path) -> None:
    folder = shutil.copytree(pico(), tmp_path / "source")
    (folder / "custom.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="CustomTokenizer",
        auto_map={"AutoTokenizer": ["custom.CustomTokenizer", "custom.CustomTokenizer"]},
    )

    with pytest.raises(InputRefused, match="no usable tokenizer"):
        load_tokenizer(folder)
    assert not (tmp_path / "executed").exists()
