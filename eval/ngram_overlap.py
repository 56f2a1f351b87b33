"""Evaluation text that calibration has read, below whole documents: runs of words found in both.

A manifest holds digests of calibration's documents, not their words. So the text is read again from where the
manifest says it was, and counts only if it still has the digest in the manifest; otherwise the answer is that it
could not be checked.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mla_convert.convert.calibration_text import Corpus, Document, read_corpus
from mla_convert.convert.chat_text import ChatTemplate
from mla_convert.convert.self_text import self_text_file
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import EnvironmentFault, InputRefused
from mla_convert.eval.text import overlap_with_calibration
from mla_convert.manifests.evaluation.receipt import OverlapRecord
from mla_convert.manifests.models import CalibrationRecord, CalibrationText, ConversionManifest
from mla_convert.progress import track

# The length that GPT-3's contamination study took (Brown et al., arXiv 2005.14165, appendix C).
NGRAM_WORDS = 13
HASH_BYTES = 8
# Chinese, Japanese: no spaces between words, so each character counts as one.
_ALONE = "぀-ヿ㐀-䶿一-鿿豈-﫿"
_WORD = re.compile(rf"[{_ALONE}]|(?:(?![{_ALONE}])\w)+")

Hashes = NDArray[np.uint64]


def words_of(text: str) -> list[str]:
    """Words of a text as they are compared: compatibility forms and case folded, no punctuation, any white space."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class NgramHasher:
    """64-bit hashes of the n-grams of texts; words that were seen are kept.

    An n-gram's hash is `Σ m_i h(w_i)` modulo 2^64 with odd multipliers `m_i`: of two different n-grams it is equal by
    a chance of about 2^-60, so a few million of them share none by accident.
    """

    def __init__(self, length: int = NGRAM_WORDS) -> None:
        self._length = length
        self._known: dict[str, int] = {}
        self._multipliers = [_hash(f"position {number}") | 1 for number in range(length)]

    def hashes(self, text: str) -> Hashes:
        """(G,) one for each n-gram in order, repeats included; none for a text of fewer words."""
        words = words_of(text)
        count = len(words) - self._length + 1
        if count < 1:
            return np.empty(0, dtype=np.uint64)
        values = np.fromiter((self._word(word) for word in words), dtype=np.uint64, count=len(words))
        total = np.zeros(count, dtype=np.uint64)
        for offset, multiplier in enumerate(self._multipliers):
            total += values[offset : offset + count] * np.uint64(multiplier)  # wraps around, as meant
        return total

    def _word(self, word: str) -> int:
        if word not in self._known:
            self._known[word] = _hash(word)
        return self._known[word]


def _hash(text: str) -> int:
    # Lone surrogates pass through JSON; they are words like others here.
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class NgramIndex:
    """The n-grams of some documents.

    Attributes:
        hasher: What made the hashes.
        hashes: Sorted, each once.
    """

    hasher: NgramHasher
    hashes: Hashes

    @classmethod
    def of(cls, texts: Iterable[str], length: int = NGRAM_WORDS) -> NgramIndex:
        """Index texts."""
        hasher = NgramHasher(length)
        parts = [np.unique(hasher.hashes(text)) for text in texts]
        return cls(hasher, np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.uint64))

    def share(self, text: str) -> float:
        """Share of the text's n-grams, repeats included, that the index has; 0 for a text of fewer words."""
        own = self.hasher.hashes(text)
        return float(np.isin(own, self.hashes).mean()) if len(own) else 0.0


@dataclass(frozen=True)
class OverlapReport:
    """What evaluation text shares with the text that a conversion was calibrated on.

    Attributes:
        records: Documents with something in common. A document whose text is the same has the share 1; one of which
            only the name is the same has a share of 0 by that alone. Documents of fewer words than an n-gram are
            compared as wholes only.
        unchecked: Calibration texts whose words could not be had, each with the reason.
    """

    records: tuple[OverlapRecord, ...]
    unchecked: tuple[str, ...]

    def refuse(self) -> None:
        """Refuse any overlap, and text that could not be compared: `--strict`.

        Raises:
            InputRefused: Naming the first such document or text.
        """
        if self.records:
            worst = max(self.records, key=lambda record: (record.share, record.by == "text"))
            raise InputRefused(
                f"{len(self.records)} overlaps of the evaluation text with calibration text",
                expected="held-out text under --strict",
                found=f"{worst.document!r} ({_kind(worst)})",
                remedy="Use other text, or leave --strict out to measure on it knowingly.",
            )
        if self.unchecked:
            raise InputRefused(
                "overlap with calibration text cannot be checked",
                expected="the text that calibration read, unchanged, under --strict",
                found=self.unchecked[0],
                remedy="Put it back where it was, or leave --strict out.",
            )


def _kind(record: OverlapRecord) -> str:
    return f"{record.share:.1%} of its n-grams" if record.by == "n-gram" else f"same {record.by}"


def find_overlap(
    manifest: ConversionManifest, corpora: Sequence[Corpus], source_folder: Path, text_field: str = "text"
) -> OverlapReport:
    """Documents of an evaluation text that calibration has read, wholly or in parts.

    Args:
        manifest: Of the converted folder.
        corpora: The evaluation text.
        source_folder: The source, whose chat template made text of conversations.
        text_field: Field of rows that held calibration's text.
    """
    if manifest.calibration is None:
        return OverlapReport((), ())
    records = [
        OverlapRecord(document=item.name, by=item.by, share=1.0 if item.by == "text" else 0.0)
        for item in overlap_with_calibration(manifest, corpora)
    ]
    reader = _CalibrationReader(manifest.calibration, ChatTemplate(load_tokenizer(source_folder)), text_field)
    read, unchecked = reader.documents()
    index = NgramIndex.of(document.text for document in track(read, "indexing calibration text", unit="document"))
    same = {item.sha256 for item in manifest.calibration.documents}
    documents = [document for corpus in corpora for document in corpus.documents if document.sha256 not in same]
    for document in track(documents, "looking for shared text", unit="document"):
        share = index.share(document.text)
        if share > 0:
            records.append(OverlapRecord(document=document.name, by="n-gram", share=share))
    return OverlapReport(tuple(records), unchecked)


@dataclass(frozen=True)
class _CalibrationReader:
    """Calibration's text as it was, where it still is."""

    record: CalibrationRecord
    chat: ChatTemplate
    text_field: str

    def documents(self) -> tuple[list[Document], tuple[str, ...]]:
        """The documents that windows touched, and texts that could not be had with the reason."""
        wanted = {item.sha256 for item in self.record.documents}
        found, reasons = list[Document](), list[str]()
        for text in self.record.texts:
            try:
                corpus = read_corpus(self._place(text), self.text_field, self.chat)
            except (InputRefused, EnvironmentFault) as error:
                reasons.append(f"{text.name}: {error.message}")
                continue
            if corpus.sha256 != text.sha256:
                reasons.append(
                    f"{text.name}: not the text it was (sha256 {corpus.sha256[:16]}, then {text.sha256[:16]})"
                )
                continue
            found += [document for document in corpus.documents if document.sha256 in wanted]
        return found, tuple(reasons)

    def _place(self, text: CalibrationText) -> str:
        """What to read: text that the source wrote itself lies in the cache under its digest."""
        if text.kind != "self" or self.record.self_text is None:
            return text.name
        return str(self_text_file(self.record.self_text.digest))
