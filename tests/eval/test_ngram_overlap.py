"""Shared runs of words: planted paragraphs found, unrelated text not, shares by brute force, text that is gone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mla_convert.convert.calibration_text import Corpus, Document, make_corpus, read_corpus
from mla_convert.errors import InputRefused
from mla_convert.eval.ngram_overlap import NGRAM_WORDS, NgramIndex, OverlapReport, find_overlap, words_of
from mla_convert.manifests.evaluation.receipt import OverlapRecord
from mla_convert.manifests.models import CalibrationText, ConversionManifest, DocumentDigest, SelfTextRecord
from tests.conftest import PicoFactory
from tests.manifests.example import build
from tests.tolerances import FLOAT64_ALGEBRA

VOCABULARY = [f"word{number}" for number in range(3000)]


def prose(seed: int, words: int = 200) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=words))


def share_by_hand(index: list[str], text: str, length: int) -> float:
    def grams(words: list[str]) -> list[tuple[str, ...]]:
        return [tuple(words[at : at + length]) for at in range(len(words) - length + 1)]

    known = {gram for other in index for gram in grams(other.split())}
    own = grams(text.split())
    return sum(gram in known for gram in own) / len(own) if own else 0.0


# Three words, so that runs repeat and differ in order alone.
few_words = st.lists(st.sampled_from(["a", "b", "c"]), max_size=25).map(" ".join)


@given(index=st.lists(few_words, max_size=3), text=few_words, length=st.integers(1, 5))
@example(index=["a b"], text="b a", length=2)
def test_the_share_equals_brute_force(index: list[str], text: str, length: int) -> None:
    found = NgramIndex.of(index, length).share(text)

    assert found == pytest.approx(share_by_hand(index, text, length), rel=FLOAT64_ALGEBRA)


def test_words_are_compared_without_case_punctuation_and_white_space() -> None:
    assert words_of("The “Quick”,\n brown-fox\tjumps! ﬁve") == ["the", "quick", "brown", "fox", "jumps", "five"]
    assert words_of("def f_1(x): return x**2") == ["def", "f_1", "x", "return", "x", "2"]
    assert words_of("東京は abcカナ") == ["東", "京", "は", "abc", "カ", "ナ"]


def test_a_run_as_long_as_an_n_gram_is_found_and_one_word_less_is_not() -> None:
    words = prose(0, NGRAM_WORDS).split()
    index = NgramIndex.of([f"{prose(1)} {' '.join(words)} {prose(2)}"])

    assert index.share(f"x {' '.join(words)} y") == 1 / 3
    assert index.share(f"x {' '.join(words[1:])} y") == 0
    assert index.share(" ".join(words[1:])) == 0
    assert index.share("") == 0


def manifest_of(folder: Path, *texts: Corpus, **fields: object) -> ConversionManifest:
    """A manifest whose calibration read all documents of these texts."""
    folder.mkdir()
    _, _, manifest = build(folder)
    assert manifest.calibration is not None
    plain = manifest.calibration.texts[0]
    records = tuple(
        CalibrationText.model_validate(
            {**plain.model_dump(), "name": item.name, "kind": item.kind, "sha256": item.sha256}
        )
        for item in texts
    )
    digests = tuple(DocumentDigest(id=doc.name, sha256=doc.sha256) for item in texts for doc in item.documents)
    calibration = manifest.calibration.model_copy(update={"texts": records, "documents": digests, **fields})
    return manifest.model_copy(update={"calibration": calibration})


def calibration_folder(folder: Path, *documents: str) -> Corpus:
    folder.mkdir()
    for number, text in enumerate(documents):
        (folder / f"calibration{number}.txt").write_text(text, encoding="utf-8")
    return read_corpus(str(folder))


def evaluated(*texts: str) -> Corpus:
    return make_corpus("heldout", "jsonl", tuple(Document(f"held:{number}", text) for number, text in enumerate(texts)))


def test_a_paragraph_copied_into_another_document_is_found_and_unrelated_text_is_not(
    tmp_path: Path, pico: PicoFactory
) -> None:
    paragraph = prose(7, 60)
    text = calibration_folder(tmp_path / "text", prose(0), f"{prose(1)}\n\n{paragraph.upper()}.\n{prose(2)}")
    manifest = manifest_of(tmp_path / "out", text)
    report = find_overlap(manifest, [evaluated(prose(10), f"{prose(11)} {paragraph} {prose(12)}", prose(13))], pico())

    assert report.unchecked == ()
    [found] = report.records
    assert (found.document, found.by) == ("held:1", "n-gram")
    assert found.share == pytest.approx((60 - NGRAM_WORDS + 1) / (460 - NGRAM_WORDS + 1), rel=FLOAT64_ALGEBRA)
    with pytest.raises(InputRefused, match=r"found 'held:1' \(10.7% of its n-grams\)"):
        report.refuse()


def test_the_same_text_and_the_same_name_are_records_of_their_own(tmp_path: Path, pico: PicoFactory) -> None:
    text = calibration_folder(tmp_path / "text", "short words", prose(1))
    other = make_corpus("heldout", "jsonl", (Document("mine", prose(1)), Document("calibration0.txt", prose(5))))
    report = find_overlap(manifest_of(tmp_path / "out", text), [other], pico())

    assert report.records == (
        OverlapRecord(document="mine", by="text", share=1.0),
        OverlapRecord(document="calibration0.txt", by="name", share=0.0),
    )
    with pytest.raises(InputRefused, match=r"2 overlaps .* found 'mine' \(same text\)"):
        report.refuse()


def test_documents_that_no_window_touched_do_not_count(tmp_path: Path, pico: PicoFactory) -> None:
    text = calibration_folder(tmp_path / "text", prose(0), prose(1))
    manifest = manifest_of(tmp_path / "out", text)
    assert manifest.calibration is not None
    first = manifest.calibration.model_copy(update={"documents": manifest.calibration.documents[:1]})
    report = find_overlap(
        manifest.model_copy(update={"calibration": first}), [evaluated(f"new {prose(0)}", f"new {prose(1)}")], pico()
    )

    assert [record.document for record in report.records] == ["held:0"]


@pytest.mark.parametrize("change", ["gone", "changed"])
def test_text_that_is_not_what_it_was_is_not_checkable(tmp_path: Path, pico: PicoFactory, change: str) -> None:
    text = calibration_folder(tmp_path / "text", prose(0), prose(1))
    manifest = manifest_of(tmp_path / "out", text)
    for file in (tmp_path / "text").iterdir():
        if change == "gone":
            file.unlink()
        else:
            file.write_text(file.read_text(encoding="utf-8") + " more", encoding="utf-8")
    report = find_overlap(manifest, [evaluated(f"new {prose(0)}")], pico())

    assert report.records == ()
    assert len(report.unchecked) == 1
    assert {"gone": "no text in it", "changed": "not the text it was"}[change] in report.unchecked[0]
    with pytest.raises(InputRefused, match="cannot be checked") as caught:
        report.refuse()
    assert len(str(caught.value).splitlines()) == 1


def test_text_that_the_source_wrote_itself_is_read_from_the_cache(
    tmp_path: Path, pico: PicoFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "cache" / "self-text" / ("a" * 64) / "self.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text('{"id": "self:0000", "text": "' + prose(0) + '"}\n', encoding="utf-8")
    written = read_corpus(str(file))
    text = make_corpus("self", "self", written.documents)
    record = SelfTextRecord(digest="sha256:" + "a" * 64, temperature=1.0, top_p=0.95, seed=0, prompts=1, unprompted=0)
    manifest = manifest_of(tmp_path / "out", text, self_text=record)
    held_out = [evaluated(f"new {prose(0)}")]

    assert [item.by for item in find_overlap(manifest, held_out, pico()).records] == ["n-gram"]
    file.unlink()
    assert find_overlap(manifest, held_out, pico()).unchecked == ("self: no such text",)


def test_without_calibration_there_is_nothing_to_share(tmp_path: Path, pico: PicoFactory) -> None:
    manifest = manifest_of(tmp_path / "out").model_copy(update={"calibration": None})
    report = find_overlap(manifest, [evaluated(prose(0))], pico())

    assert report == OverlapReport((), ())
    report.refuse()
