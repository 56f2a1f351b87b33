from __future__ import annotations

import bz2
import hashlib
import json
from pathlib import Path

import pytest

from mla_convert.assets import wikipedia as module
from mla_convert.assets.wikipedia import Article, WikipediaSplits, read_articles, split_of, write_splits
from mla_convert.manifests.digest import sha256_file

NAMESPACE = "http://www.mediawiki.org/xml/export-0.10/"


def page(title: str, text: str, namespace: int = 0, redirect: bool = False) -> str:
    target = '<redirect title="Elsewhere" />' if redirect else ""
    return (
        f"<page><title>{title}</title><ns>{namespace}</ns><id>1</id>{target}"
        f'<revision><id>2</id><text xml:space="preserve">{text}</text></revision></page>'
    )


def write_dump(path: Path, *pages: str) -> Path:
    xml = f'<mediawiki xmlns="{NAMESPACE}" version="0.10">{"".join(pages)}</mediawiki>'
    path.write_bytes(bz2.compress(xml.encode()))
    return path


@pytest.fixture
def small_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forty articles in place of the download; returns their titles."""
    titles = [f"Title {number}" for number in range(40)]
    dump = write_dump(tmp_path / "dump.xml.bz2", *(page(title, f"Über {title}.") for title in titles))
    monkeypatch.setattr(module, "wikipedia_dump", lambda: dump)
    return titles


def test_only_articles_with_prose_are_read(tmp_path: Path) -> None:
    dump = write_dump(
        tmp_path / "dump.xml.bz2",
        page("Tom &amp; Jerry", "'''Tom''' &amp;amp; Jerry &lt;ref&gt;x&lt;/ref&gt;."),
        page("Old name", "#REDIRECT [[Tom]]", redirect=True),
        page("Wikipedia:Rules", "Rules.", namespace=4),
        page("Hollow", "{{stub}}"),
        page("Last", "End."),
    )

    assert list(read_articles(dump)) == [Article("Tom & Jerry", "Tom & Jerry."), Article("Last", "End.")]


@pytest.mark.parametrize(
    ("title", "first_byte", "split"),
    [("Autism", 0xAE, "heldout"), ("Alabama", 0x16, "calibration"), ("Albedo", 0x74, "calibration")],
)
def test_the_split_follows_from_the_digest_of_the_title(title: str, first_byte: int, split: str) -> None:
    assert hashlib.sha256(title.encode()).digest()[0] == first_byte
    assert split_of(title) == split


def test_splits_share_no_article_and_leave_none_out(tmp_path: Path, small_dump: list[str]) -> None:
    splits = write_splits(tmp_path / "text")

    calibration, heldout = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (splits.calibration, splits.heldout)
    )
    assert sorted(row["id"] for row in calibration + heldout) == sorted(small_dump)
    assert all(row["text"] == f"Über {row['id']}." for row in calibration + heldout)
    assert {split_of(row["id"]) for row in calibration} == {"calibration"}
    assert {split_of(row["id"]) for row in heldout} == {"heldout"}
    assert 10 <= len(calibration) <= 30


def test_facts_describe_the_files(tmp_path: Path, small_dump: list[str]) -> None:
    splits = write_splits(tmp_path / "text")

    rows = [json.loads(line) for line in splits.heldout.read_text(encoding="utf-8").splitlines()]
    assert splits.heldout_facts.articles == len(rows)
    assert splits.heldout_facts.characters == sum(len(row["text"]) for row in rows)
    assert splits.heldout_facts.sha256 == sha256_file(splits.heldout)
    assert splits.calibration_facts.sha256 == sha256_file(splits.calibration)


def test_the_files_are_the_same_every_time_and_written_once(
    tmp_path: Path, small_dump: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = write_splits(tmp_path / "a"), write_splits(tmp_path / "b")
    assert first.calibration_facts == second.calibration_facts
    assert first.heldout_facts == second.heldout_facts
    assert first.calibration.parent.name == second.calibration.parent.name

    monkeypatch.delattr(module, "wikipedia_dump")
    assert write_splits(tmp_path / "a") == first
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == [first.calibration.parent.name]


def test_the_real_text_is_half_a_hundred_articles_each(wikipedia: WikipediaSplits) -> None:
    assert (wikipedia.calibration_facts.articles, wikipedia.heldout_facts.articles) == (59, 47)
    assert wikipedia.calibration_facts.characters > 1_500_000
    assert wikipedia.heldout_facts.characters > 1_200_000
    text = wikipedia.calibration.read_text(encoding="utf-8") + wikipedia.heldout.read_text(encoding="utf-8")
    assert not [mark for mark in ("{{", "}}", "[[", "]]", "<ref", "'''", "&nbsp;", "http://") if mark in text]
