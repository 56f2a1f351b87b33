"""A small valid converted folder, with its source and manifest, built without torch."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mla_convert.manifests import identity as ids
from mla_convert.manifests import models, quality
from mla_convert.manifests.digest import (
    combined_digest,
    digest_files,
    digest_source,
    tokenizer_digest,
    weight_files,
)
from mla_convert.manifests.environment import capture
from mla_convert.manifests.expected import expected_tensors
from mla_convert.manifests.layers import LayerReceipt, RopeSlot
from mla_convert.manifests.refinement import ContinuationRecord, FitRecord, RefinementRecord

LAYERS = 2
THETA = 10000.0
FREQUENCIES = (1.0, THETA**-0.5)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def architecture(**changes: object) -> ids.Architecture:
    """A two-layer `engine` architecture; `changes` replace single fields."""
    fields: dict[str, object] = {
        "model_type": "deepseek_v3",
        "profile": "engine",
        "hidden_size": 12,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "kv_lora_rank": 6,
        "q_lora_rank": None,
        "qk_nope_head_dim": 2,
        "qk_rope_head_dim": 4,
        "v_head_dim": 3,
        "vocab_size": 17,
        "intermediate_size": 10,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "softmax_scale_rule": ids.SOFTMAX_SCALE_RULE,
        "latent_norm": ids.LatentNorm(
            route="epsilon",
            epsilon=1e-6,
            down_scale=(2.0**-24,) * LAYERS,
            norm_weight=(2.0**14,) * LAYERS,
            up_scale=(1.024,) * LAYERS,
            constant=None,
            constant_row=None,
        ),
        "fused_orders": ids.STOCK_FUSED_ORDERS,
    }
    return ids.Architecture(**{**fields, **changes})  # type: ignore[arg-type]


def position(rope_type: str = "default", frequencies: tuple[float, ...] = FREQUENCIES) -> ids.PositionIdentity:
    """Two pairs of plain rotation, unless told otherwise."""
    return ids.PositionIdentity(
        rope_type=rope_type,
        rope_theta=THETA,
        pairing_layout="interleaved",
        pairing_convention=ids.PAIRING_CONVENTION,
        frequencies=frequencies,
        max_position_embeddings=64,
        attention_scaling=1.0,
    )


def config_json(arch: ids.Architecture) -> dict[str, object]:
    """config.json of the folder, without what the identity does not fix."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": arch.model_type,
        "dtype": "float32",
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_hidden_layers,
        "num_attention_heads": arch.num_attention_heads,
        "num_key_value_heads": arch.num_attention_heads,
        "kv_lora_rank": arch.kv_lora_rank,
        "q_lora_rank": arch.q_lora_rank,
        "qk_nope_head_dim": arch.qk_nope_head_dim,
        "qk_rope_head_dim": arch.qk_rope_head_dim,
        "v_head_dim": arch.v_head_dim,
        "vocab_size": arch.vocab_size,
        "intermediate_size": arch.intermediate_size,
        "hidden_act": arch.hidden_act,
        "attention_bias": arch.attention_bias,
        "tie_word_embeddings": arch.tie_word_embeddings,
        "rms_norm_eps": arch.rms_norm_eps,
        "first_k_dense_replace": arch.num_hidden_layers,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 64,
        "rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }


def layer(index: int, frequencies: tuple[float, ...] = FREQUENCIES) -> LayerReceipt:
    """The receipt of one layer whose two slots carry the first component of pairs 0 and 1."""
    return LayerReceipt(
        index=index,
        kv_lora_rank=6,
        useful_rank=6,
        key_rank=None,
        value_rank=None,
        rope_slots=tuple(
            RopeSlot(slot=slot, pair=slot, frequency=frequency, component=0, kv_head=None, mixes=(slot,))
            for slot, frequency in enumerate(frequencies)
        ),
        key_map_error=0.1,
        value_map_error=0.2,
        weighted_key_error=None,
        weighted_value_error=0.05,
        singular_energy_kept=0.97,
        predicted_output_error=None,
        written_content_probes=(1.0,),
        written_position_probes=(1.0,),
        written_value_probes=(1.0,),
        singular_values=(3.0, 2.0, 1.0),
    )


