"""Windows of evaluation text: what is scored, what is sampled, and what calibration must not have read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_convert.convert.calibration_text import Corpus, Document, read_corpus
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import InputRefused, UsageFault
from mla_convert.eval.text import (
    SharedDocument,
    WindowPlan,
    cut_windows,
    overlap_with_calibration,
    refuse_overlap,
    text_digest,
)
from mla_convert.manifests.models import ConversionManifest, DocumentDigest
from tests.conftest import PicoFactory
from tests.manifests.example import build


class Letters:
    """A tokenizer of one token per character, with an opening token 0 where asked."""

    def __init__(self, opening: bool = False) -> None:
        self.opening = [0] if opening else []

    def __call__(self, text: str, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [*self.opening, *(ord(letter) for letter in text)]}


def corpus(*texts: str, name: str = "text") -> Corpus:
    documents = tuple(Document(f"{name}:{number}", text) for number, text in enumerate(texts))
    return Corpus(name, "jsonl", documents, "0" * 64)


def plan(seq_len: int, stride: int | None = None, max_tokens: int = 10_000, seed: int = 0) -> WindowPlan:
    return WindowPlan(seq_len, stride or seq_len, max_tokens, seed)


def test_windows_follow_one_another_and_drop_the_rest() -> None:
    windows = cut_windows([corpus("abcdef", "ghijk")], Letters(), plan(4))

    assert ["".join(map(chr, ids)) for ids in windows.ids.tolist()] == ["abcd", "efgh"]
    assert (windows.starts, windows.first_scored) == ((0, 4), (1, 1))
    assert (windows.tokens, windows.scored_tokens, windows.text_tokens) == (8, 6, 11)


@given(
    length=st.integers(2, 60),
    seq_len=st.integers(2, 12),
    data=st.data(),
)
def test_a_shorter_stride_scores_every_token_but_the_first_exactly_once(length: int, seq_len: int, data: Any) -> None:
    stride = data.draw(st.integers(1, seq_len - 1))
    if length < seq_len:
        return
    windows = cut_windows([corpus("x" * length)], Letters(), plan(seq_len, stride))
    scored = [
        start + index
        for start, first in zip(windows.starts, windows.first_scored, strict=True)
        for index in range(first, seq_len)
    ]

    assert scored == list(range(1, windows.starts[-1] + seq_len))
    assert windows.scored_tokens == len(scored)


def test_more_text_than_asked_for_gives_a_seeded_sample_over_all_of_it() -> None:
    text = corpus("".join(chr(number) for number in range(1, 1001)))
    first = cut_windows([text], Letters(), plan(10, max_tokens=105, seed=1))
    again = cut_windows([text], Letters(), plan(10, max_tokens=105, seed=1))
    other = cut_windows([text], Letters(), plan(10, max_tokens=105, seed=2))

    assert first.tokens == 100
    assert list(first.starts) == sorted(set(first.starts))
    assert first.starts == again.starts != other.starts
    assert first.starts[-1] - first.starts[0] > 500
    assert first.ids_digest == again.ids_digest != other.ids_digest


def test_opening_tokens_are_the_tokenizers_own_and_named() -> None:
    with_opening = cut_windows([corpus("ab", "cd")], Letters(opening=True), plan(6))
    without = cut_windows([corpus("abc", "def")], Letters(), plan(6))

    assert with_opening.ids.tolist() == [[0, 97, 98, 0, 99, 100]]
    assert (with_opening.bos_policy, with_opening.added_ids) == ("per-document", (0,))
    assert (without.bos_policy, without.added_ids) == ("none", ())


def test_a_real_tokenizer(pico: PicoFactory, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello there", encoding="utf-8")
    windows = cut_windows([read_corpus(str(tmp_path))], load_tokenizer(pico()), plan(6))

    assert windows.ids[0, 0] == 1
    assert (windows.bos_policy, windows.added_ids) == ("per-document", (1,))


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(InputRefused, match="expected at least 8 tokens; found 7 tokens"):
        cut_windows([corpus("abcdefg")], Letters(), plan(8))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 1, 10), "--seq-len 2 or more"),
        ((8, 0, 10), "1 to --seq-len"),
        ((8, 9, 10), "1 to --seq-len"),
        ((8, 8, 7), "at least 8; found 7"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UsageFault, match=message):
        WindowPlan(*sizes, seed=0)


def test_the_digest_names_all_texts_in_their_order() -> None:
    one, other = corpus("a"), Corpus("b", "jsonl", (), "1" * 64)

    assert text_digest([one]) == one.sha256
    assert len({text_digest([one]), text_digest([one, other]), text_digest([other, one])}) == 3


def calibrated_on(folder: Path, *documents: Document) -> ConversionManifest:
    _, _, manifest = build(folder)
    assert manifest.calibration is not None
    digests = tuple(DocumentDigest(id=item.name, sha256=item.sha256) for item in documents)
    return manifest.model_copy(update={"calibration": manifest.calibration.model_copy(update={"documents": digests})})


def test_shared_documents_are_found_by_text_and_by_name(tmp_path: Path) -> None:
    manifest = calibrated_on(tmp_path, Document("old", "same text"), Document("text:1", "another edition"))
    shared = overlap_with_calibration(manifest, [corpus("same text", "new edition", "unseen")])

    assert shared == (SharedDocument("text:0", "text"), SharedDocument("text:1", "name"))


def test_without_calibration_nothing_is_shared(tmp_path: Path) -> None:
    manifest = calibrated_on(tmp_path).model_copy(update={"calibration": None})

    assert overlap_with_calibration(manifest, [corpus("anything")]) == ()


def test_shared_documents_are_refused_unless_allowed() -> None:
    shared = (SharedDocument("text:0", "text"), SharedDocument("text:1", "name"))
    refuse_overlap((), allowed=False)
    refuse_overlap(shared, allowed=True)
    with pytest.raises(InputRefused, match=r"2 document.*'text:0' \(same text\)"):
        refuse_overlap(shared, allowed=False)
