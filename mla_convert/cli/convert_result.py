"""What `mla-convert convert` prints: the plan before the work, the evidence after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from mla_convert.convert.inspection import Preview
    from mla_convert.convert.plan import CalibrationSpec, ConversionPlan
    from mla_convert.convert.run import Conversion
    from mla_convert.manifests.models import ConversionManifest
    from mla_convert.manifests.quality import PredictionRecord


@dataclass(frozen=True)
class DryRun:
    """A preview as a result."""

    preview: Preview

    def to_json(self) -> Mapping[str, object]:
        """See `Preview.to_json`."""
        return {"dry_run": True, **self.preview.to_json()}

    def render(self, console: Console) -> None:
        """The plan, and that nothing was written."""
        console.print(_grid(_plan_rows(self.preview)))
        console.print("dry run: nothing was written")


@dataclass(frozen=True)
class ConvertResult:
    """A finished conversion and how it is printed."""

    conversion: Conversion
    preview: Preview
    seconds: float

    def to_json(self) -> Mapping[str, object]:
        """Plan, identity, evidence and time."""
        from mla_convert.manifests.models import MANIFEST_NAME

        manifest = self.conversion.manifest
        calibration = manifest.calibration
        return {
            "dry_run": False,
            **self.preview.to_json(),
            "files": sorted([*(file.path for file in manifest.outputs.files), MANIFEST_NAME]),
            "total_bytes": manifest.outputs.total_bytes,
            "canonical_mla_id": manifest.canonical_mla_id,
            "reload_check": manifest.reload_check.model_dump(mode="json"),
            "layer_errors": self._layer_errors(),
            "prediction": None if manifest.prediction is None else manifest.prediction.model_dump(mode="json"),
            "measured": None if manifest.measured is None else manifest.measured.model_dump(mode="json"),
            "calibration": None if calibration is None else calibration.model_dump(mode="json", exclude={"documents"}),
            "refinement": None if manifest.refinement is None else manifest.refinement.model_dump(mode="json"),
            "warnings": manifest.warnings,
            "seconds": self.seconds,
            "phase_seconds": asdict(self.conversion.seconds),
        }

    def render(self, console: Console) -> None:
        """Where it is, what it is, and how well it holds; the plan has been printed before."""
        manifest, check = self.conversion.manifest, self.conversion.manifest.reload_check
        reloaded = (
            f"{check.kind}: max |Δlogit| {check.max_abs_logit_error:.2g}, {check.relative_error:.2g} of max |logit|; "
            f"at most {check.tolerance:g}"
        )
        rows = [
            ("written", f"{self.conversion.folder} ({_size(manifest.outputs.total_bytes)})"),
            ("plan", manifest.method.plan_id),
            ("identity", manifest.canonical_mla_id),
            ("reloaded", reloaded),
        ]
        for name, found in self._layer_errors().items():
            if found is not None:
                worst = f"worst {found['worst']:.3g} in layer {found['worst_layer']}"
                rows.append((name.replace("_", " "), f"mean {found['mean']:.3g}, {worst}"))
        rows += [*_refinement_rows(manifest), *_loss_rows(manifest)]
        rows += [("warning", warning) for warning in manifest.warnings]
        console.print(_grid([*rows, ("time", f"{self.seconds:.1f} s")]))

    def _layer_errors(self) -> dict[str, dict[str, float] | None]:
        """Mean and worst over the layers of each relative error; None where it was not measured."""
        found: dict[str, dict[str, float] | None] = {}
        for name in ("key_map_error", "value_map_error", "weighted_key_error", "weighted_value_error"):
            errors = [error for layer in self.conversion.manifest.layers if (error := getattr(layer, name)) is not None]
            found[name] = None
            if errors:
                worst = max(range(len(errors)), key=errors.__getitem__)
                found[name] = {"mean": sum(errors) / len(errors), "worst": errors[worst], "worst_layer": worst}
        return found


def print_preview(preview: Preview) -> None:
    """The plan on standard error, before work starts."""
    from rich.console import Console

    Console(stderr=True).print(_grid(_plan_rows(preview)))


def print_expectation(prediction: PredictionRecord | None, plan: ConversionPlan) -> None:
    """Why this plan and what it is expected to lose, on standard error; nothing where the widths were given."""
    from rich.console import Console

    if prediction is None:
        return
    width = plan.kv_lora_rank + plan.qk_rope_head_dim
    rows = [
        ("chosen for", prediction.chosen_for or ""),
        (
            "",
            f"{plan.qk_rope_head_dim}+{plan.kv_lora_rank} of width {width}; plans tried: {len(prediction.candidates)}",
        ),
        ("expected", _predicted(prediction)),
    ]
    Console(stderr=True).print(_grid(rows))


def _predicted(prediction: PredictionRecord) -> str:
    return f"KL {prediction.predicted_kl:.3g} nats per token, predicted by {prediction.predictor}"


def _loss_rows(manifest: ConversionManifest) -> list[tuple[str, str]]:
    """What was expected, and what was measured of it or that nothing was."""
    rows = [] if manifest.prediction is None else [("expected", _predicted(manifest.prediction))]
    loss, measured = manifest.reload_check.calibration_loss, manifest.measured
    if loss is not None:
        both = f"{loss.source:.3f} → {loss.target:.3f} nats per token on {loss.tokens} tokens of the calibration text"
        rows.append(("loss", both))
    if measured is not None:
        figures = f"KL {measured.kl:.3g}, perplexity {measured.source_perplexity:.2f} → {measured.perplexity:.2f} "
        figures += f"(× {measured.ratio:.4f}), top-1 {measured.top1_agreement:.1%}, on {measured.tokens:,} tokens"
        rows.append(("measured", figures))
    if loss is None and measured is None:
        rows.append(("loss", "not measured: neither calibration text nor --measure was given"))
    return rows


def _plan_rows(preview: Preview) -> list[tuple[str, str]]:
    plan, before, after = preview.plan, preview.source_cache, preview.target_cache
    numbers = f"{before.numbers_per_token_per_layer:,} → {after.numbers_per_token_per_layer:,}"
    share = after.numbers_per_token_per_layer / before.numbers_per_token_per_layer
    padding = f", filled up from {plan.useful_rank}+{2 * plan.rope_slots}" if plan.padded else ""
    residual = "as it is" if plan.residual_scale == 1 else f"times {plan.residual_scale:.4g}, for the norms' epsilon"
    biases = "; attention has biases" if plan.attention_bias else ""
    return [
        ("plan", plan.plan_id),
        ("profile", f"{plan.profile}{', lossless' if plan.lossless else ''}{biases}"),
        ("widths", f"kv_lora_rank {plan.kv_lora_rank}, qk_rope_head_dim {plan.qk_rope_head_dim}{padding}"),
        ("", f"qk_nope_head_dim {plan.qk_nope_head_dim}, v_head_dim {plan.v_head_dim}"),
        ("cache", f"{numbers} numbers per token and layer ({share:.1%})"),
        ("", f"{before.bytes_per_token:,} → {after.bytes_per_token:,} bytes per token ({after.dtype})"),
        ("recipe", plan.recipe or "none"),
        ("rope policy", f"{plan.rope_policy}{_rope_details(plan)}"),
        ("factorization", f"{plan.factorization}, weighting {plan.weighting}, gamma {plan.gamma}{_details(plan)}"),
        *_calibration_rows(plan.calibration),
        ("refinement", _refinement(plan)),
        ("latent norm", f"{plan.latent_norm} route"),
        ("residual", residual),
        ("dtype", f"{plan.dtype}; attention {plan.attention_dtype}"),
        ("writes", f"{_size(preview.weight_bytes)} of weights into {preview.out}{' (replaced)' * preview.overwrite}"),
        ("", ", ".join(preview.files)),
    ]


def _calibration_rows(spec: CalibrationSpec | None) -> list[tuple[str, str]]:
    if spec is None:
        return [("calibration", "none")]
    names = spec.texts
    if len(names) > 1:
        names = tuple(f"{name} ({weight:.1%})" for name, weight in zip(names, spec.weights, strict=True))
    rows = [("calibration", f"{spec.tokens:,} tokens in windows of {spec.window} of {', '.join(names)}")]
    if spec.long_windows:
        tokens = spec.long_windows * spec.long_window
        long = f"and {tokens:,} in windows of {spec.long_window:,}: {spec.score_ratio:.1f} times the scores to measure"
        rows.append(("", long))
    return rows


def _refinement_rows(manifest: ConversionManifest) -> list[tuple[str, str]]:
    """What fitting did to windows that were not fitted to; the errors above are of the closed form."""
    record = manifest.refinement
    if record is None:
        return []
    count = len(record.layers)
    before, after = sum(fit.before for fit in record.layers) / count, sum(fit.after for fit in record.layers) / count
    rows = [("refined", f"held-out distance from the source's stream {before:.3g} → {after:.3g}, mean over the layers")]
    if record.end_to_end is not None:
        last = record.end_to_end
        rows.append(("", f"end to end: held-out KL {last.before:.4f} → {last.after:.4f} nats per token"))
    return rows


def _refinement(plan: ConversionPlan) -> str:
    spec = plan.refine
    if spec is None:
        return "none"
    last = "" if spec.e2e_tokens is None else f"; then {spec.e2e_tokens:,} tokens through all layers together"
    own = f", fitted to {spec.continued_tokens:,} tokens of the source's own as well" if spec.continued_tokens else ""
    return f"{spec.steps} steps for each layer, {spec.batch} windows each{last}{own}"


def _rope_details(plan: ConversionPlan) -> str:
    fold = "" if plan.freqfold is None else f", freqfold {plan.freqfold}"
    return fold if plan.rope_stride == 1 else f"{fold}, stride {plan.rope_stride:g}"


def _details(plan: ConversionPlan) -> str:
    """What is not as it is without being asked for."""
    named = (("balance", "none"), ("rank_rule", "spectra"), ("centring", "auto"), ("damping", "auto"))
    return "".join(
        f", {name.replace('_', ' ')} {getattr(plan, name)}" for name, usual in named if getattr(plan, name) != usual
    )


def _grid(rows: list[tuple[str, str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(
            Text(name, style="dim"), Text(value, overflow="fold", style="bold red" if name == "warning" else "")
        )
    return grid


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
