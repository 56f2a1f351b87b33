"""The conversion manifest, assembled from what was planned, done, written and measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_convert.convert.calibration_evidence import CalibrationEvidence, calibration_record
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.latent_norm import LATENT_NORM_EPS, NeutralNorm
from mla_convert.convert.layer import LayerQuality
from mla_convert.convert.loss_check import chance_warning
from mla_convert.convert.plan import HEAD_POLICIES, ConversionPlan
from mla_convert.convert.predict import PREDICTOR, Prediction
from mla_convert.convert.recipes import RECIPES
from mla_convert.convert.rope_select import RopeSlots
from mla_convert.manifests.check_config import derive_rotation
from mla_convert.manifests.digest import (
    FileDigest,
    combined_digest,
    digest_file,
    digest_files,
    digest_source,
    tokenizer_digest,
    weight_files,
)
from mla_convert.manifests.environment import Environment
from mla_convert.manifests.identity import (
    CAUSAL_DENSE,
    DENSE_KERNELS,
    PAIRING_CONVENTION,
    SOFTMAX_SCALE_RULE,
    STOCK_FUSED_ORDERS,
    UNPLACED,
    Architecture,
    CacheIdentity,
    LatentNorm,
    PositionIdentity,
    SemanticIdentity,
    canonical_mla_id,
    checkpoint_identity,
)
from mla_convert.manifests.layers import LayerReceipt, RopeSlot
from mla_convert.manifests.models import (
    MANIFEST_NAME,
    NO_SPLIT,
    SCHEMA_VERSION,
    ConversionManifest,
    MethodRecord,
    OutputsRecord,
    ReloadCheck,
    Sidecar,
    SourceRecord,
)
from mla_convert.manifests.quality import CandidateRecord, MeasuredRecord, PredictionRecord
from mla_convert.manifests.refinement import RefinementRecord
from mla_convert.mla.map_error import MapProbes
from mla_convert.version import __version__

# The head of a spectrum is enough to see what a rank cuts; whole spectra of large models are megabytes.
SINGULAR_VALUES_KEPT = 64

PAPERS = {
    "high": "MHA2MLA (arXiv 2502.14837), section 3.1, S_high",
    "low": "MHA2MLA (arXiv 2502.14837), section 3.1, S_low",
    "uniform": "MHA2MLA (arXiv 2502.14837), section 3.1, S_uniform",
    "2-norm": "MHA2MLA (arXiv 2502.14837), section 3.1, S_2-norm, one frequency list for all layers",
    "greedy": "EliteKV (arXiv 2503.01586), RoPElite, one frequency list for all layers",
    "rorope": "TransMLA (arXiv 2502.07864), section 4.2, RoRoPE and FreqFold",
    "mean": "X-EcoMLA (arXiv 2503.11132), SVD initialisation, columns in the order of pairs",
}
WEIGHTING_PAPERS = {"activation": "SVD-LLM (arXiv 2403.07378): covariance whitening"}


@dataclass(frozen=True)
class SourceDigests:
    """Digests of what was read.

    Attributes:
        files: Of the folder, or of the GGUF file alone.
        config: Of `config.json`.
        tokenizer: Of the tokenizer's files, None without them.
    """

    files: tuple[FileDigest, ...]
    config: str
    tokenizer: str | None

    @property
    def checkpoint(self) -> str:
        """Combined digest of the weight files."""
        return combined_digest(weight_files(self.files))


@dataclass(frozen=True)
class LayerRecord:
    """One converted layer's slots and distances; `probes` are of what is written, refinement included."""

    slots: RopeSlots
    quality: LayerQuality
    probes: MapProbes


def digest_of_source(source: SourceCheckpoint) -> SourceDigests:
    """Hash a source: the folder's files, or for a GGUF the file itself beside the folder made of it."""
    folder_files = digest_source(source.location.folder)
    config = digest_file(source.location.folder / "config.json", "config.json")
    files = digest_source(Path(source.location.given).expanduser()) if source.location.kind == "gguf" else folder_files
    return SourceDigests(files, f"sha256:{config.sha256}", tokenizer_digest(folder_files))


def unknown_config_keys(source: SourceCheckpoint) -> tuple[str, ...]:
    """Keys of `config.json` that its transformers class does not know, with a value that says something."""
    known = set(type(source.config)().to_dict()) | {
        "torch_dtype",
        "_name_or_path",
        "rope_scaling",
        "rope_theta",
        "dtype",
    }
    known |= {"head_dim", "auto_map"}
    return tuple(sorted(key for key, value in source.raw_config.items() if key not in known and value is not None))


