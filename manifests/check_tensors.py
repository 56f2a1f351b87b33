"""Tensor names, shapes and dtypes in the shards' headers, and the shards' index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import leaves, read_text_inside
from mla_convert.manifests.expected import expected_tensors
from mla_convert.manifests.identity import SemanticIdentity
from mla_convert.manifests.models import ConversionManifest
from mla_convert.manifests.problems import VerifyProblem, expect, problem
from mla_convert.manifests.safetensors_header import TensorHeader, read_header

SINGLE_SHARD = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
Located = dict[str, tuple[str, TensorHeader]]
"""Tensor name -> (shard, header)."""


def check_tensors(manifest: ConversionManifest, folder: Path) -> Iterator[VerifyProblem]:
    """What the shards hold against what the identity's dimensions ask for."""
    shards = [file.path for file in manifest.outputs.files if file.path.endswith(".safetensors")]
    located: Located = {}
    for shard in shards:
        yield from _read_shard(folder, shard, located)
    yield from _compare_names(manifest.identity, located)
    yield from _compare_dtypes(manifest.identity.checkpoint.dtypes, located)
    yield from _check_index(folder, shards, located)


def _read_shard(folder: Path, shard: str, located: Located) -> Iterator[VerifyProblem]:
    path = folder / shard
    if leaves(folder, path) or not path.is_file():
        return  # check_outputs has named it
    try:
        header = read_header(path)
    except InputRefused as error:
        yield problem("invalid", f"file:{shard}", error.expected, f"{error.message}: {error.found}")
        return
    for name, tensor in header.items():
        if name in located:
            yield problem("extra", f"tensor:{name}", located[name][0], shard)
        else:
            located[name] = (shard, tensor)


def _compare_names(identity: SemanticIdentity, located: Located) -> Iterator[VerifyProblem]:
    try:
        expected = expected_tensors(identity.architecture)
    except InputRefused as error:
        yield problem("invalid", "identity.architecture.model_type", error.expected, error.found)
        return
    for name in sorted(located.keys() - expected.keys()):
        yield problem("extra", f"tensor:{name}", None, list(located[name][1].shape))
    for name, tensor in expected.items():
        if name in located:
            yield from expect(f"tensor:{name} (shape)", tensor.shape, located[name][1].shape)
        elif not tensor.optional:
            yield problem("missing", f"tensor:{name}", list(tensor.shape))


def _compare_dtypes(dtypes: tuple[str, ...], located: Located) -> Iterator[VerifyProblem]:
    for name, (_, tensor) in sorted(located.items()):
        if tensor.dtype not in dtypes:
            yield problem("changed", f"tensor:{name} (dtype)", ", ".join(dtypes), tensor.dtype)
    unused = set(dtypes) - {tensor.dtype for _, tensor in located.values()}
    if unused:
        yield problem("missing", "identity.checkpoint.dtypes", ", ".join(sorted(unused)), "no such tensor")


def _check_index(folder: Path, shards: list[str], located: Located) -> Iterator[VerifyProblem]:
    if not (folder / INDEX_NAME).exists():
        if shards != [SINGLE_SHARD]:
            yield problem("missing", f"file:{INDEX_NAME}", f"an index of {len(shards)} shards")
        return
    try:
        index = json.loads(read_text_inside(folder, INDEX_NAME))
    except (OSError, ValueError, RecursionError) as error:
        yield problem("invalid", f"file:{INDEX_NAME}", "a readable JSON object", str(error))
        return
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        yield problem("invalid", f"file:{INDEX_NAME}", "a weight_map", type(weight_map).__name__)
        return
    yield from _compare_index(weight_map, located)
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    stored = sum(tensor.bytes for _, tensor in located.values())
    yield from expect(f"{INDEX_NAME}:total_size", stored, total)


def _compare_index(weight_map: Mapping[str, object], located: Located) -> Iterator[VerifyProblem]:
    for name in sorted(weight_map.keys() - located.keys()):
        yield problem("extra", f"{INDEX_NAME}:{name}", None, weight_map[name])
    for name, (shard, _) in sorted(located.items()):
        if name not in weight_map:
            yield problem("missing", f"{INDEX_NAME}:{name}", shard)
        else:
            yield from expect(f"{INDEX_NAME}:{name}", shard, weight_map[name])
