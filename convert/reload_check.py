"""The gate before success is declared: the written files, loaded afresh, must compute what was promised."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from mla_convert.convert.loss_check import LossProbe
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.reload_child import ProbeSettings, ReloadReport
from mla_convert.convert.states import MEMORY_BUDGET_BYTES
from mla_convert.errors import CheckFailed
from mla_convert.manifests.models import ReloadCheck
from mla_convert.tolerances import RELOAD_LAYER, RELOAD_RELATIVE


def check_reload(
    folder: Path,
    probe: Path,
    plan: ConversionPlan,
    softmax_scale: float,
    ids: Tensor,
    logits: Tensor,
    whole_model_bytes: int = MEMORY_BUDGET_BYTES,
    text: LossProbe | None = None,
) -> ReloadCheck:
    """Load `folder` with stock transformers in a fresh process and compare it on the probe batch.

    It is loaded layer by layer, after its names and shapes were found to be those of its class; and whole, as a user
    loads it, where it is small enough.

    Args:
        folder: The written checkpoint, not yet in its final place.
        probe: Folder with the stages of each layer.
        plan: Dtype and residual scale.
        softmax_scale: The source's.
        ids: (B, T) probe tokens.
        logits: (B, T, V) the source's for a lossless plan, else the float64 reference's.
        whole_model_bytes: Largest model, in float32, that is loaded whole.
        text: Calibration tokens to measure the loss on; None where the plan has no calibration text.

    Raises:
        CheckFailed: If anything differs beyond the table of tolerances, naming the first layer and tensor, or the
            loss is not finite.
    """
    tolerance, layer_tolerance = RELOAD_RELATIVE[plan.attention_dtype], RELOAD_LAYER[plan.attention_dtype]
    settings = ProbeSettings(plan.residual_scale, softmax_scale, layer_tolerance, whole_model_bytes)
    (probe / "settings.json").write_text(json.dumps(asdict(settings)), encoding="utf-8")
    _save_expected(probe, ids, logits, text)
    report = _run_child(folder, probe)
    largest = max(report.max_abs_logit, 1e-30)
    relative_error = report.max_abs_error / largest
    worst = max(range(len(report.layer_errors)), key=report.layer_errors.__getitem__, default=None)
    if report.first_difference is not None or not relative_error <= tolerance:
        raise CheckFailed(
            "the written checkpoint does not compute what was converted; it was deleted",
            expected=f"max |Δlogit| at most {tolerance:g} of max |logit|, each layer within {layer_tolerance:g}",
            found=f"{relative_error:.3g}, worst layer {worst}",
            where=report.first_difference or "logits",
        )
    if report.loss is not None and not math.isfinite(report.loss):
        raise CheckFailed("the written checkpoint's loss on the calibration text is not finite; it was deleted")
    return ReloadCheck(
        kind="lossless-vs-source" if plan.lossless else "lossy-vs-reference",
        probe_tokens=int(ids.numel()),
        dtype=plan.attention_dtype,
        max_abs_logit_error=report.max_abs_error,
        max_abs_logit=report.max_abs_logit,
        relative_error=relative_error,
        tolerance=tolerance,
        passed=True,
        worst_layer=worst,
        layer_errors=report.layer_errors,
        whole_model=report.whole_model,
        calibration_loss=None if text is None or report.loss is None else text.record(report.loss),
    )


def _save_expected(probe: Path, ids: Tensor, logits: Tensor, text: LossProbe | None) -> None:
    expected = {"ids": ids.contiguous(), "logits": logits.float().contiguous()}
    if text is not None:
        expected["loss_ids"] = text.ids.contiguous()
    save_file(expected, probe / "expected.safetensors")


def _run_child(folder: Path, probe: Path) -> ReloadReport:
    child = subprocess.run(
        [sys.executable, "-m", "mla_convert.convert.reload_child", str(folder), str(probe)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:] or ["no message"]
        raise CheckFailed(
            "stock transformers cannot load the written checkpoint; it was deleted",
            found=last[0],
            where=str(folder),
        )
    fields = json.loads(child.stdout.strip().splitlines()[-1])
    fields["loading_problems"] = tuple(fields["loading_problems"])
    fields["layer_errors"] = tuple(fields["layer_errors"])
    return ReloadReport(**fields)
