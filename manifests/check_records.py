"""The manifest's sections against one another."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mla_convert.errors import InputRefused
from mla_convert.manifests.check_identity import same_fields
from mla_convert.manifests.digest import combined_digest, tokenizer_digest, weight_files
from mla_convert.manifests.identity import canonical_mla_id, checkpoint_identity
from mla_convert.manifests.layers import LayerReceipt
from mla_convert.manifests.models import NO_SPLIT, ConversionManifest
from mla_convert.manifests.problems import VerifyProblem, expect, problem
from mla_convert.manifests.refinement import FitRecord

FREQUENCY_TOLERANCE = 1e-6
"""Relative; runtimes hold frequencies in float32, whose spacing is 1.2e-7."""


def check_records(manifest: ConversionManifest) -> Iterator[VerifyProblem]:
    """The id, digests of digests, and everything that is written in two places."""
    identity, method = manifest.identity, manifest.method
    yield from expect("canonical_mla_id", canonical_mla_id(identity), manifest.canonical_mla_id)
    yield from expect("method.profile", identity.architecture.profile, method.profile)
    yield from expect("method.latent_norm_route", identity.architecture.latent_norm.route, method.latent_norm_route)
    yield from _checkpoint(manifest)
    yield from _source(manifest)
    yield from _layers(manifest)
    yield from _calibration(manifest)
    yield from _reload_check(manifest)
    yield from _quality(manifest)
    yield from _refinement(manifest)
    yield from same_fields("split", NO_SPLIT, manifest.split)


def close(left: float, right: float) -> bool:
    """Whether two frequencies are the same number to a runtime."""
    return math.isclose(left, right, rel_tol=FREQUENCY_TOLERANCE)


def _checkpoint(manifest: ConversionManifest) -> Iterator[VerifyProblem]:
    written = manifest.identity.checkpoint
    try:
        derived = checkpoint_identity(
            manifest.outputs.files,
            source_checkpoint_digest=manifest.source.checkpoint_digest,
            dtypes=written.dtypes,
        )
    except InputRefused as error:
        yield problem("invalid", "outputs.files (checkpoint)", error.expected, error.message)
        return
    yield from same_fields("identity.checkpoint", derived, written)


def _source(manifest: ConversionManifest) -> Iterator[VerifyProblem]:
    source = manifest.source
    yield from expect("source.checkpoint_digest", combined_digest(weight_files(source.files)), source.checkpoint_digest)
    if source.kind == "gguf":
        # A GGUF file holds config and tokenizer inside, so their digests are of what was read out of it.
        return
    config = next((file.sha256 for file in source.files if file.path == "config.json"), None)
    derived = None if config is None else f"sha256:{config}"
    yield from expect("source.config_digest", derived, source.config_digest)
    yield from expect("source.tokenizer_digest", tokenizer_digest(source.files), source.tokenizer_digest)


def _layers(manifest: ConversionManifest) -> Iterator[VerifyProblem]:
    arch = manifest.identity.architecture
    indices = [layer.index for layer in manifest.layers]
    yield from expect("layers (indices)", list(range(arch.num_hidden_layers)), indices)
    for layer in manifest.layers:
        prefix = f"layers.{layer.index}"
        yield from expect(f"{prefix}.kv_lora_rank", arch.kv_lora_rank, layer.kv_lora_rank)
        yield from _slots(layer, prefix, manifest.identity.position.frequencies)


def _slots(layer: LayerReceipt, prefix: str, frequencies: tuple[float, ...]) -> Iterator[VerifyProblem]:
    used = [slot.slot for slot in layer.rope_slots]
    if len(used) != len(set(used)):
        yield problem("invalid", f"{prefix}.rope_slots", "each slot once", used)
    for slot in layer.rope_slots:
        if slot.slot >= len(frequencies):
            yield problem("invalid", f"{prefix}.rope_slots", f"slots below {len(frequencies)}", slot.slot)
        elif not close(slot.frequency, frequencies[slot.slot]):
            subject = f"{prefix}.rope_slots (slot {slot.slot})"
            yield from expect(subject, frequencies[slot.slot], slot.frequency)


def _quality(manifest: ConversionManifest) -> Iterator[VerifyProblem]:
    prediction, measured, loss = manifest.prediction, manifest.measured, manifest.reload_check.calibration_loss
    arch = manifest.identity.architecture
    if prediction is not None and prediction.candidates:
        chosen = [
            candidate.predicted_kl
            for candidate in prediction.candidates
            if (candidate.qk_rope_head_dim, candidate.kv_lora_rank) == (arch.qk_rope_head_dim, arch.kv_lora_rank)
        ]
        yield from expect("prediction.candidates (the plan)", [prediction.predicted_kl], chosen)
    if measured is not None and not close(measured.ratio * measured.source_perplexity, measured.perplexity):
        yield problem("invalid", "measured.ratio", "perplexity / source_perplexity", measured.ratio)
    if loss is not None and not close(loss.uniform, math.log(arch.vocab_size)):
        yield problem("invalid", "reload_check.calibration_loss.uniform", math.log(arch.vocab_size), loss.uniform)


def _calibration(manifest: ConversionManifest) -> Iterator[VerifyProblem]:
    record = manifest.calibration
    if record is None:
        return
    texts = record.texts
    yield from expect("calibration.windows", sum(text.windows for text in texts), record.windows)
    yield from expect("calibration.long_windows", sum(text.long_windows for text in texts), record.long_windows)
    for index, text in enumerate(texts):
        tokens = text.windows * record.window_length + text.long_windows * record.long_window_length
        yield from expect(f"calibration.texts.{index}.tokens", tokens, text.tokens)
    yield from expect("calibration.tokens", sum(text.tokens for text in texts), record.tokens)


def _refinement(manifest: ConversionManifest) -> Iterator[VerifyProblem]:
    record, calibration = manifest.refinement, manifest.calibration
    if record is None:
        return
    if calibration is None:
        yield problem("missing", "calibration", "the windows that layers were fitted to")
    else:
        yield from expect("refinement.windows", calibration.windows, record.windows)
        yield from expect("refinement.window", calibration.window_length, record.window)
    yield from expect("refinement.seed", manifest.method.seed, record.seed)
    held = record.held_out_windows
    if list(held) != sorted(set(held)) or held[0] < 0 or held[-1] >= record.windows or len(held) >= record.windows:
        wanted = f"some windows below {record.windows} in order, each once"
        yield problem("invalid", "refinement.held_out_windows", wanted, held)
    layers = manifest.identity.architecture.num_hidden_layers
    yield from expect("refinement.layers (how many)", layers, len(record.layers))
    for index, layer in enumerate(record.layers):
        yield from _fit(f"refinement.layers.{index}", layer, record.block_steps)
    for name in ("e2e_rate", "e2e_steps", "end_to_end"):
        yield from expect(f"refinement.{name} is given", record.kind == "e2e", getattr(record, name) is not None)
    if record.end_to_end is not None and record.e2e_steps is not None:
        yield from _fit("refinement.end_to_end", record.end_to_end, record.e2e_steps)


def _fit(prefix: str, record: FitRecord, steps: int) -> Iterator[VerifyProblem]:
    if record.after > record.before:
        yield problem("invalid", f"{prefix}.after", f"at most {record.before}, as before the fit", record.after)
    if record.kept_step > steps:
        yield problem("invalid", f"{prefix}.kept_step", f"at most {steps}", record.kept_step)
    # A state is kept only where its loss is smaller than that of all before it.
    yield from expect(f"{prefix}.kept_step is 0", record.after == record.before, record.kept_step == 0)


def _reload_check(manifest: ConversionManifest) -> Iterator[VerifyProblem]:
    check = manifest.reload_check
    held = check.relative_error <= check.tolerance
    yield from expect("reload_check.passed", held, check.passed)
    if not check.passed:
        yield problem("invalid", "reload_check", "a check that passed", "a check that failed")
    if not math.isclose(
        check.relative_error * check.max_abs_logit, check.max_abs_logit_error, rel_tol=1e-6, abs_tol=1e-12
    ):
        yield problem(
            "invalid",
            "reload_check.relative_error",
            "max_abs_logit_error / max_abs_logit",
            check.relative_error,
        )
