from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import FileDigest, combined_digest
from mla_convert.manifests.identity import (
    IDENTITY_PARTS,
    CacheIdentity,
    KernelIdentity,
    SemanticIdentity,
    canonical_mla_id,
    checkpoint_identity,
)
from tests.manifests.example import architecture, build

Json = dict[str, object]


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> SemanticIdentity:
    return build(tmp_path_factory.mktemp("identity"))[2].identity


def paths(value: object, prefix: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every leaf below `value`."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*prefix, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from paths(item, (*prefix, index))
    else:
        yield prefix


def changed(value: object) -> object:
    """Another value of the same JSON type, or a string for null."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return "x" if value is None else [*value, "x"]  # type: ignore[misc]


def replaced(root: Json, path: tuple[str | int, ...]) -> Json:
    """A copy of `root` in which the leaf at `path` has another value."""
    copy = deepcopy(root)
    node: object = copy
    for step in path[:-1]:
        node = node[step]  # type: ignore[index]
    node[path[-1]] = changed(node[path[-1]])  # type: ignore[index]
    return copy


def test_the_id_is_the_seeds_formula(identity: SemanticIdentity) -> None:
    semantic = identity.model_dump(mode="json")
    payload = json.dumps(semantic, sort_keys=True, separators=(",", ":"))
    assert canonical_mla_id(identity) == "sha256:" + hashlib.sha256(payload.encode()).hexdigest()


def test_the_seven_parts_are_the_identity(identity: SemanticIdentity) -> None:
    assert tuple(SemanticIdentity.model_fields) == IDENTITY_PARTS
    raw = identity.model_dump(mode="json")
    assert canonical_mla_id({**raw, "receipts": 1}) == canonical_mla_id(identity)
    with pytest.raises(KeyError, match="cache"):
        canonical_mla_id({name: part for name, part in raw.items() if name != "cache"})


def test_changing_any_one_leaf_changes_the_id(identity: SemanticIdentity) -> None:
    raw = identity.model_dump(mode="json")
    leaves = list(paths(raw))
    ids = {canonical_mla_id(replaced(raw, path)) for path in leaves}
    assert len(leaves) > 60
    assert len(ids | {canonical_mla_id(raw)}) == len(leaves) + 1


def test_removing_any_one_field_is_refused(identity: SemanticIdentity) -> None:
    raw = identity.model_dump(mode="json")
    for path in paths(raw):
        if not isinstance(path[-1], str):
            continue
        copy = deepcopy(raw)
        node: object = copy
        for step in path[:-1]:
            node = node[step]  # type: ignore[index]
        del node[path[-1]]  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="Field required"):
            SemanticIdentity.model_validate_json(json.dumps(copy))


@given(random=st.randoms(use_true_random=False), indent=st.sampled_from([None, 0, 1, 4]))
def test_key_order_and_white_space_never_change_the_id(
    identity: SemanticIdentity, random: object, indent: int | None
) -> None:
    def shuffled(value: object) -> object:
        if isinstance(value, dict):
            keys = list(value)
            random.shuffle(keys)  # type: ignore[attr-defined]
            return {key: shuffled(value[key]) for key in keys}
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(shuffled(identity.model_dump(mode="json")), indent=indent)
    assert canonical_mla_id(SemanticIdentity.model_validate_json(text)) == canonical_mla_id(identity)


@pytest.mark.parametrize("theta", ["1e4", "10000", "10000.0", "1E+4"])
def test_the_spelling_of_a_number_does_not_change_the_id(identity: SemanticIdentity, theta: str) -> None:
    text = json.dumps(identity.model_dump(mode="json"))
    spelled = text.replace('"rope_theta": 10000.0', f'"rope_theta": {theta}')
    assert canonical_mla_id(SemanticIdentity.model_validate_json(spelled)) == canonical_mla_id(identity)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"attention_bias": false', '"attention_bias": 0'),
        ('"hidden_size": 12', '"hidden_size": "12"'),
        ('"hidden_size": 12', '"hidden_size": 12.0'),
        ('"hidden_size": 12', '"hidden_size": 0'),
        ('"qk_rope_head_dim": 4', '"qk_rope_head_dim": 5'),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 1000000000000'),
        ('"rope_theta": 10000.0', '"rope_theta": NaN'),
        ('"rope_theta": 10000.0', '"rope_theta": Infinity'),
        ('"interleaved"', '"neox"'),
        ('"placement": {', '"placement": {"rank": 0, '),
    ],
)
def test_wrong_types_values_and_unknown_fields_are_refused(identity: SemanticIdentity, old: str, new: str) -> None:
    text = json.dumps(identity.model_dump(mode="json"))
    assert old in text
    with pytest.raises(ValueError, match="validation error"):
        SemanticIdentity.model_validate_json(text.replace(old, new))


def test_a_set_has_one_spelling() -> None:
    with pytest.raises(ValueError, match="sorted"):
        KernelIdentity(permitted_modes=("dense-expanded", "dense-absorbed"))
    with pytest.raises(ValueError, match="sorted"):
        KernelIdentity(permitted_modes=("dense-absorbed", "dense-absorbed"))


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_the_cached_row_follows_from_the_architecture(dtype: str, size: int) -> None:
    deepseek = architecture(kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=61)
    row = CacheIdentity.of(deepseek, dtype)  # type: ignore[arg-type]
    assert (row.latent_width, row.rope_width, row.layers) == (512, 64, 61)
    assert row.bytes_per_token_per_layer == 576 * size
    assert row.row_layout == ("normalized_c_kv", "rotated_k_rope")


def test_the_checkpoint_part_comes_from_the_files(tmp_path: Path) -> None:
    def file(path: str, digit: str) -> FileDigest:
        return FileDigest(path=path, bytes=1, sha256=digit * 64)

    files = [file("config.json", "a"), file("model.safetensors", "b"), file("tokenizer.json", "c")]
    source = "sha256:" + "d" * 64
    part = checkpoint_identity(files, source_checkpoint_digest=source, dtypes=["f", "b", "f"])
    assert part.config_digest == "sha256:" + "a" * 64
    assert part.weights_digest == combined_digest(files[1:2])
    assert part.tokenizer_digest == combined_digest(files[2:])
    assert part.dtypes == ("b", "f")
    for missing in (0, 1):
        with pytest.raises(InputRefused, match="no checkpoint"):
            checkpoint_identity(files[:missing] + files[missing + 1 :], source_checkpoint_digest=source, dtypes=[])