def build_manifest(
    *,
    source: SourceCheckpoint,
    digests: SourceDigests,
    plan: ConversionPlan,
    config: dict[str, Any],
    folder: Path,
    sidecars: Sequence[str],
    layers: Sequence[LayerRecord],
    norms: Sequence[NeutralNorm],
    rerounded: Sequence[str],
    dtypes: Sequence[str],
    calibration: CalibrationEvidence | None,
    reload_check: ReloadCheck,
    prediction: PredictionRecord | None,
    refinement: RefinementRecord | None,
    environment: Environment,
    warnings: Sequence[str],
) -> ConversionManifest:
    """Assemble the manifest of a folder whose files are all written."""
    files = digest_files(folder, exclude=frozenset({MANIFEST_NAME}))
    identity = _identity(digests, plan, config, files, norms, dtypes)
    by_path = {file.path: file.sha256 for file in files}
    return ConversionManifest(
        schema_version=SCHEMA_VERSION,
        canonical_mla_id=canonical_mla_id(identity),
        identity=identity,
        source=_source_record(source, digests),
        method=_method(plan, rerounded, layers),
        layers=tuple(_layer_receipt(index, record, source, plan) for index, record in enumerate(layers)),
        calibration=None if calibration is None else calibration_record(plan, source, calibration),
        split=NO_SPLIT,
        reload_check=reload_check,
        prediction=prediction,
        refinement=refinement,
        measured=None,
        outputs=OutputsRecord(
            files=files,
            sidecars=tuple(Sidecar(path=path, sha256=by_path[path]) for path in sidecars),
            total_bytes=sum(file.bytes for file in files),
        ),
        environment=environment,
        adaptation=None,
        warnings=tuple(warnings),
    )


def prediction_record(
    prediction: Prediction, chosen_for: str | None = None, candidates: Sequence[CandidateRecord] = ()
) -> PredictionRecord:
    """The manifest's `prediction`; the last two are given where the plan was chosen by it."""
    return PredictionRecord(
        predictor=PREDICTOR,
        predicted_kl=prediction.kl,
        per_layer=prediction.per_layer,
        chosen_for=chosen_for,
        candidates=tuple(candidates),
    )


def with_measured(manifest: ConversionManifest, measured: MeasuredRecord) -> ConversionManifest:
    """A manifest with what was measured of its folder, and a warning where that is worse than chance."""
    loss, source_loss = math.log(measured.perplexity), math.log(measured.source_perplexity)
    uniform = math.log(manifest.identity.architecture.vocab_size)
    alarm = chance_warning(loss, uniform, source_loss, ", ".join(measured.text))
    warnings = (*manifest.warnings, *([alarm] if alarm else []))
    return manifest.model_copy(update={"measured": measured, "warnings": warnings})


