"""A source checkpoint read lazily: configuration, tensor inventory, one layer's weights at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN

from mla_convert.convert.families import Family, TensorRow, find_family, refuse_features, tensor_exists
from mla_convert.convert.source_location import SourceLocation, locate_source
from mla_convert.convert.source_rope import SourceRope, read_rope
from mla_convert.convert.tensor_files import TensorFiles, all_finite, open_tensor_files
from mla_convert.convert.weights import AttentionShape, LayerWeights
from mla_convert.errors import InputRefused

# Left by old exports; derived from the configuration, never loaded.
DERIVED_SUFFIX = "self_attn.rotary_emb.inv_freq"
TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class SourceCheckpoint:
    """A validated source. Nothing but headers has been read when one exists.

    Attributes:
        location: Where it is.
        config: Effective configuration.
        raw_config: `config.json` as written.
        family: Its row of the family table.
        shape: Attention sizes.
        rope: Rotary frequencies.
        files: Lazy tensors.
    """

    location: SourceLocation
    config: PretrainedConfig
    raw_config: dict[str, Any]
    family: Family
    shape: AttentionShape
    rope: SourceRope
    files: TensorFiles

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return bool(self.config.tie_word_embeddings)

    @property
    def has_bias(self) -> bool:
        """Whether attention projections carry biases."""
        fields = self.config.to_dict()
        return any(tensor_exists(row, self.family, fields) for row in self.family.layer_tensors if "bias" in row.name)

    @cached_property
    def attention_dtype(self) -> torch.dtype:
        """Stored dtype of the first layer's query projection."""
        return self.files.info(self.layer_name(0, "q_proj.weight")).dtype

    def layer_name(self, layer: int, part: str) -> str:
        """Full name of `self_attn.<part>` of a layer."""
        return f"model.layers.{layer}.self_attn.{part}"

    def tensor(self, name: str) -> Tensor:
        """One tensor as stored.

        Raises:
            InputRefused: If it holds NaN or infinity.
        """
        value = self.files.read(name)
        if not all_finite(value):
            raise InputRefused("a weight that is not finite", expected="finite values", found="NaN or inf", where=name)
        return value

    def layer_weights(self, layer: int) -> LayerWeights:
        """The attention of one layer in float64, heads on their own axis."""
        shape = self.shape

        def rows(part: str, heads: int) -> Tensor:
            value = self.tensor(self.layer_name(layer, f"{part}.weight")).double()
            return value.view(heads, -1, value.shape[-1])

        def bias(part: str, heads: int | None) -> Tensor | None:
            name = self.layer_name(layer, f"{part}.bias")
            if name not in self.files.names:
                return None
            value = self.tensor(name).double()
            return value if heads is None else value.unflatten(0, (heads, -1))

        output = self.tensor(self.layer_name(layer, "o_proj.weight")).double()  # (D, H·d)
        return LayerWeights(
            shape=shape,
            q=rows("q_proj", shape.num_heads),
            k=rows("k_proj", shape.num_kv_heads),
            v=rows("v_proj", shape.num_kv_heads),
            o=output.unflatten(1, (shape.num_heads, -1)).transpose(0, 1).contiguous(),
            q_bias=bias("q_proj", shape.num_heads),
            k_bias=bias("k_proj", shape.num_kv_heads),
            v_bias=bias("v_proj", shape.num_kv_heads),
            o_bias=bias("o_proj", None),
            softmax_scale=shape.head_dim**-0.5,
        )


