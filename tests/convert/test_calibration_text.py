from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from mla_convert.convert.calibration_mix import sample_windows
from mla_convert.convert.calibration_text import Corpus, Document, read_corpus
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import EnvironmentFault, InputRefused
from tests.conftest import PicoFactory


@pytest.fixture(scope="module")
def tokenizer(pico: PicoFactory) -> Any:
    return load_tokenizer(pico())


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def corpus_of(*texts: str) -> Corpus:
    return Corpus("given", "jsonl", tuple(Document(f"d{i}", text) for i, text in enumerate(texts)), "digest")


def test_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("Grüße\n", encoding="utf-8")

    corpus = read_corpus(str(path))

    assert (corpus.name, corpus.kind, corpus.characters) == (str(path), "text-file", 6)
    assert corpus.documents == (Document("a.txt", "Grüße\n"),)
    assert corpus.documents[0].sha256 == hashlib.sha256("Grüße\n".encode()).hexdigest()


def test_jsonl_rows_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "id": "first"}\n\n{"text": "two\\u2028three"}\n', encoding="utf-8")

    corpus = read_corpus(str(path))

    assert corpus.kind == "jsonl"
    assert corpus.documents == (Document("first", "one"), Document("a.jsonl:3", "two\u2028three"))


def test_another_field(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"content": "one", "text": "no"})

    assert read_corpus(str(path), "content").documents[0].text == "one"


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "sub" / "b.jsonl", {"text": "b1"}, {"text": "b2"})
    for name in ("z.md", "a.txt", "sub/c.rst", "image.png", "empty.txt"):
        (tmp_path / name).write_text("" if "empty" in name else name)

    corpus = read_corpus(str(tmp_path))

    assert corpus.kind == "folder"
    expected = ["a.txt", "sub/b.jsonl:1", "sub/b.jsonl:2", "sub/c.rst", "z.md"]
    assert [document.name for document in corpus.documents] == expected


def test_a_pattern_takes_files_of_any_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    for name in ("src/b.py", "src/deep/a.py", "src/notes.txt"):
        (tmp_path / name).write_text(name)

    corpus = read_corpus(f"{tmp_path}/src/**/*.py")

    assert corpus.kind == "files"
    assert [document.name for document in corpus.documents] == ["b.py", "deep/a.py"]
    monkeypatch.chdir(tmp_path)
    assert [document.name for document in read_corpus("src/*.*").documents] == ["b.py", "notes.txt"]
    with pytest.raises(InputRefused, match="no text in it"):
        read_corpus("src/*.rs")


def test_the_digest_is_of_names_and_texts_in_order(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", {"text": "x", "id": "1"}, {"text": "y", "id": "2"})
    digests = {read_corpus(str(first)).sha256}
    for number, rows in enumerate(
        (
            [{"text": "x", "id": "1"}, {"text": "z", "id": "2"}],
            [{"text": "x", "id": "1"}, {"text": "y", "id": "3"}],
            [{"text": "y", "id": "2"}, {"text": "x", "id": "1"}],
        )
    ):
        digests.add(read_corpus(str(write_jsonl(tmp_path / f"{number}.jsonl", *rows))).sha256)
    assert len(digests) == 4

    same = tmp_path / "elsewhere"
    same.mkdir()
    again = write_jsonl(same / "other.jsonl", {"text": "x", "id": "1"}, {"text": "y", "id": "2"})
    assert read_corpus(str(again)).sha256 in digests


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("not json\n", "not JSON"),
        ('{"text": 3}\n', "without text"),
        ('{"other": "x"}\n', "without text"),
        ("[1]\n", "without text"),
        ('{"text": "  "}\n', "no text in it"),
        ("", "no text in it"),
    ],
)
def test_bad_jsonl_is_refused_with_its_line(tmp_path: Path, content: str, match: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)

    with pytest.raises(InputRefused, match=match) as caught:
        read_corpus(str(path))
    assert str(path) in str(caught.value.where)


def test_what_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(InputRefused, match="UTF-8"):
        read_corpus(str(path))


def test_what_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="no such text"):
        read_corpus(str(tmp_path / "absent"))
    with pytest.raises(InputRefused, match="no text in it"):
        read_corpus(str(tmp_path))