def write_source(folder: Path) -> None:
    """A source folder of three files; only their bytes matter here."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    save_file({"x": np.arange(4, dtype=np.float32)}, folder / "model.safetensors")


def write_checkpoint(folder: Path, arch: ids.Architecture, source: Path) -> None:
    """Config, two shards with their index, and the source's tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(arch)))
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(tensor.shape).astype(np.float32) for name, tensor in expected_tensors(arch).items()
    }
    names = list(tensors)
    parts = (names[: len(names) // 2], names[len(names) // 2 :])
    weight_map: dict[str, str] = {}
    for shard, part in zip(SHARDS, parts, strict=True):
        save_file({name: tensors[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def source_record(source: Path) -> models.SourceRecord:
    """The manifest's source section for `write_source`."""
    files = digest_source(source)
    config = next(file for file in files if file.path == "config.json")
    return models.SourceRecord(
        location=str(source),
        kind="hf-folder",
        family="llama",
        revision=None,
        files=files,
        checkpoint_digest=combined_digest(weight_files(files)),
        tokenizer_digest=tokenizer_digest(files),
        config_digest=f"sha256:{config.sha256}",
        dtype_counts={"float32": 1},
        unknown_config_keys=(),
    )


def method_record(arch: ids.Architecture) -> models.MethodRecord:
    """The manifest's method section."""
    return models.MethodRecord(
        tool="mla-convert",
        tool_version="0.1.0",
        plan_id="sha256:" + "1" * 64,
        profile=arch.profile,
        rope_policy="optimal",
        factorization="joint",
        weighting="output",
        gamma="measured",
        seed=0,
        output_dtype="float32",
        latent_norm_route=arch.latent_norm.route,
        residual_scale=1.0,
        rerounded_tensors=(),
        padding=None,
        paper_contracts=("TransMLA",),
        recipe=None,
        freqfold=None,
        rope_stride=1.0,
        balance="none",
        rank_rule=None,
        centring="auto",
    )


def calibration_text() -> models.CalibrationText:
    """The one calibration text."""
    return models.CalibrationText(
        name="a.txt",
        kind="text",
        sha256="2" * 64,
        documents=1,
        characters=9,
        weight=1.0,
        windows=2,
        long_windows=0,
        tokens=8,
        mean_square_input=2.5,
        key_share=1.0,
        value_share=1.0,
    )


def calibration_record() -> models.CalibrationRecord:
    """The manifest's calibration section."""
    return models.CalibrationRecord(
        texts=(calibration_text(),),
        documents=(models.DocumentDigest(id="a.txt#0", sha256="3" * 64),),
        windows=2,
        window_length=4,
        long_windows=0,
        long_window_length=0,
        tokens=8,
        seed=0,
        chat_template_sha256=None,
        self_text=None,
        statistics_digest="sha256:" + "4" * 64,
        damping=1e-6,
        under_determined=True,
    )


def reload_check() -> models.ReloadCheck:
    """A reload check that held."""
    return models.ReloadCheck(
        kind="lossy-vs-reference",
        probe_tokens=16,
        dtype="float32",
        max_abs_logit_error=2e-5,
        max_abs_logit=4.0,
        relative_error=5e-6,
        tolerance=1e-3,
        passed=True,
        worst_layer=1,
        layer_errors=(1e-6, 2e-6),
        whole_model=True,
        calibration_loss=quality.CalibrationLoss(source=2.0, target=2.5, tokens=3, uniform=math.log(17)),
    )


def prediction_record() -> quality.PredictionRecord:
    """Two splits of width 10, of which the better is the architecture's."""
    splits = ((4, 6, 0.2), (2, 8, 0.3))
    return quality.PredictionRecord(
        predictor="test/v1",
        predicted_kl=0.2,
        per_layer=(0.1, 0.1),
        chosen_for="--width 10",
        candidates=tuple(
            quality.CandidateRecord(width=10, qk_rope_head_dim=rope, kv_lora_rank=rank, predicted_kl=kl)
            for rope, rank, kl in splits
        ),
    )


def measured_record() -> quality.MeasuredRecord:
    """A measurement on held-out text."""
    return quality.MeasuredRecord(
        kl=0.25,
        perplexity=10.0,
        source_perplexity=8.0,
        ratio=1.25,
        top1_agreement=0.8,
        text=("b.txt",),
        text_sha256="5" * 64,
        tokens=16,
        scored_tokens=14,
        window=8,
        stride=8,
        seed=0,
    )


def refinement_record() -> RefinementRecord:
    """Both kinds of fits on the windows of calibration; the second layer's was undone."""
    return RefinementRecord(
        kind="e2e",
        version=1,
        optimizer="Adam",
        block_rate=0.01,
        block_steps=6,
        batch=1,
        window=4,
        windows=2,
        held_out_windows=(1,),
        seed=0,
        continuations=ContinuationRecord(windows=3, opening_tokens=1, temperature=1.0, top_p=1.0, sha256="9" * 64),
        layers=(FitRecord(before=0.4, after=0.3, kept_step=4), FitRecord(before=0.5, after=0.5, kept_step=0)),
        e2e_rate=0.005,
        e2e_steps=3,
        end_to_end=FitRecord(before=0.25, after=0.2, kept_step=3),
    )


def manifest_of(
    folder: Path, source: Path, arch: ids.Architecture, rotation: ids.PositionIdentity
) -> models.ConversionManifest:
    """The manifest of a float32 checkpoint folder that holds the source's tokenizer."""
    files = digest_files(folder, exclude=frozenset({models.MANIFEST_NAME}))
    record = source_record(source)
    identity = ids.SemanticIdentity(
        architecture=arch,
        checkpoint=ids.checkpoint_identity(
            files, source_checkpoint_digest=record.checkpoint_digest, dtypes=["float32"]
        ),
        position=rotation,
        cache=ids.CacheIdentity.of(arch, "float32"),
        kernel=ids.DENSE_KERNELS,
        placement=ids.UNPLACED,
        semantic_visibility=ids.CAUSAL_DENSE,
    )
    tokenizer = next(file for file in files if file.path == "tokenizer.json")
    return models.ConversionManifest(
        schema_version=models.SCHEMA_VERSION,
        canonical_mla_id=ids.canonical_mla_id(identity),
        identity=identity,
        source=record,
        method=method_record(arch),
        layers=tuple(layer(index, rotation.frequencies) for index in range(LAYERS)),
        calibration=calibration_record(),
        split=models.NO_SPLIT,
        reload_check=reload_check(),
        prediction=prediction_record(),
        measured=measured_record(),
        refinement=refinement_record(),
        outputs=models.OutputsRecord(
            files=files,
            sidecars=(models.Sidecar(path="tokenizer.json", sha256=tokenizer.sha256),),
            total_bytes=sum(file.bytes for file in files),
        ),
        environment=capture(["mla-convert", "convert"]).finish(),
        adaptation=None,
        warnings=("calibrated on fewer tokens than dimensions",),
    )


def build(root: Path) -> tuple[Path, Path, models.ConversionManifest]:
    """Write `root/source` and `root/out` with its manifest; return both folders and the manifest."""
    source, folder, arch = root / "source", root / "out", architecture()
    write_source(source)
    write_checkpoint(folder, arch, source)
    manifest = manifest_of(folder, source, arch, position())
    manifest.write(folder)
    return folder, source, manifest
