"""Windows of several texts: each from one text, shared evenly, and as ever where there is one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_convert.convert.calibration_text import Corpus, Document, make_corpus
from mla_convert.errors import InputRefused, UsageFault
from mla_convert.eval.domain_windows import TokenTexts, cut_by_text, cut_long, share_evenly
from mla_convert.eval.text import WindowPlan, cut_windows
from tests.eval.test_text import Letters


def text(name: str, letters: str) -> Corpus:
    return make_corpus(name, "text-file", (Document(name, letters),))


def tokens(*corpora: Corpus) -> TokenTexts:
    return TokenTexts.of(corpora, Letters())


@given(length=st.integers(8, 200), stride=st.integers(1, 8), most=st.integers(8, 100), seed=st.integers(0, 50))
def test_one_text_is_cut_as_the_plain_evaluation_cuts_it(length: int, stride: int, most: int, seed: int) -> None:
    corpus, plan = (
        text("a", "".join(chr(32 + index % 90) for index in range(length))),
        WindowPlan(8, stride, most, seed),
    )
    ours, theirs = cut_by_text(tokens(corpus), plan).windows, cut_windows([corpus], Letters(), plan)

    assert torch.equal(ours.ids, theirs.ids)
    assert (ours.starts, ours.first_scored) == (theirs.starts, theirs.first_scored)
    assert ours.ids_digest == theirs.ids_digest


def test_no_window_holds_tokens_of_two_texts() -> None:
    given = tokens(text("a", "a" * 22), text("b", "b" * 11), text("c", "c" * 40))
    cut = cut_by_text(given, WindowPlan(5, 5, 1000, 0))

    for row, owner in enumerate(cut.text):
        letter = ord(cut.texts[owner].name)
        assert set(cut.windows.ids[row].tolist()) == {letter}
    assert [cut.text.count(index) for index in range(3)] == [4, 2, 8]
    assert cut.windows.starts[4:6] == (0, 5)
    assert cut.windows.text_tokens == 73


def test_tokens_are_shared_evenly_and_what_a_short_text_leaves_goes_to_the_others() -> None:
    given = tokens(text("a", "a" * 100), text("b", "b" * 10), text("c", "c" * 100))
    cut = cut_by_text(given, WindowPlan(10, 10, 90, 0))

    assert [cut.text.count(index) for index in range(3)] == [4, 1, 4]


@given(available=st.lists(st.integers(0, 9), min_size=1, max_size=5), wanted=st.integers(0, 30))
def test_shares_use_all_there_is_and_differ_only_where_a_text_ends(available: list[int], wanted: int) -> None:
    shares = share_evenly(available, wanted)

    assert sum(shares) == min(wanted, sum(available))
    assert all(share <= most for share, most in zip(shares, available, strict=True))
    open_shares = [share for share, most in zip(shares, available, strict=True) if share < most]
    assert not open_shares or max(shares) - min(open_shares) <= 1


def test_a_text_shorter_than_a_window_is_named() -> None:
    with pytest.raises(InputRefused, match="short: a text is shorter than one window; expected at least 8 tokens; f"):
        cut_by_text(tokens(text("a", "a" * 100), text("short", "b" * 7)), WindowPlan(8, 8, 100, 0))


def test_fewer_tokens_than_a_window_for_each_text_are_refused() -> None:
    with pytest.raises(UsageFault, match="no window for each text; expected at least 16; found 15"):
        cut_by_text(tokens(text("a", "a" * 100), text("b", "b" * 100)), WindowPlan(8, 8, 15, 0))


def test_a_text_given_twice_is_refused() -> None:
    twice = text("a", "a" * 100)

    with pytest.raises(UsageFault, match="a text is given twice"):
        tokens(twice, twice)
    with pytest.raises(UsageFault, match="expected each --text once; found copy"):
        tokens(twice, Corpus("copy", "text-file", twice.documents, twice.sha256))


def test_long_windows_come_from_the_texts_that_are_long_enough() -> None:
    given = tokens(text("a", "a" * 31), text("b", "b" * 64), text("c", "c" * 40))
    cut = cut_long(given, 32, 3, 0)

    assert cut is not None
    assert [cut.text.count(index) for index in range(3)] == [0, 2, 1]
    assert cut.windows.ids.shape == (3, 32)
    assert set(cut.windows.first_scored) == {1}
    assert cut_long(given, 65, 3, 0) is None
