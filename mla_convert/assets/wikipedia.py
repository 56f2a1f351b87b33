"""English Wikipedia articles of 2016 as calibration and held-out text, from gensim's test data."""

from __future__ import annotations

import bz2
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from mla_convert.assets import wikitext
from mla_convert.assets.fetch import fetch_wheel_member
from mla_convert.cache_dir import cache_root
from mla_convert.manifests.digest import sha256_file

REQUIREMENT = "gensim==4.4.0"
MEMBER = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
DUMP_SHA256 = "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d"

Split = Literal["calibration", "heldout"]


@dataclass(frozen=True)
class Article:
    """One article: its title and its prose (see `clean_wikitext`)."""

    title: str
    text: str


@dataclass(frozen=True)
class SplitFacts:
    """What one split's file holds. `characters` counts the code points of the texts, without titles."""

    articles: int
    characters: int
    sha256: str


@dataclass(frozen=True)
class WikipediaSplits:
    """Two JSONL files that share no article, a line each `{"id": title, "text": prose}`."""

    calibration: Path
    heldout: Path
    calibration_facts: SplitFacts
    heldout_facts: SplitFacts


def wikipedia_dump() -> Path:
    """The dump (bzip2, 1.7 MB), fetched once and kept in the cache.

    Raises:
        EnvironmentFault: It is not cached and could not be downloaded.
        InputRefused: The download is not the pinned file.
    """
    destination = cache_root() / "downloads" / DUMP_SHA256 / "enwiki-shortened.bz2"
    return fetch_wheel_member(REQUIREMENT, MEMBER, DUMP_SHA256, destination)


def read_articles(dump: Path) -> Iterator[Article]:
    """Stream the articles of a MediaWiki XML dump in the order of the dump.

    Redirects, pages outside the article namespace and pages without prose are skipped.

    Args:
        dump: A `.xml.bz2` export file.
    """
    with bz2.open(dump, "rb") as stream:
        for _, element in ElementTree.iterparse(stream):
            if _local_name(element) != "page":
                continue
            fields = {_local_name(child): child for child in element.iter()}
            if fields["ns"].text == "0" and "redirect" not in fields:
                text = wikitext.clean_wikitext(fields["text"].text or "")
                if text:
                    yield Article(fields["title"].text or "", text)
            element.clear()


def split_of(title: str) -> Split:
    """The split of an article: by the first bit of the SHA-256 of its title, so about half each."""
    return "calibration" if hashlib.sha256(title.encode()).digest()[0] < 128 else "heldout"


def write_splits(folder: Path) -> WikipediaSplits:
    """Write both splits below `folder`, or find them there.

    They lie in a subfolder named by the digest of the dump and of the code that reads it, so a changed
    cleaner never meets old files. Articles are ordered by the digest of their title: stable, and a prefix of
    the file is a mixed sample instead of the start of the alphabet.

    Raises:
        EnvironmentFault: The dump could not be downloaded.
    """
    identity = hashlib.sha256(DUMP_SHA256.encode())
    for source in (Path(wikitext.__file__), Path(__file__)):
        identity.update(source.read_bytes())
    target = folder / f"wikipedia-{identity.hexdigest()[:16]}"
    if not (target / "splits.json").is_file():
        articles = sorted(read_articles(wikipedia_dump()), key=_title_digest)
        _write_folder(target, articles)
    facts = json.loads((target / "splits.json").read_text(encoding="utf-8"))
    return WikipediaSplits(
        calibration=target / "calibration.jsonl",
        heldout=target / "heldout.jsonl",
        calibration_facts=SplitFacts(**facts["calibration"]),
        heldout_facts=SplitFacts(**facts["heldout"]),
    )


def _write_folder(target: Path, articles: list[Article]) -> None:
    """Write both splits into a scratch folder and name it last; another run's finished folder stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".wikipedia-") as scratch:
        staged = Path(scratch) / "splits"
        staged.mkdir()
        facts = {}
        for split in ("calibration", "heldout"):
            chosen = [article for article in articles if split_of(article.title) == split]
            facts[split] = asdict(_write_jsonl(staged / f"{split}.jsonl", chosen))
        (staged / "splits.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        try:
            os.replace(staged, target)
        except OSError:
            if not (target / "splits.json").is_file():
                raise


def _write_jsonl(path: Path, articles: list[Article]) -> SplitFacts:
    lines = [json.dumps({"id": a.title, "text": a.text}, ensure_ascii=False) + "\n" for a in articles]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    return SplitFacts(len(articles), sum(len(a.text) for a in articles), sha256_file(path))


def _title_digest(article: Article) -> bytes:
    return hashlib.sha256(article.title.encode()).digest()


def _local_name(element: ElementTree.Element) -> str:
    """Tag without the namespace, whose version differs from dump to dump."""
    return element.tag.rpartition("}")[2]
