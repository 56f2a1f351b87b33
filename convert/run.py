"""One conversion from end to end: open, plan, calibrate, convert layer by layer, write, reload, sign off."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_convert.convert.calibration_evidence import CalibrationEvidence
from mla_convert.convert.calibration_run import gather
from mla_convert.convert.checkpoint import SourceCheckpoint, open_source
from mla_convert.convert.checkpoint_writer import (
    FolderTransaction,
    ShardWriter,
    absolute,
    check_writable,
    refuse_existing,
    write_json,
)
from mla_convert.convert.closed_form import ClosedForm, measure_for
from mla_convert.convert.loss_check import LossProbe, chance_warning
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.phases import PhaseSeconds, Seconds
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.planning import make_plan
from mla_convert.convert.predict import combine, layer_loss, predictable
from mla_convert.convert.probe import ReferenceProbe
from mla_convert.convert.receipts import (
    LayerRecord,
    SourceDigests,
    build_manifest,
    digest_of_source,
    prediction_record,
    unknown_config_keys,
    with_measured,
)
from mla_convert.convert.refine import Refined, refine
from mla_convert.convert.reload_check import check_reload
from mla_convert.convert.selection import Measured
from mla_convert.convert.sidecars import copy_sidecars
from mla_convert.convert.source_model import StreamedSource
from mla_convert.convert.source_reading import check_reading
from mla_convert.convert.states import MEMORY_BUDGET_BYTES
from mla_convert.convert.stock_layout import stock_config
from mla_convert.convert.target import TargetWriter
from mla_convert.convert.tokenizer import check_tokenizer
from mla_convert.errors import EnvironmentFault, UsageFault
from mla_convert.manifests.environment import Environment, capture
from mla_convert.manifests.models import ConversionManifest
from mla_convert.manifests.quality import MeasuredRecord, PredictionRecord
from mla_convert.manifests.refinement import RefinementRecord
from mla_convert.mla.map_error import map_probes, maps_of_weights

# Head room for the index, the manifest and the file system's own needs.
DISK_MARGIN = 1.05


@dataclass(frozen=True)
class Conversion:
    """A finished conversion.

    Attributes:
        folder: The written checkpoint.
        plan: What was done.
        manifest: The evidence.
        seconds: Time by phase.
    """

    folder: Path
    plan: ConversionPlan
    manifest: ConversionManifest
    seconds: PhaseSeconds


def convert(
    source: str | SourceCheckpoint,
    out: Path,
    options: ConvertOptions,
    *,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
    prediction: PredictionRecord | None = None,
    measure: Callable[[Path], MeasuredRecord] | None = None,
) -> Conversion:
    """Convert a checkpoint.

    Args:
        source: Folder, GGUF file, Hub id, or an opened source.
        out: Folder to write; must not exist unless `overwrite`.
        options: What is wanted.
        overwrite: Replace an existing checkpoint folder.
        command: Command line for the record; the process's own by default.
        memory_budget_bytes: Most bytes of hidden states to hold in memory, and the largest model that is loaded whole
            to check it; states past it go to disk, models past it are checked layer by layer. Changes no result.
        prediction: What the plan is expected to lose, where it has been chosen by that; else it is predicted here.
        measure: Measures the finished folder before it gets its name; what it raises undoes the conversion.

    Raises:
        UsageFault: For options that do not fit, or an existing `out`.
        InputRefused: For a source or text that cannot be used.
        EnvironmentFault: If the disk is too small.
        CheckFailed: If the written files do not compute what was converted; `out` is then not there.
    """
    environment = capture(list(command if command is not None else sys.argv))
    out = absolute(out)
    refuse_existing(out, overwrite=overwrite)
    checkpoint = open_source(source) if isinstance(source, str) else source
    refuse_inside(out, checkpoint.location.folder)
    plan = make_plan(checkpoint, options)
    check_tokenizer(checkpoint.location.folder)
    check_disk(out, checkpoint, plan)
    check_writable(out)
    digests = digest_of_source(checkpoint)
    started = Seconds.now()
    evidence = gather(checkpoint, digests, plan, memory_budget_bytes)
    calibrated = Seconds.now()
    with FolderTransaction(out, overwrite=overwrite) as transaction, tempfile.TemporaryDirectory() as scratch:
        work = _Work(checkpoint, plan, evidence, transaction.working, Path(scratch), prediction, memory_budget_bytes)
        written = work.write()
        converted = Seconds.now()
        manifest = work.finish(written, digests, environment, _warnings(checkpoint, plan, evidence))
        manifest.write(transaction.working)
        if measure is not None:
            manifest = with_measured(manifest, measure(transaction.working))
            manifest.write(transaction.working)
        transaction.commit()
    forward = Seconds() if evidence is None else evidence.store.forward_seconds
    checked = Seconds.now() - converted
    seconds = PhaseSeconds(forward, calibrated - started - forward, converted - calibrated, checked)
    return Conversion(out, plan, manifest, seconds)


def refuse_inside(out: Path, source: Path) -> None:
    """Refuse an output that is the source, lies in it or holds it.

    Raises:
        UsageFault: If so.
    """
    resolved = out.expanduser().resolve()
    if resolved == source or source in resolved.parents or resolved in source.parents:
        raise UsageFault("the output must not be the source, lie in it or hold it", where=str(out))


def estimated_bytes(source: SourceCheckpoint, plan: ConversionPlan) -> int:
    """Size of the written weights in bytes, from headers alone."""
    chosen: torch.dtype | None = None if plan.dtype == "source" else getattr(torch, plan.dtype)
    copied = 0
    for name in source.files.names:
        info = source.files.info(name)
        if ".self_attn." not in name:
            copied += torch.Size(info.shape).numel() * (chosen or info.dtype).itemsize
    if source.tied and not plan.tie_word_embeddings:
        copied += source.config.vocab_size * source.shape.hidden_size * (chosen or source.attention_dtype).itemsize
    width, heads = source.shape.hidden_size, source.shape.num_heads
    query = heads * (plan.qk_nope_head_dim + plan.qk_rope_head_dim)
    per_layer = (plan.kv_lora_rank + plan.qk_rope_head_dim) * width
    per_layer += plan.kv_lora_rank * heads * (plan.qk_nope_head_dim + plan.v_head_dim) + heads * plan.v_head_dim * width
    per_layer += query * width if plan.q_lora_rank is None else plan.q_lora_rank * (width + query)
    itemsize: int = getattr(torch, plan.attention_dtype).itemsize
    return copied + per_layer * source.num_layers * itemsize


def check_disk(out: Path, source: SourceCheckpoint, plan: ConversionPlan) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        EnvironmentFault: With the bytes needed and free.
    """
    parent = out.expanduser().absolute().parent
    while not parent.exists():
        parent = parent.parent
    needed, free = int(estimated_bytes(source, plan) * DISK_MARGIN), shutil.disk_usage(parent).free
    if needed > free:
        raise EnvironmentFault(
            "not enough disk space", expected=f"{needed:,} bytes", found=f"{free:,} free", where=str(parent)
        )


