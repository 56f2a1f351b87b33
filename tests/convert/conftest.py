"""Converted tiny models, shared by the folder's tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mla_convert.convert import reload_check, reload_child
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.reload_child import ReloadReport
from mla_convert.convert.run import convert
from mla_convert.manifests.models import ConversionManifest
from tests.conftest import PicoFactory

TEXT_WORDS = (
    "the",
    "cache",
    "of",
    "a",
    "model",
    "turns",
    "with",
    "each",
    "token",
    "and",
    "holds",
    "what",
    "it",
    "read",
)


@dataclass(frozen=True)
class Converted:
    """A source, the folder made of it, and the probe that its reload check used. All read only."""

    source: Path
    folder: Path
    probe: Path
    plan: ConversionPlan
    manifest: ConversionManifest


ConvertedFactory = Callable[..., Converted]


def run_conversion(source: Path, out: Path, options: ConvertOptions, kept_probe: Path, cache: Path) -> Converted:
    """A conversion whose reload check runs in this process, on the same files and by the same code.

    The fresh process costs four seconds; `test_reload_check.py` has it.
    """

    def check_here(folder: Path, probe: Path) -> ReloadReport:
        shutil.copytree(probe, kept_probe)
        return reload_child.compare(folder, probe)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reload_check, "_run_child", check_here)
        patch.setenv("MLA_CONVERT_CACHE", str(cache))
        done = convert(str(source), out, options, command=["test"])
    return Converted(source, done.folder, kept_probe, done.plan, done.manifest)


@pytest.fixture(scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that no other run has filled."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some thousand characters of text in ten documents, which the pico tokenizer reads as tokens each."""
    path = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    rows = []
    for number in range(10):
        words = [TEXT_WORDS[(number * 7 + i * i) % len(TEXT_WORDS)] for i in range(80)]
        rows.append(json.dumps({"id": f"document {number}", "text": " ".join(words)}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def converted(pico: PicoFactory, tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> ConvertedFactory:
    """`converted(family, source_options, **convert_options)`, each made once per session."""
    made: dict[str, Converted] = {}

    def get(family: str = "llama", source: Mapping[str, Any] | None = None, **options: Any) -> Converted:
        chosen = ConvertOptions(**(options or {"lossless": True}))
        folder = pico(family, **(source or {}))
        key = f"{folder} {chosen!r}"
        if key not in made:
            scratch = tmp_path_factory.mktemp("converted")
            made[key] = run_conversion(folder, scratch / "out", chosen, scratch / "probe", own_cache)
        return made[key]

    return get


@pytest.fixture(scope="session")
def fixture_f(converted: ConvertedFactory) -> Converted:
    return converted()


@pytest.fixture(scope="session")
def grouped(converted: ConvertedFactory) -> Converted:
    """F with 2 KV heads."""
    return converted(source={"kv_heads": 2})


@pytest.fixture(scope="session")
def partial(converted: ConvertedFactory) -> Converted:
    """F with 2 KV heads and half of its pairs rotated: content keys 8 wide, values 16 wide, and rope."""
    return converted(source={"kv_heads": 2}, kv_lora_rank=24, qk_rope_head_dim=16, rope_policy="high")