def open_source(given: str, revision: str | None = None) -> SourceCheckpoint:
    """Open and validate a source from its headers alone.

    Args:
        given: Folder, GGUF file or Hub id.
        revision: Revision of a Hub id.

    Raises:
        InputRefused: For an unknown family, a feature that is not carried, or a missing, extra or
            wrongly shaped tensor, naming it.
    """
    location = locate_source(given, revision)
    where = str(location.folder)
    raw_config = _read_json(location.folder / "config.json")
    family = find_family(raw_config, where)
    config = _load_config(location.folder)
    fields = {**raw_config, **config.to_dict()}
    refuse_features(family, fields, where)
    _check_values(config, where)
    shape = _attention_shape(config, where)
    rope = read_rope(config, shape.head_dim, where)
    files = open_tensor_files(location.folder)
    checkpoint = SourceCheckpoint(location, config, raw_config, family, shape, rope, files)
    _check_inventory(checkpoint, fields)
    return checkpoint


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputRefused(f"unreadable JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise InputRefused("not a JSON object", where=str(path))
    return value


def _load_config(folder: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return config
    except (ValueError, TypeError, KeyError, OSError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputRefused(
            f"transformers refuses the configuration: {reason}", where=f"{folder}/config.json"
        ) from error


_POSITIVE = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)


def _check_values(config: PretrainedConfig, where: str) -> None:
    for name in _POSITIVE:
        value = getattr(config, name)
        if not value > 0:
            raise InputRefused("a size that is not positive", expected=f"{name} > 0", found=f"{value}", where=where)
    if config.hidden_act not in ACT2FN:
        raise InputRefused(
            "an activation that transformers does not know", found=f"hidden_act={config.hidden_act!r}", where=where
        )


def _attention_shape(config: PretrainedConfig, where: str) -> AttentionShape:
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if kv_heads < 1 or heads % kv_heads:
        raise InputRefused(
            "query heads are not a multiple of key/value heads",
            expected=f"num_key_value_heads dividing {heads}",
            found=str(kv_heads),
            where=f"{where}/config.json",
        )
    if head_dim % 2:
        raise InputRefused("an odd head size has no rotary pairs", found=str(head_dim), where=f"{where}/config.json")
    return AttentionShape(int(config.hidden_size), heads, kv_heads, int(head_dim))


def symbol_sizes(config: PretrainedConfig, shape: AttentionShape) -> dict[str, int]:
    """The sizes that `TensorRow.shape` names."""
    return {
        "hidden": shape.hidden_size,
        "query": shape.num_heads * shape.head_dim,
        "key_value": shape.num_kv_heads * shape.head_dim,
        "intermediate": int(config.intermediate_size),
        "vocabulary": int(config.vocab_size),
    }


def _check_inventory(checkpoint: SourceCheckpoint, fields: dict[str, Any]) -> None:
    family, files, where = checkpoint.family, checkpoint.files, str(checkpoint.location.folder)
    sizes = symbol_sizes(checkpoint.config, checkpoint.shape)
    expected = {row.name: row for row in family.model_tensors if tensor_exists(row, family, fields)}
    for layer in range(checkpoint.num_layers):
        for row in family.layer_tensors:
            if tensor_exists(row, family, fields):
                expected[row.name.format(layer=layer)] = row
    for name, row in expected.items():
        _check_tensor(checkpoint, name, row, sizes)
    extra = sorted(name for name in files.names - expected.keys() if not name.endswith(DERIVED_SUFFIX))
    if checkpoint.tied and TIED_HEAD in extra:
        _check_tied_head(checkpoint)
        extra.remove(TIED_HEAD)
    if extra:
        raise InputRefused(
            f"{len(extra)} tensor(s) that a {family.name} checkpoint does not have",
            expected="no tensor beyond the family's",
            found=", ".join(extra[:4]) + (", …" if len(extra) > 4 else ""),
            where=where,
        )


def _check_tensor(checkpoint: SourceCheckpoint, name: str, row: TensorRow, sizes: dict[str, int]) -> None:
    expected = tuple(sizes[symbol] for symbol in row.shape)
    if name not in checkpoint.files.names:
        raise InputRefused(
            "a tensor is missing", expected=f"{name} of shape {expected}", where=str(checkpoint.location.folder)
        )
    info = checkpoint.files.info(name)
    if info.shape != expected:
        raise InputRefused(
            "a tensor of the wrong shape",
            expected=f"{expected} ({' × '.join(row.shape)})",
            found=str(info.shape),
            where=name,
            remedy="config.json and the weights must be of one model.",
        )
    if info.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise InputRefused("a weight that is not floating point", found=str(info.dtype), where=name)


def _check_tied_head(checkpoint: SourceCheckpoint) -> None:
    """A tied checkpoint may repeat its head; it must then be the embedding."""
    if not torch.equal(checkpoint.files.read(TIED_HEAD), checkpoint.files.read(EMBEDDING)):
        raise InputRefused(
            "tie_word_embeddings is set but the stored head is not the embedding",
            expected=f"{TIED_HEAD} equal to {EMBEDDING}, or tie_word_embeddings false",
            where=str(checkpoint.location.folder),
        )