def _warnings(source: SourceCheckpoint, plan: ConversionPlan, evidence: CalibrationEvidence | None) -> list[str]:
    found = []
    unknown = unknown_config_keys(source)
    if unknown:
        found.append(f"config.json has keys that transformers' class does not know: {', '.join(unknown)}")
    if (
        evidence is not None
        and plan.calibration is not None
        and evidence.windows.tokens + plan.calibration.window <= plan.calibration.tokens
    ):
        found.append(
            f"the text gave {evidence.windows.tokens} calibration tokens of {plan.calibration.tokens} asked for"
        )
    if evidence is not None:
        found += evidence.warnings
    if evidence is not None and evidence.tokens < source.shape.hidden_size:
        found.append(
            f"{evidence.tokens} calibration tokens for {source.shape.hidden_size} dimensions: "
            "directions never seen are held by damping alone"
        )
    return found


@dataclass(frozen=True)
class _Written:
    """What is known once all tensors are on disk."""

    config: dict[str, Any]
    layers: list[LayerRecord]
    writer: TargetWriter
    probe_ids: Tensor
    expected_logits: Tensor
    softmax_scale: float
    prediction: PredictionRecord | None
    refinement: RefinementRecord | None


@dataclass(frozen=True)
class _Work:
    """The layer loop: source pass, conversion, writing and the reference side by side."""

    source: SourceCheckpoint
    plan: ConversionPlan
    evidence: CalibrationEvidence | None
    folder: Path
    scratch: Path
    prediction: PredictionRecord | None
    memory_budget_bytes: int

    def write(self) -> _Written:
        """Convert and write every layer."""
        measured = measure_for(self.source, self.plan, self.evidence)
        form = ClosedForm.of(self.source, self.plan, measured)
        refined = self.refine(form, measured)
        streamed = StreamedSource(self.source)
        probe = ReferenceProbe.start(self.source, streamed, self.scratch, self.plan.seed)
        writer = TargetWriter(self.source, self.plan, ShardWriter(self.folder))
        writer.write_embedding()
        layers, losses, scale, hidden = [], [], 1.0, torch.empty(0)
        for done in streamed.layers(probe.ids, "converting"):
            (batch,) = done.batches
            weights = self.source.layer_weights(done.layer)
            check_reading(weights, self.source.rope.frequencies, batch, windows=1)
            statistics = None if measured is None else measured.store.load(done.layer)
            converted = form.convert(done.layer, weights, statistics)
            final = converted.weights if refined is None else refined.weights(done.layer, converted.weights)
            writer.write_layer(done.layer, final)
            probe.advance(done.layer, final)
            layers.append(LayerRecord(converted.slots, converted.quality, map_probes(maps_of_weights(final))))
            if statistics is not None and self.prediction is None and predictable(self.plan):
                losses.append(layer_loss(self.plan, weights, statistics, converted))
            scale, hidden = weights.softmax_scale, batch.hidden
        writer.write_head()
        config = stock_config(self.plan, self.source, form.selection.grid)
        write_json(self.folder / "config.json", config)
        expected = streamed.logits(hidden) if self.plan.lossless else probe.logits(streamed)
        prediction = prediction_record(combine(losses)) if losses else self.prediction
        record = None if refined is None else refined.record
        return _Written(config, layers, writer, probe.ids, expected, scale, prediction, record)

    def refine(self, form: ClosedForm, measured: Measured | None) -> Refined | None:
        """Fit the layers where the plan says so."""
        if self.plan.refine is None or measured is None or self.evidence is None:
            return None
        return refine(form, measured, self.evidence.windows.ids, self.memory_budget_bytes)

    def finish(
        self, written: _Written, digests: SourceDigests, environment: Environment, warnings: Sequence[str]
    ) -> ConversionManifest:
        """Copy what stays as it is, hold the files against the probe, and sum up."""
        sidecars = copy_sidecars(self.source.location.folder, self.folder)
        text = None if self.evidence is None else LossProbe.measure(self.source, self.evidence.windows.ids)
        reload_check = check_reload(
            self.folder,
            self.scratch,
            self.plan,
            written.softmax_scale,
            written.probe_ids,
            written.expected_logits,
            self.memory_budget_bytes,
            text,
        )
        loss = reload_check.calibration_loss
        alarm = loss and chance_warning(loss.target, loss.uniform, loss.source, "its calibration text")
        return build_manifest(
            source=self.source,
            digests=digests,
            plan=self.plan,
            config=written.config,
            folder=self.folder,
            # What was read out of a GGUF file is no copy of a file of the source.
            sidecars=() if self.source.location.kind == "gguf" else sidecars,
            layers=written.layers,
            norms=written.writer.latent_norms,
            rerounded=written.writer.rerounded,
            dtypes=written.writer.shards.dtypes,
            calibration=self.evidence,
            reload_check=reload_check,
            prediction=written.prediction,
            refinement=written.refinement,
            environment=environment.finish(),
            warnings=[*warnings, *([alarm] if alarm else [])],
        )
