"""Manifests, frontiers and inputs of a report made by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mla_convert.eval.report.frontier_file import FrontierFile, FrontierPoint, FrontierSource, MeasuredPoint
from mla_convert.eval.report.inputs import ReportInput
from mla_convert.manifests.evaluation.reading import ReceiptFile
from mla_convert.manifests.evaluation.receipt import EvaluationReceipt
from mla_convert.manifests.layers import LayerReceipt, RopeSlot
from mla_convert.manifests.models import ConversionManifest
from tests.eval.report.receipts import MANIFEST_SHA256, environment, wave
from tests.manifests import example


def layer_receipt(index: int, *, rank: int = 48, kept: int = 64) -> LayerReceipt:
    """One layer of a conversion with a falling spectrum and twelve slots, two of them of one frequency."""
    pairs = (*range(11), 10)
    return LayerReceipt(
        index=index,
        kv_lora_rank=rank,
        useful_rank=rank,
        key_rank=None,
        value_rank=None,
        rope_slots=tuple(
            RopeSlot(
                slot=slot,
                pair=pair,
                frequency=10000.0 ** (-pair / 16),
                component=0,
                kv_head=None,
                mixes=(pair, pair + 1),
            )
            for slot, pair in enumerate(pairs)
        ),
        key_map_error=wave(index, 0.3),
        value_map_error=wave(index + 1, 0.2),
        weighted_key_error=wave(index + 2, 0.03),
        weighted_value_error=wave(index + 3, 0.02),
        singular_energy_kept=0.98,
        predicted_output_error=wave(index, 0.1),
        written_content_probes=(1.0, -2.0),
        written_position_probes=(0.5, 0.25),
        written_value_probes=(-1.5, 3.0),
        singular_values=tuple(wave(index, 3) * math.exp(-value / (9 + index % 5)) for value in range(kept)),
    )


def manifest(folder: Path, layers: int = 12, **changes: Any) -> ConversionManifest:
    """The manifest of a small folder, told as if it had more layers."""
    _, _, made = example.build(folder)
    receipts = tuple(layer_receipt(index) for index in range(layers))
    return made.model_copy(
        update={"layers": receipts, "environment": environment(("mla-convert", "convert")), **changes}
    )


def given(
    made: ConversionManifest, receipt: EvaluationReceipt | None, frontier_file: FrontierFile | None = None
) -> ReportInput:
    """The input of a report without any file."""
    file = None if receipt is None else ReceiptFile(Path("eval-1.json"), "9" * 64, receipt)
    return ReportInput("out", made, MANIFEST_SHA256, file, frontier_file)


def frontier(text: str = "") -> FrontierFile:
    """Six plans, half of them measured, one of a paper."""
    points = tuple(
        FrontierPoint(
            name=f"engine:{rope}+{width - rope} {text}",
            width=width,
            bytes_per_token=width * 120,
            recipe="transmla" if rope == 8 else None,
            predicted_kl=None if rope == 8 else wave(width + rope, 0.3),
            best=rope == 32,
            measured=None
            if rope == 16
            else MeasuredPoint(
                kl=wave(width, 0.4), target_perplexity=wave(width, 20), ratio=wave(width, 1.3), top1_agreement=0.7
            ),
        )
        for width in (96, 192)
        for rope in (8, 16, 32)
    )
    source = FrontierSource(width=384, bytes_per_token=46080, dtype="float32", perplexity=17.0)
    return FrontierFile(schema_version="mla-convert/frontier/v1", model=f"model {text}", source=source, points=points)