def _identity(
    digests: SourceDigests,
    plan: ConversionPlan,
    config: dict[str, Any],
    files: tuple[FileDigest, ...],
    norms: Sequence[NeutralNorm],
    dtypes: Sequence[str],
) -> SemanticIdentity:
    architecture = Architecture(
        model_type="deepseek_v3",
        profile=plan.profile,
        hidden_size=config["hidden_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=config["num_attention_heads"],
        kv_lora_rank=plan.kv_lora_rank,
        q_lora_rank=plan.q_lora_rank,
        qk_nope_head_dim=plan.qk_nope_head_dim,
        qk_rope_head_dim=plan.qk_rope_head_dim,
        v_head_dim=plan.v_head_dim,
        vocab_size=config["vocab_size"],
        intermediate_size=config["intermediate_size"],
        hidden_act=config["hidden_act"],
        attention_bias=plan.attention_bias,
        tie_word_embeddings=plan.tie_word_embeddings,
        rms_norm_eps=plan.rms_norm_eps,
        softmax_scale_rule=SOFTMAX_SCALE_RULE,
        latent_norm=LatentNorm(
            route=plan.latent_norm,
            epsilon=LATENT_NORM_EPS,
            down_scale=tuple(norm.input_scale for norm in norms),
            norm_weight=tuple(norm.weight for norm in norms),
            up_scale=tuple(norm.output_factor for norm in norms),
            constant=_constants(norms),
            constant_row=plan.kv_lora_rank - 1 if plan.latent_norm == "constant" else None,
        ),
        fused_orders=STOCK_FUSED_ORDERS,
    )
    rope_fields = {**config["rope_parameters"], "max_position_embeddings": config["max_position_embeddings"]}
    rotation = derive_rotation(rope_fields, plan.qk_rope_head_dim)
    return SemanticIdentity(
        architecture=architecture,
        checkpoint=checkpoint_identity(files, source_checkpoint_digest=digests.checkpoint, dtypes=dtypes),
        position=PositionIdentity(
            rope_type=rotation.rope_type,
            rope_theta=rotation.theta,
            pairing_layout="interleaved",
            pairing_convention=PAIRING_CONVENTION,
            frequencies=rotation.frequencies,
            max_position_embeddings=config["max_position_embeddings"],
            attention_scaling=rotation.attention_scaling,
        ),
        cache=CacheIdentity.of(architecture, plan.attention_dtype),
        kernel=DENSE_KERNELS,
        placement=UNPLACED,
        semantic_visibility=CAUSAL_DENSE,
    )


def _constants(norms: Sequence[NeutralNorm]) -> tuple[float, ...] | None:
    channels = tuple(norm.channel for norm in norms if norm.channel is not None)
    return channels or None


def _source_record(source: SourceCheckpoint, digests: SourceDigests) -> SourceRecord:
    counts = Counter(str(source.files.info(name).dtype).removeprefix("torch.") for name in source.files.names)
    return SourceRecord(
        location=source.location.given,
        kind=source.location.kind,
        family=source.family.name,
        revision=source.location.revision,
        files=digests.files,
        checkpoint_digest=digests.checkpoint,
        tokenizer_digest=digests.tokenizer,
        config_digest=digests.config,
        dtype_counts=dict(sorted(counts.items())),
        unknown_config_keys=unknown_config_keys(source),
    )


def _method(plan: ConversionPlan, rerounded: Sequence[str], layers: Sequence[LayerRecord]) -> MethodRecord:
    papers = [PAPERS.get(plan.rope_policy), WEIGHTING_PAPERS.get(plan.weighting)]
    if plan.recipe is not None and plan.recipe != "optimal":
        papers = [RECIPES[plan.recipe].paper]
    fold = None if plan.freqfold is None else len(layers[0].slots.mixes[0])
    padding = (
        f"{plan.kv_lora_rank}+{plan.qk_rope_head_dim} holds {plan.useful_rank}+{2 * plan.rope_slots}"
        if plan.padded
        else None
    )
    return MethodRecord(
        tool="mla-convert",
        tool_version=__version__,
        plan_id=plan.plan_id,
        profile=plan.profile,
        rope_policy=plan.rope_policy,
        factorization=plan.factorization,
        weighting=plan.weighting,
        gamma=plan.gamma,
        seed=plan.seed,
        output_dtype=plan.attention_dtype,
        latent_norm_route=plan.latent_norm,
        residual_scale=plan.residual_scale,
        rerounded_tensors=tuple(rerounded),
        padding=padding,
        paper_contracts=tuple(paper for paper in papers if paper is not None),
        recipe=plan.recipe,
        freqfold=fold,
        rope_stride=plan.rope_stride,
        balance=plan.balance,
        rank_rule=plan.rank_rule if plan.factorization == "split" else None,
        centring=plan.centring,
    )


def _layer_receipt(index: int, record: LayerRecord, source: SourceCheckpoint, plan: ConversionPlan) -> LayerReceipt:
    quality, by_head = record.quality, plan.rope_policy in HEAD_POLICIES
    # A grid slot keeps its home pair; a fold counts the pair whose frequency it has.
    homes = _home_pairs(record.slots, source)
    slots = tuple(
        RopeSlot(
            slot=slot,
            pair=home,
            frequency=float(record.slots.frequencies[slot]),
            component=None if by_head else record.slots.component[slot],
            kv_head=record.slots.component[slot] if by_head else None,
            mixes=record.slots.mixes[slot],
        )
        for slot, home in enumerate(homes)
    )
    key_rank, value_rank = quality.split_ranks or (None, None)
    return LayerReceipt(
        index=index,
        kv_lora_rank=plan.kv_lora_rank,
        useful_rank=plan.useful_rank,
        key_rank=key_rank,
        value_rank=value_rank,
        rope_slots=slots,
        key_map_error=quality.key_map_error,
        value_map_error=quality.value_map_error,
        weighted_key_error=quality.weighted_key_error,
        weighted_value_error=quality.weighted_value_error,
        singular_energy_kept=quality.energy_kept,
        predicted_output_error=quality.predicted_output_error,
        written_content_probes=tuple(record.probes.content.tolist()),
        written_position_probes=tuple(record.probes.position.tolist()),
        written_value_probes=tuple(record.probes.value.tolist()),
        singular_values=quality.singular_values[:SINGULAR_VALUES_KEPT],
    )


def _home_pairs(slots: RopeSlots, source: SourceCheckpoint) -> list[int]:
    """Of the pairs that each slot combines, the one whose frequency is closest to the slot's."""
    own = source.rope.frequencies.log()
    return [
        min(pairs, key=lambda pair: abs(float(own[pair] - slots.frequencies[slot].log())))
        for slot, pairs in enumerate(slots.mixes)
    ]