def test_a_dataset_is_read_by_its_id_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(identifier: str, split: str) -> Any:
        asked.append((identifier, split))
        return datasets.Dataset.from_dict({"body": ["one", "", "two"], "n": [1, 2, 3]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    corpus = read_corpus("datasets:acme/texts::validation", "body")
    read_corpus("datasets:acme/texts", "body")

    assert asked == [("acme/texts", "validation"), ("acme/texts", "train")]
    assert corpus.kind == "datasets"
    assert [(d.name, d.text) for d in corpus.documents] == [("acme/texts:0", "one"), ("acme/texts:2", "two")]
    with pytest.raises(InputRefused, match="without that text field") as caught:
        read_corpus("datasets:acme/texts", "text")
    assert caught.value.found == "body, n"


def test_a_dataset_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(identifier: str, split: str) -> Any:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    with pytest.raises(EnvironmentFault, match="offline"):
        read_corpus("datasets:acme/texts")


def test_windows_are_whole_and_of_as_many_documents_as_there_are_windows(tokenizer: Any) -> None:
    corpus = corpus_of(*("abc" * 53 for _ in range(12)))  # with the opening token ten slices of 16

    windows = sample_windows((corpus,), tokenizer, tokens=100, length=16, seed=0)

    assert windows.ids.shape == (6, 16)
    assert windows.ids.dtype == torch.int64
    assert windows.tokens == 96
    assert len(windows.documents) == 6
    assert set(windows.documents) <= set(corpus.documents)


def test_no_slice_is_used_twice(tokenizer: Any) -> None:
    """Every character of every document once: asked for more than there is, the windows hold each slice once."""
    texts = [chr(ord("a") + number) * 31 for number in range(5)]

    windows = sample_windows((corpus_of(*texts),), tokenizer, tokens=10_000, length=16, seed=3)

    counts = torch.bincount(windows.ids.flatten(), minlength=97)
    assert windows.ids.shape == (10, 16)
    # 31 characters and the opening token are two slices.
    assert counts[counts > 0].tolist() == [5, *[31] * 5]


def test_the_seed_decides(tokenizer: Any) -> None:
    corpus = corpus_of(*("".join(chr(97 + (i * j) % 26) for j in range(90)) for i in range(1, 9)))

    drawn = [sample_windows((corpus,), tokenizer, tokens=128, length=32, seed=seed).ids for seed in (0, 0, 1)]

    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_several_corpora_are_mixed(tokenizer: Any) -> None:
    first, second = (corpus_of(*(letter * 40 for _ in range(8))) for letter in "ab")

    ids = sample_windows((first, second), tokenizer, tokens=160, length=16, seed=0).ids

    letters = {tokenizer.decode([token]) for token in ids.flatten().tolist()}
    assert {"a", "b"} <= letters


def test_text_shorter_than_a_window_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputRefused, match="shorter than one window") as caught:
        sample_windows((corpus_of("abc"),), tokenizer, tokens=64, length=64, seed=0)

    assert (caught.value.expected, caught.value.found) == ("at least 64 tokens", "4 tokens")


@pytest.mark.parametrize("text", ['{"text": "\\ud800 abc"}', "[" * 100_000])
def test_a_row_that_is_no_text_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text + "\n")

    with pytest.raises(InputRefused, match=r"not Unicode|not JSON"):
        read_corpus(str(tmp_path / "rows.jsonl"))


def test_names_that_the_manifest_could_not_hold_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "\\ud800", "text": "some text"}\n', encoding="utf-8")
    with pytest.raises(InputRefused, match="name that is not Unicode"):
        read_corpus(str(path))

    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / os.fsdecode(b"\xff.txt")).write_text("some text", encoding="utf-8")
    with pytest.raises(InputRefused, match="name that is not Unicode"):
        read_corpus(str(folder))


@pytest.mark.parametrize("pattern", ["d?/*.md", "d[1]/*.md", "d*/x.md"])
def test_every_kind_of_pattern_names_its_files(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "d1").mkdir()
    (tmp_path / "d1" / "x.md").write_text("some text", encoding="utf-8")

    assert [document.name for document in read_corpus(str(tmp_path / pattern)).documents] == ["d1/x.md"]


def test_a_folder_named_like_a_text_is_walked_into(tmp_path: Path) -> None:
    (tmp_path / "n.md").mkdir()
    (tmp_path / "n.md" / "x.md").write_text("some text", encoding="utf-8")

    assert [document.name for document in read_corpus(str(tmp_path)).documents] == ["n.md/x.md"]


def test_a_number_too_long_for_python_is_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x", "n": ' + "9" * 5000 + "}\n", encoding="utf-8")
    with pytest.raises(InputRefused, match="not JSON"):
        read_corpus(str(path))
