"""The two domains that come with every Python: its language reference and the code of its library."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mla_convert.assets import pydoc_topics, stdlib_code
from mla_convert.assets.pydoc_topics import distinct_documents, write_topic_splits
from mla_convert.assets.splits import split_of, write_document_splits
from mla_convert.assets.stdlib_code import MODULES, read_modules, write_code_splits
from mla_convert.convert.calibration_text import Document, read_corpus
from mla_convert.errors import EnvironmentFault
from mla_convert.manifests.digest import sha256_file

LONG = "A paragraph that is long enough to be told apart from all others."


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_documents_are_split_by_their_names_and_sorted(tmp_path: Path) -> None:
    documents = [Document(f"n{number}", f"Über {number}\u2028.") for number in reversed(range(40))]

    splits = write_document_splits(tmp_path, "kind", documents)

    for split, path, facts in (
        ("calibration", splits.calibration, splits.calibration_facts),
        ("heldout", splits.heldout, splits.heldout_facts),
    ):
        expected = sorted(document.name for document in documents if split_of(document.name) == split)
        assert [document.name for document in read_corpus(str(path)).documents] == expected
        assert (facts.documents, facts.sha256) == (len(expected), sha256_file(path))
        assert facts.characters == sum(len(document.text) for document in read_corpus(str(path)).documents)
    assert splits.calibration_facts.documents + splits.heldout_facts.documents == 40
    assert 10 <= splits.calibration_facts.documents <= 30


def test_files_are_written_once_and_other_texts_go_elsewhere(tmp_path: Path) -> None:
    first = write_document_splits(tmp_path, "kind", [Document("a", "one"), Document("b", "two")])
    written = first.calibration.stat().st_mtime_ns

    assert write_document_splits(tmp_path, "kind", [Document("b", "two"), Document("a", "one")]) == first
    assert first.calibration.stat().st_mtime_ns == written
    other = write_document_splits(tmp_path, "kind", [Document("a", "one"), Document("b", "three")])
    assert other.name != first.name
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([first.name, other.name])


def test_a_paragraph_of_two_topics_is_kept_once() -> None:
    topics = {"b": f"Second\n\n  {LONG}\n\nshort\n", "a": f"First\n\n{LONG}\n\nshort\n", "c": LONG}

    found = list(distinct_documents(topics))

    assert [document.name for document in found] == ["a"]
    assert found[0].text == f"First\n\n{LONG}\n\nshort\n"
    longer = {**topics, "b": f"{topics['b']}\n{LONG} And more."}
    assert [document.text for document in distinct_documents(longer)][1] == f"Second\n\nshort\n\n{LONG} And more.\n"


def test_the_language_reference_shares_no_paragraph_between_the_splits(tmp_path: Path) -> None:
    splits = write_topic_splits(tmp_path)

    calibration, heldout = (
        {" ".join(part.split()) for row in rows(path) for part in row["text"].split("\n\n")}
        for path in (splits.calibration, splits.heldout)
    )
    assert not [part for part in calibration & heldout if len(part) >= pydoc_topics.SHARED_PARAGRAPH_CHARACTERS]
    # 16,384 tokens are 70,000 characters of it or less.
    assert splits.calibration_facts.characters > 100_000
    assert splits.heldout_facts.characters > 100_000
    assert f"python{sys.version_info.major}.{sys.version_info.minor}" in splits.name


def test_every_listed_module_is_there(tmp_path: Path) -> None:
    splits = write_code_splits(tmp_path)

    names = [row["id"] for path in (splits.calibration, splits.heldout) for row in rows(path)]
    assert sorted(names) == sorted(f"{module}.py" for module in MODULES)
    assert splits.calibration_facts.characters > 1_000_000
    assert splits.heldout_facts.characters > 1_000_000


def test_a_python_without_these_texts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault, match="without the sources") as caught:
        read_modules(tmp_path)
    assert str(caught.value.where) == str(tmp_path / f"{stdlib_code.MODULES[0]}.py")

    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(EnvironmentFault, match="without the texts"):
        pydoc_topics.read_topics()
