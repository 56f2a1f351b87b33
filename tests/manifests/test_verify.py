"""Verification of sound folders, and of folders that are hardly folders at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mla_convert.manifests.digest import combined_digest, digest_source
from mla_convert.manifests.identity import canonical_mla_id
from mla_convert.manifests.models import ConversionManifest
from mla_convert.manifests.verify import VerifyReport, verify_folder
from tests.manifests.example import INDEX, SHARDS, build

Built = tuple[Path, Path, ConversionManifest]


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path)


def subjects(report: VerifyReport) -> list[tuple[str, str]]:
    return [(found.kind, found.subject) for found in report.problems]


def test_a_sound_folder_has_no_problems(built: Built) -> None:
    folder, source, _ = built
    assert verify_folder(folder, source) == VerifyReport(ok=True, problems=())


def test_later_receipts_and_the_report_are_no_extras(built: Built) -> None:
    folder, _, _ = built
    (folder / "receipts").mkdir()
    (folder / "receipts" / "eval.json").write_text("{}")
    (folder / "report.html").write_text("<html>")
    assert verify_folder(folder).ok


def test_every_problem_is_named_in_one_pass(built: Built) -> None:
    folder, source, _ = built
    (folder / "extra.bin").write_bytes(b"x")
    (folder / SHARDS[0]).unlink()
    with (folder / "tokenizer.json").open("a") as stream:
        stream.write(" ")
    (source / "note.txt").write_text("x")
    found = subjects(verify_folder(folder, source))
    assert ("extra", "file:extra.bin") in found
    assert ("missing", f"file:{SHARDS[0]}") in found
    assert ("changed", "file:tokenizer.json") in found
    assert ("missing", "tensor:model.embed_tokens.weight") in found
    assert ("extra", f"{INDEX}:model.embed_tokens.weight") in found
    assert ("extra", "source:note.txt") in found


@pytest.mark.parametrize("content", [None, b"", b"[]", b"\xff", b"{}", b"[" * 100_000, b'{"schema_version": "x"}'])
def test_a_folder_without_a_valid_manifest_is_a_problem_and_no_traceback(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "mla_manifest.json").write_bytes(content)
    report = verify_folder(tmp_path)
    kind = "missing" if content is None else "invalid"
    assert subjects(report) == [(kind, "file:mla_manifest.json")]
    assert not report.ok


def test_each_fault_of_an_invalid_manifest_is_its_own_problem(built: Built) -> None:
    folder, _, _ = built
    path = folder / "mla_manifest.json"
    raw = json.loads(path.read_text())
    raw["method"]["seed"] = "0"
    raw["note"] = 1
    del raw["split"]
    path.write_text(json.dumps(raw))
    found = [problem.found for problem in verify_folder(folder).problems]
    assert sorted(text.split(":")[0] for text in found if text) == ["method.seed", "note", "split"]


def test_no_folder_at_all(tmp_path: Path) -> None:
    assert subjects(verify_folder(tmp_path / "none")) == [("missing", "file:mla_manifest.json")]


def test_a_manifest_cannot_make_the_verifier_read_outside_the_folder(built: Built, tmp_path: Path) -> None:
    folder, _, _ = built
    (tmp_path / "secret").write_text("x")
    path = folder / "mla_manifest.json"
    raw = json.loads(path.read_text())
    raw["outputs"]["files"][0]["path"] = "../secret"
    path.write_text(json.dumps(raw))
    report = verify_folder(folder)
    assert subjects(report) == [("invalid", "file:mla_manifest.json")]
    assert "not a relative POSIX path" in (report.problems[0].found or "")


@pytest.mark.parametrize("name", ["config.json", SHARDS[0], INDEX, "tokenizer.json"])
def test_a_file_replaced_by_a_link_to_outside_is_refused_even_with_the_same_bytes(
    built: Built, tmp_path: Path, name: str
) -> None:
    folder, _, _ = built
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    assert ("invalid", f"file:{name}") in subjects(verify_folder(folder))


def test_a_pipe_in_place_of_a_file_is_named_and_not_waited_for(built: Built) -> None:
    folder, _, _ = built
    for name in (SHARDS[0], "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    found = subjects(verify_folder(folder))
    assert ("invalid", f"file:{SHARDS[0]}") in found
    assert ("invalid", "file:config.json") in found


def test_a_file_name_that_is_no_text_is_still_named(built: Built) -> None:
    folder, _, _ = built
    with open(os.fsencode(folder) + b"/bad\xff", "wb"):
        pass
    assert subjects(verify_folder(folder)) == [("extra", "file:bad\\udcff")]


def test_the_source_is_hashed_again(built: Built) -> None:
    folder, source, _ = built
    (source / "config.json").write_text('{"model_type": "qwen2"}')
    (source / "tokenizer.json").unlink()
    (source / "new.json").write_text("{}")
    assert sorted(subjects(verify_folder(folder, source))) == [
        ("changed", "source:config.json"),
        ("extra", "source:new.json"),
        ("missing", "source:tokenizer.json"),
    ]
    assert subjects(verify_folder(folder, source / "none")) == [("invalid", "source")]


def test_a_problem_reads_as_one_line(built: Built) -> None:
    folder, _, manifest = built
    (folder / "tokenizer.json").write_text("{}")
    record = next(file for file in manifest.outputs.files if file.path == "tokenizer.json")
    (found,) = verify_folder(folder).problems
    assert found.render().startswith(
        f"changed file:tokenizer.json: expected {record.bytes} bytes, sha256:{record.sha256}, found 2 bytes"
    )


def test_the_digests_of_a_gguf_source_are_of_what_was_read_out_of_it(built: Built, tmp_path: Path) -> None:
    folder, _, manifest = built
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF")
    files = digest_source(source)
    digest = combined_digest(files)
    checkpoint = manifest.identity.checkpoint.model_copy(update={"source_checkpoint_digest": digest})
    identity = manifest.identity.model_copy(update={"checkpoint": checkpoint})
    record = {"kind": "gguf", "files": files, "checkpoint_digest": digest}
    manifest.model_copy(
        update={
            "identity": identity,
            "canonical_mla_id": canonical_mla_id(identity),
            "source": manifest.source.model_copy(update=record),
            "outputs": manifest.outputs.model_copy(update={"sidecars": ()}),
        }
    ).write(folder)
    assert verify_folder(folder, source).problems == ()


def test_a_file_that_cannot_be_read_is_a_problem(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, _ = built

    def refuse(path: Path) -> str:
        raise PermissionError(f"denied: {path.name}")

    monkeypatch.setattr("mla_convert.manifests.digest.sha256_file", refuse)
    report = verify_folder(folder)
    assert ("invalid", "file:tokenizer.json") in subjects(report)
    assert not report.ok
