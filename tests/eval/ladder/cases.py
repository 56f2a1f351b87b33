"""Conversions of a tiny model with three layers, for the ladder to climb."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert
from mla_convert.eval.evaluate import EvalOptions, prepare
from mla_convert.eval.suite_context import SuiteContext
from mla_convert.manifests.models import load
from tests.conftest import PicoFactory
from tests.eval.helpers import write_text

SEQ_LEN, PREFILL, PAGE = 48, 20, 16
LOSSY = ConvertOptions(profile="hf", rope_policy="high", qk_rope_head_dim=16, kv_lora_rank=20)
RIGHT: dict[str, tuple[dict[str, object], ConvertOptions]] = {
    "lossy": ({"kv_heads": 2}, LOSSY),
    "lossless": ({"kv_heads": 2}, ConvertOptions(lossless=True)),
    "one KV head, engine": ({"kv_heads": 1}, ConvertOptions(lossless=True, profile="engine")),
    "engine, another epsilon": (
        {"kv_heads": 2, "rms_norm_eps": 1e-5},
        ConvertOptions(profile="engine", qk_rope_head_dim=8, kv_lora_rank=20),
    ),
    "constant route": (
        {"kv_heads": 2},
        ConvertOptions(profile="hf", rope_policy="high", qk_rope_head_dim=16, kv_lora_rank=20, latent_norm="constant"),
    ),
    "bfloat16": ({"kv_heads": 2, "dtype": "bfloat16"}, LOSSY),
    "float16": ({"kv_heads": 2, "dtype": "float16"}, LOSSY),
    "biases": ({"family": "qwen2", "kv_heads": 2}, LOSSY),
}


@dataclass(frozen=True)
class Case:
    """A conversion and what an evaluation of it is given."""

    context: SuiteContext

    def at(self, target: Path) -> SuiteContext:
        return SuiteContext(self.context.prepared, target, self.context.manifest, "quick")


def make_case(pico: PicoFactory, folder: Path, source: dict[str, object], options: ConvertOptions) -> Case:
    opened = open_source(str(pico(**{"num_layers": 3, **source})))
    text = write_text(folder / "text.txt", 400, seed=1)
    if options.calibration == () and not options.lossless:
        calibration = write_text(folder / "calibration.txt", 600, seed=2)
        options = ConvertOptions(
            **{**vars(options), "calibration": (str(calibration),), "calibration_tokens": 256, "calibration_window": 32}
        )
    convert(opened, folder / "out", options)
    prepared = prepare(opened, [str(text)], EvalOptions(max_tokens=4 * SEQ_LEN, seq_len=SEQ_LEN))
    return Case(SuiteContext(prepared, folder / "out", load(folder / "out"), "quick"))
