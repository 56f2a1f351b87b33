"""The source's tokenizer, and whether the written folder still has the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mla_convert.errors import CheckFailed, InputRefused

TOKENIZER_CONFIG = "tokenizer_config.json"
# Words, digits, spaces, accents, another script, a symbol and code: where tokenizer classes differ from each other.
SAMPLES = (
    "The quick brown fox jumps over 13 lazy dogs in 2026.",
    "  two leading spaces,\ttab\nand a new line  ",
    "naïve façade — “quoted” ½ ² 日本語 Привет 🙂",
    "def f(x):\n    return x**2 + 1000000",
)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a local checkpoint folder.

    Raises:
        InputRefused: If there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputRefused(f"no usable tokenizer: {reason}", where=str(folder)) from error


def check_tokenizer(source: Path, written: Path) -> None:
    """Compare token ids of both folders' tokenizers: transformers picks a class by `model_type`, which changed.

    A source without a tokenizer is not compared.

    Raises:
        CheckFailed: If the same files give other ids in the written folder.
    """
    if not (source / TOKENIZER_CONFIG).is_file():
        return
    ours, theirs = load_tokenizer(written), load_tokenizer(source)
    for sample in SAMPLES:
        found, expected = ours(sample)["input_ids"], theirs(sample)["input_ids"]
        if found != expected:
            raise CheckFailed(
                "the copied tokenizer reads text differently beside a deepseek_v3 configuration",
                expected=f"{expected[:12]} for {sample[:24]!r}",
                found=str(found[:12]),
                where=f"{source}/{TOKENIZER_CONFIG}",
                remedy="Name the tokenizer's own class in tokenizer_class there.",
            )
