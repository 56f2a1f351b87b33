"""A tiny source, its conversion and a text, ready to be evaluated."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mla_convert.convert.checkpoint import SourceCheckpoint, open_source
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.receipts import SourceDigests, digest_of_source
from mla_convert.convert.run import convert
from mla_convert.eval.evaluate import EvalOptions, prepare
from mla_convert.eval.loading import load_model
from mla_convert.eval.text import EvalWindows
from tests.pico import CHARACTERS

SEQ_LEN = 24
MAX_TOKENS = 4 * SEQ_LEN
LOSSLESS = ConvertOptions(lossless=True)
LOSSY = ConvertOptions(profile="hf", rope_policy="high", qk_rope_head_dim=16, kv_lora_rank=20)


@dataclass(frozen=True)
class EvalPair:
    """One conversion.

    Attributes:
        source: The opened source.
        digests: Of its files.
        target: The converted folder.
        text: A held-out text file.
        windows: Of that text.
    """

    source: SourceCheckpoint
    digests: SourceDigests
    target: Path
    text: Path
    windows: EvalWindows

    @property
    def source_folder(self) -> str:
        """The source as a user gives it."""
        return self.source.location.given

    def model(self) -> Any:
        """The target, loaded afresh."""
        return load_model(self.target)

    def source_model(self) -> Any:
        """The source, loaded afresh."""
        return load_model(self.source.location.folder)

    def with_stride(self, stride: int) -> EvalPair:
        """The same with other windows."""
        options = EvalOptions(max_tokens=MAX_TOKENS, seq_len=SEQ_LEN, stride=stride)
        return replace(self, windows=prepare(self.source_folder, [str(self.text)], options).windows)


def write_text(path: Path, characters: int, seed: int) -> Path:
    """A text file of seeded random characters, all of them in the pico tokenizer's vocabulary."""
    letters = random.Random(seed).choices(CHARACTERS, k=characters)
    path.write_text("".join(letters), encoding="utf-8", newline="")
    return path


def open_pair(source: Path, folder: Path, options: ConvertOptions) -> EvalPair:
    """Convert `source` into `folder / "out"` and cut a text beside it into windows."""
    text = write_text(folder / "heldout.txt", 400, seed=1)
    target = folder / "out"
    convert(str(source), target, options)
    opened = open_source(str(source))
    cut = prepare(str(source), [str(text)], EvalOptions(max_tokens=MAX_TOKENS, seq_len=SEQ_LEN))
    return EvalPair(opened, digest_of_source(opened), target, text, cut.windows)
