"""Each way of tampering with a valid folder is named by verification.

The second and third groups are signed again after the change (hashes, checkpoint part and id are made to
fit), so that only the meaning can give them away.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mla_convert.manifests.digest import digest_files
from mla_convert.manifests.identity import canonical_mla_id, checkpoint_identity
from mla_convert.manifests.models import MANIFEST_NAME
from mla_convert.manifests.verify import verify_folder
from tests.manifests.example import INDEX, SHARDS, build

Edit = Callable[[Any], object]
NORM = "model.norm.weight"


def edit_json(path: Path, edit: Edit) -> None:
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def sign_again(folder: Path) -> None:
    """Make hashes, checkpoint part and id of the manifest fit the folder as it is now."""
    files = digest_files(folder, exclude=frozenset({MANIFEST_NAME}))

    def edit(raw: Any) -> None:
        part = checkpoint_identity(
            files,
            source_checkpoint_digest=raw["source"]["checkpoint_digest"],
            dtypes=raw["identity"]["checkpoint"]["dtypes"],
        )
        raw["identity"]["checkpoint"] = part.model_dump(mode="json")
        raw["outputs"]["files"] = [file.model_dump(mode="json") for file in files]
        raw["outputs"]["total_bytes"] = sum(file.bytes for file in files)
        raw["canonical_mla_id"] = canonical_mla_id(raw["identity"])

    edit_json(folder / MANIFEST_NAME, edit)


def edit_shard(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / SHARDS[1])
    edit(tensors)
    save_file(tensors, folder / SHARDS[1])


def found_in(folder: Path) -> set[tuple[str, str]]:
    return {(problem.kind, problem.subject) for problem in verify_folder(folder).problems}


def add_code(folder: Path) -> None:
    (folder / "x").mkdir()
    (folder / "x" / "m.py").write_text("")


def flip_last_byte(folder: Path) -> None:
    content = bytearray((folder / SHARDS[0]).read_bytes())
    content[-1] ^= 1
    (folder / SHARDS[0]).write_bytes(bytes(content))


FILE_TAMPERINGS: dict[str, tuple[Callable[[Path], object], tuple[str, str]]] = {
    "one bit of a tensor": (flip_last_byte, ("changed", f"file:{SHARDS[0]}")),
    "a shard removed": (lambda f: (f / SHARDS[1]).unlink(), ("missing", f"file:{SHARDS[1]}")),
    "a shard cut short": (
        lambda f: (f / SHARDS[0]).write_bytes((f / SHARDS[0]).read_bytes()[:-4]),
        ("invalid", f"file:{SHARDS[0]}"),
    ),
    "an extra file": (
        lambda f: (f / "pytorch_model.bin").write_text(""),
        ("extra", "file:pytorch_model.bin"),
    ),
    "code slipped into a sub-folder": (add_code, ("extra", "file:x/m.py")),
    "a file that only looks like the receipts": (
        lambda f: (f / "receipts").write_text(""),
        ("extra", "file:receipts"),
    ),
    "a comment in config.json": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(note=1)),
        ("changed", "file:config.json"),
    ),
    "the tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), ("changed", "file:tokenizer.json")),
    "config.json removed": (lambda f: (f / "config.json").unlink(), ("missing", "file:config.json")),
}


@pytest.mark.parametrize("name", FILE_TAMPERINGS)
def test_a_changed_folder_is_named(tmp_path: Path, name: str) -> None:
    folder, _, _ = build(tmp_path)
    tamper, expected = FILE_TAMPERINGS[name]
    tamper(folder)
    assert expected in found_in(folder)


def set_config(**fields: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda config: config.update(fields))


def drop_config(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda config: config.pop(name))


def rope(**fields: object) -> Callable[[Path], None]:
    return set_config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **fields})


SIGNED_TAMPERINGS: dict[str, tuple[Callable[[Path], object], tuple[str, str]]] = {
    "model type": (set_config(model_type="deepseek_v2"), ("changed", "config.json:model_type")),
    "the fourth layer becomes MoE": (
        set_config(first_k_dense_replace=1),
        ("changed", "config.json:first_k_dense_replace"),
    ),
    "MoE by default": (
        drop_config("first_k_dense_replace"),
        ("changed", "config.json:first_k_dense_replace"),
    ),
    "key heads": (set_config(num_key_value_heads=1), ("changed", "config.json:num_key_value_heads")),
    "layer count": (set_config(num_hidden_layers=1), ("changed", "config.json:num_hidden_layers")),
    "norm epsilon": (set_config(rms_norm_eps=1e-5), ("changed", "config.json:rms_norm_eps")),
    "activation": (set_config(hidden_act="gelu"), ("changed", "config.json:hidden_act")),
    "tied head": (set_config(tie_word_embeddings=True), ("changed", "config.json:tie_word_embeddings")),
    "true as 1": (set_config(attention_bias=0), ("changed", "config.json:attention_bias")),
    "a sliding window": (set_config(sliding_window=8), ("changed", "config.json:sliding_window")),
    "a wrong head size": (set_config(head_dim=8), ("changed", "config.json:head_dim")),
    "half-split rows": (set_config(rope_interleave=False), ("changed", "config.json:rope_interleave")),
    "context length": (
        set_config(max_position_embeddings=128),
        ("changed", "config.json:max_position_embeddings"),
    ),
    "another loading dtype": (set_config(dtype="bfloat16"), ("changed", "config.json:dtype")),
    "rotary base": (rope(rope_theta=10001.0), ("changed", "config.json:rope_parameters.rope_theta")),
    "a rotary base below zero": (rope(rope_theta=-1.0), ("invalid", "config.json:rope_parameters")),
    "a second rotary base": (
        set_config(rope_theta=500000.0),
        ("changed", "config.json:rope_scaling (frequency of pair 1)"),
    ),
    "unknown rope": (rope(rope_type="yarn", factor=4.0), ("invalid", "config.json:rope_parameters")),
    "the other longrope list": (
        rope(rope_type="longrope", short_factor=[1.0, 1.0], long_factor=[1.0, 2.0]),
        ("invalid", "config.json:rope_parameters"),
    ),
    "scaled scores": (rope(mscale_all_dim=1.0), ("changed", "config.json:rope_parameters.mscale_all_dim")),
    "no rope at all": (drop_config("rope_parameters"), ("missing", "config.json:rope_parameters")),
    "config.json is cut short": (
        lambda f: (f / "config.json").write_text("{"),
        ("invalid", "config.json"),
    ),
    "config.json is a list": (
        lambda f: (f / "config.json").write_text("[]"),
        ("invalid", "config.json"),
    ),
    "a tensor transposed": (
        lambda f: edit_shard(f, lambda t: t.update({"lm_head.weight": np.zeros((12, 17), np.float32)})),
        ("changed", "tensor:lm_head.weight (shape)"),
    ),
    "a tensor in another dtype": (
        lambda f: edit_shard(f, lambda t: t.update({NORM: np.zeros(12, np.float16)})),
        ("changed", f"tensor:{NORM} (dtype)"),
    ),
    "a tensor left out": (lambda f: edit_shard(f, lambda t: t.pop(NORM)), ("missing", f"tensor:{NORM}")),
    "a bias that engines would skip": (
        lambda f: edit_shard(f, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": np.zeros(12, np.float32)})),
        ("extra", "tensor:model.layers.0.self_attn.o_proj.bias"),
    ),
    "one name in two shards": (
        lambda f: edit_shard(f, lambda t: t.update({"model.embed_tokens.weight": np.zeros((17, 12), np.float32)})),
        ("extra", "tensor:model.embed_tokens.weight"),
    ),
    "an index that names the wrong shard": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({NORM: SHARDS[0]})),
        ("changed", f"{INDEX}:{NORM}"),
    ),
    "an index that forgets a tensor": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].pop(NORM)),
        ("missing", f"{INDEX}:{NORM}"),
    ),
    "an index that invents a tensor": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update(ghost=SHARDS[0])),
        ("extra", f"{INDEX}:ghost"),
    ),
    "an index with a wrong size": (
        lambda f: edit_json(f / INDEX, lambda i: i["metadata"].update(total_size=1)),
        ("changed", f"{INDEX}:total_size"),
    ),
    "no index": (lambda f: (f / INDEX).unlink(), ("missing", f"file:{INDEX}")),
    "an index cut short": (lambda f: (f / INDEX).write_text("{"), ("invalid", f"file:{INDEX}")),
    "an index without a map": (lambda f: (f / INDEX).write_text("{}"), ("invalid", f"file:{INDEX}")),
    "a tokenizer that is not the source's": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        ("changed", "sidecar:tokenizer.json in outputs"),
    ),
}


@pytest.mark.parametrize("name", SIGNED_TAMPERINGS)
def test_a_changed_checkpoint_is_named_even_when_every_hash_fits(tmp_path: Path, name: str) -> None:
    folder, _, _ = build(tmp_path)
    tamper, expected = SIGNED_TAMPERINGS[name]
    tamper(folder)
    sign_again(folder)
    assert expected in found_in(folder)


def set_at(path: str, value: object) -> Edit:
    """An edit that sets the value at a dotted path; digits are list indices."""

    def edit(raw: Any) -> None:
        *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
        for step in steps:
            raw = raw[step]
        raw[last] = value

    return edit


ARCH = "identity.architecture"
MANIFEST_TAMPERINGS: list[tuple[str, object, str, str]] = [
    (f"{ARCH}.fused_orders.kv_b_per_head", ["value", "k_nope"], "changed", ""),
    (f"{ARCH}.fused_orders.q_per_head", ["q_rope", "q_nope"], "changed", ""),
    (f"{ARCH}.hidden_size", 13, "changed", "config.json:hidden_size"),
    (f"{ARCH}.profile", "full", "invalid", ""),
    (f"{ARCH}.attention_bias", True, "changed", ""),
    (f"{ARCH}.model_type", "mla", "invalid", ""),
    (f"{ARCH}.model_type", "mla", "changed", ""),
    (f"{ARCH}.model_type", "mla", "invalid", "config.json"),
    (f"{ARCH}.rms_norm_eps", 1e-5, "changed", ""),
    (f"{ARCH}.latent_norm.epsilon", 1e-5, "changed", ""),
    (f"{ARCH}.latent_norm.route", "constant", "changed", ""),
    (f"{ARCH}.latent_norm.route", "constant", "changed", f"{ARCH}.latent_norm.constant is given"),
    (f"{ARCH}.latent_norm.constant_row", 6, "invalid", ""),
    (f"{ARCH}.latent_norm.up_scale", [1.0], "changed", f"{ARCH}.latent_norm.up_scale (one per layer)"),
    ("identity.position.frequencies", [1.0], "changed", "identity.position.frequencies (how many)"),
    ("identity.position.frequencies", [1.0], "changed", "config.json:rope_parameters (pairs)"),
    (
        "identity.position.frequencies.1",
        0.02,
        "changed",
        "config.json:rope_parameters (frequency of pair 1)",
    ),
    ("identity.position.rope_type", "longrope", "changed", "config.json:rope_parameters.rope_type"),
    (
        "identity.position.attention_scaling",
        1.1,
        "changed",
        "config.json:rope_parameters (attention scaling)",
    ),
    ("identity.position.pairing_layout", "half-split", "changed", "config.json:rope_interleave"),
    ("identity.position.pairing_layout", "half-split", "changed", ""),
    ("identity.cache.latent_width", 7, "changed", ""),
    ("identity.cache.bytes_per_token_per_layer", 20, "changed", ""),
    ("identity.cache.row_layout", ["rotated_k_rope", "normalized_c_kv"], "changed", ""),
    ("identity.cache.schema_version", "v0", "changed", ""),
    ("identity.checkpoint.weights_digest", "sha256:" + "0" * 64, "changed", ""),
    ("identity.checkpoint.source_checkpoint_digest", "sha256:" + "0" * 64, "changed", ""),
    ("identity.checkpoint.dtypes", ["bfloat16", "float32"], "missing", ""),
    ("identity.semantic_visibility.window", 8, "changed", ""),
    ("identity.semantic_visibility.sinks", True, "changed", ""),
    ("source.checkpoint_digest", "sha256:" + "0" * 64, "changed", ""),
    ("source.config_digest", "sha256:" + "0" * 64, "changed", ""),
    ("source.tokenizer_digest", None, "changed", ""),
    ("source.files.2.sha256", "0" * 64, "changed", "sidecar:tokenizer.json in source"),
    ("method.profile", "hf", "changed", ""),
    ("method.latent_norm_route", "constant", "changed", ""),
    ("layers", [], "changed", "layers (indices)"),
    ("layers.1.index", 0, "changed", "layers (indices)"),
    ("layers.0.kv_lora_rank", 5, "changed", ""),
    ("layers.0.rope_slots.0.slot", 9, "invalid", "layers.0.rope_slots"),
    ("layers.0.rope_slots.0.slot", 1, "invalid", "layers.0.rope_slots"),
    ("layers.0.rope_slots.1.frequency", 0.5, "changed", "layers.0.rope_slots (slot 1)"),
    ("calibration.windows", 3, "changed", "calibration.windows"),
    ("calibration.long_windows", 1, "changed", "calibration.long_windows"),
    ("calibration.window_length", 8, "changed", "calibration.texts.0.tokens"),
    ("calibration.tokens", 16, "changed", "calibration.tokens"),
    ("reload_check.passed", False, "invalid", "reload_check"),
    ("reload_check.tolerance", 1e-9, "changed", "reload_check.passed"),
    ("reload_check.max_abs_logit", 8.0, "invalid", "reload_check.relative_error"),
    ("reload_check.calibration_loss.uniform", 2.0, "invalid", ""),
    ("prediction.predicted_kl", 0.1, "changed", "prediction.candidates (the plan)"),
    ("prediction.candidates.0.kv_lora_rank", 5, "changed", "prediction.candidates (the plan)"),
    ("measured.perplexity", 9.0, "invalid", "measured.ratio"),
    ("calibration", None, "missing", "calibration"),
    ("calibration.windows", 3, "changed", "refinement.windows"),
    ("refinement.window", 8, "changed", ""),
    ("refinement.seed", 1, "changed", ""),
    ("refinement.held_out_windows", [2], "invalid", ""),
    ("refinement.held_out_windows", [-1], "invalid", ""),
    ("refinement.held_out_windows", [0, 1], "invalid", ""),
    ("refinement.held_out_windows", [1, 0], "invalid", ""),
    ("refinement.windows", 3, "changed", ""),
    ("refinement.layers", [], "changed", "refinement.layers (how many)"),
    ("refinement.layers.0.after", 0.5, "invalid", ""),
    ("refinement.layers.0.kept_step", 7, "invalid", ""),
    ("refinement.layers.0.kept_step", 0, "changed", "refinement.layers.0.kept_step is 0"),
    ("refinement.layers.1.kept_step", 1, "changed", "refinement.layers.1.kept_step is 0"),
    ("refinement.kind", "block", "changed", "refinement.e2e_rate is given"),
    ("refinement.e2e_steps", None, "changed", "refinement.e2e_steps is given"),
    ("refinement.e2e_steps", 2, "invalid", "refinement.end_to_end.kept_step"),
    ("refinement.end_to_end", None, "changed", "refinement.end_to_end is given"),
    ("refinement.end_to_end.after", 0.3, "invalid", ""),
    ("split.train", ["a"], "changed", ""),
    ("outputs.total_bytes", 1, "changed", ""),
    ("outputs.sidecars.0.path", "vocab.json", "missing", "sidecar:vocab.json in outputs"),
    ("outputs.files.0.bytes", 1, "changed", "file:config.json"),
    ("outputs.files.0.path", "mla_manifest.json", "invalid", "file:mla_manifest.json"),
    ("outputs.files.0.path", "tokenizer.json", "invalid", "outputs.files (paths)"),
    ("outputs.files.0.path", "settings.json", "invalid", "outputs.files (checkpoint)"),
    ("canonical_mla_id", "sha256:" + "0" * 64, "changed", ""),
]


@pytest.mark.parametrize(("path", "value", "kind", "subject"), MANIFEST_TAMPERINGS, ids=lambda v: str(v)[:60])
def test_a_changed_manifest_is_named(tmp_path: Path, path: str, value: object, kind: str, subject: str) -> None:
    folder, _, _ = build(tmp_path)

    def edit(raw: Any) -> None:
        set_at(path, value)(raw)
        if path.startswith("identity."):
            raw["canonical_mla_id"] = canonical_mla_id(raw["identity"])

    edit_json(folder / MANIFEST_NAME, edit)
    found = found_in(folder)
    assert (kind, subject or path) in found
    assert ("changed", "canonical_mla_id") not in found or path == "canonical_mla_id"


def test_an_identity_that_was_not_signed_again_does_not_match_its_id(tmp_path: Path) -> None:
    folder, _, _ = build(tmp_path)
    edit_json(folder / MANIFEST_NAME, set_at("identity.kernel.permitted_modes", ["dense-expanded"]))
    assert found_in(folder) == {("changed", "canonical_mla_id")}
