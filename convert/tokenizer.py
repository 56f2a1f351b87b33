"""The source's tokenizer, and whether it stays the same beside the new configuration."""

from __future__ import annotations

import json
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mla_convert.convert.sidecars import copy_sidecars
from mla_convert.errors import InputRefused

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


def check_tokenizer(source: Path) -> None:
    """See that the source's tokenizer reads the same beside a `deepseek_v3` configuration.

    transformers picks a tokenizer class by `model_type` where the files do not name one. A source without a
    tokenizer is not looked at.

    Raises:
        InputRefused: If the same files give other ids there.
    """
    if not (source / TOKENIZER_CONFIG).is_file():
        return
    with tempfile.TemporaryDirectory() as scratch:
        copy_sidecars(source, Path(scratch))
        (Path(scratch) / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}), encoding="utf-8")
        theirs, ours = load_tokenizer(source), load_tokenizer(Path(scratch))
        for sample in SAMPLES:
            _compare(theirs(sample)["input_ids"], ours(sample)["input_ids"], sample, source)


def _compare(expected: list[int], found: list[int], sample: str, source: Path) -> None:
    if expected == found:
        return
    pairs = zip_longest(expected, found)
    index, (wanted, got) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
    raise InputRefused(
        "the tokenizer's files read text differently beside a deepseek_v3 configuration",
        expected=f"id {wanted} at token {index} of {sample!r}",
        found=str(got),
        where=f"{source}/{TOKENIZER_CONFIG}",
        remedy="Name the tokenizer's own class in tokenizer_class there.",
    )
