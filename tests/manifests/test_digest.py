from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import (
    CHUNK_BYTES,
    FileDigest,
    canonical_json,
    combined_digest,
    digest_files,
    digest_source,
    sha256_file,
    sha256_json,
    tokenizer_digest,
    tokenizer_files,
    weight_files,
)

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def record(path: str, digit: str = "0") -> FileDigest:
    return FileDigest(path=path, bytes=1, sha256=digit * 64)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_file_digest_is_that_of_its_bytes_at_every_chunk_border(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    path = tmp_path / "f"
    path.write_bytes(content)
    assert sha256_file(path) == hashlib.sha256(content).hexdigest()


def test_canonical_json_is_sorted_compact_and_ascii() -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": "é"}) == '{"a":"\\u00e9","b":[1,2.5,null]}'
    assert sha256_json({}) == "sha256:" + hashlib.sha256(b"{}").hexdigest()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_canonical_json_rejects_what_json_cannot_say(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": [value]})


@given(JSON_VALUES)
def test_canonical_json_round_trips_and_is_its_own_canonical_form(value: object) -> None:
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text
    assert json.loads(text) == value


@given(st.dictionaries(st.text(), JSON_VALUES, min_size=2), st.randoms())
def test_key_order_and_white_space_never_change_a_digest(value: dict[str, object], random: object) -> None:
    keys = list(value)
    random.shuffle(keys)  # type: ignore[attr-defined]
    spaced = json.dumps({key: value[key] for key in keys}, indent=3)
    assert sha256_json(json.loads(spaced)) == sha256_json(value)


@given(st.permutations([record("a"), record("a/b"), record("a-b"), record("B")]))
def test_combined_digest_ignores_the_order_of_its_files(files: list[FileDigest]) -> None:
    assert combined_digest(files) == combined_digest(sorted(files, key=lambda file: file.path))


@pytest.mark.parametrize("change", [{"path": "b"}, {"bytes": 2}, {"sha256": "1" * 64}], ids=["path", "bytes", "sha256"])
def test_combined_digest_sees_every_field(change: dict[str, object]) -> None:
    assert combined_digest([record("a").model_copy(update=change)]) != combined_digest([record("a")])


def test_combined_digest_is_pinned() -> None:
    # The rule is part of every manifest that was ever written.
    canonical = b'[{"bytes":1,"path":"a","sha256":"' + b"0" * 64 + b'"}]'
    assert combined_digest([record("a")]) == "sha256:" + hashlib.sha256(canonical).hexdigest()


def test_files_are_listed_sorted_by_posix_path_with_exclusions(tmp_path: Path) -> None:
    for name in ("b.txt", "sub/a.txt", "a.txt", "receipts/r.json", "receipts2.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    files = digest_files(tmp_path, exclude=frozenset({"b.txt", "receipts/"}))
    assert [file.path for file in files] == ["a.txt", "receipts2.json", "sub/a.txt"]
    assert files[2] == FileDigest(path="sub/a.txt", bytes=9, sha256=hashlib.sha256(b"sub/a.txt").hexdigest())


def test_a_link_inside_the_folder_counts_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to("a")
    assert [file.path for file in digest_files(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize("target", ["../outside", "nowhere", "..", "loop"])
def test_a_link_that_leaves_or_leads_nowhere_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "outside").write_text("x")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "loop").symlink_to(target)
    with pytest.raises(InputRefused, match="loop"):
        digest_files(folder)


@pytest.mark.parametrize("name", ["a\\b", "c:d"])
def test_a_name_that_is_no_portable_path_is_refused_with_the_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(InputRefused, match="Rename the file"):
        digest_files(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="no such folder"):
        digest_files(tmp_path / "none")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../b", "a//b", "./a", "", "a\\b", "C:x", "a\0"])
def test_a_file_record_cannot_point_outside_its_folder(path: str) -> None:
    with pytest.raises(ValueError, match="relative POSIX path"):
        record(path)


@pytest.mark.parametrize("sha256", ["0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n", "sha256:" + "0" * 64])
def test_a_file_record_takes_only_a_plain_sha256(sha256: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        FileDigest(path="a", bytes=1, sha256=sha256)


def test_a_source_is_its_own_files_without_hidden_ones_and_folders(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    for folder in (snapshot, blobs, snapshot / "original"):
        folder.mkdir()
    (blobs / "1").write_text("weights")
    (snapshot / "model.safetensors").symlink_to(blobs / "1")  # as the hub's cache does
    (snapshot / ".gitattributes").write_text("x")
    (snapshot / "original" / "big.pth").write_text("x")
    files = digest_source(snapshot)
    assert [file.path for file in files] == ["model.safetensors"]
    assert files[0].sha256 == hashlib.sha256(b"weights").hexdigest()


def test_a_single_file_is_a_source_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert [file.path for file in digest_source(tmp_path / "m.gguf")] == ["m.gguf"]


def test_a_source_that_is_not_there_or_has_a_dead_link_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="no such source"):
        digest_source(tmp_path / "none")
    (tmp_path / "dead").symlink_to("none")
    with pytest.raises(InputRefused, match="leads nowhere"):
        digest_source(tmp_path)


def test_weights_and_tokenizer_are_told_apart() -> None:
    files = [record(n) for n in ("a.safetensors", "m.gguf", "tokenizer.json", "x.safetensors.index.json")]
    assert [file.path for file in weight_files(files)] == ["a.safetensors", "m.gguf"]
    assert [file.path for file in tokenizer_files(files)] == ["tokenizer.json"]
    assert tokenizer_digest(files) == combined_digest([record("tokenizer.json")])
    assert tokenizer_digest(files[:2]) is None
