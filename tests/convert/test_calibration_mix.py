"""Windows from several texts by their shares, and long windows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from mla_convert.convert.calibration_mix import TokenWindows, apportion, sample_windows
from mla_convert.convert.calibration_text import Corpus, Document, make_corpus
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import InputRefused
from tests.conftest import PicoFactory

LENGTH = 16


@pytest.fixture(scope="module")
def tokenizer(pico: PicoFactory) -> Any:
    return load_tokenizer(pico())


def corpus(letter: str, documents: int = 20, characters: int = 63) -> Corpus:
    """Documents of one letter; with the opening token, 63 characters are four slices."""
    return make_corpus(letter, "jsonl", tuple(Document(f"{letter}{i}", letter * characters) for i in range(documents)))


def draw(tokenizer: Any, *corpora: Corpus, windows: int, seed: int = 0, **options: Any) -> TokenWindows:
    return sample_windows(corpora, tokenizer, tokens=windows * LENGTH, length=LENGTH, seed=seed, **options)


@pytest.mark.parametrize(
    ("count", "weights", "expected"),
    [
        (10, [1, 1], (5, 5)),
        (10, [3, 1, 1], (6, 2, 2)),
        (10, [1, 1, 1], (4, 3, 3)),
        (7, [0.5, 0.3, 0.2], (4, 2, 1)),
        (10, [98, 1, 1], (8, 1, 1)),
        (2, [1, 2, 1], (1, 1, 0)),
        (5, [0.2], (5,)),
    ],
)
def test_windows_are_shared_out(count: int, weights: list[float], expected: tuple[int, ...]) -> None:
    assert apportion(count, weights) == expected


def test_weights_are_shares_of_the_tokens_and_equal_by_default(tokenizer: Any) -> None:
    """Whatever the texts' sizes: the second has four times the documents of the first."""
    small, large = corpus("a", 10), corpus("b", 40)

    assert Counter(draw(tokenizer, small, large, windows=12).corpus) == {0: 6, 1: 6}
    weighted = draw(tokenizer, small, large, windows=12, weights=[1.0, 3.0])
    assert Counter(weighted.corpus) == {0: 3, 1: 9}
    for index, letter in enumerate("ab"):
        text = tokenizer.decode(weighted.of_corpus(index).flatten(), skip_special_tokens=True)
        assert set(text) == {letter}
    assert {document.name[0] for document in weighted.documents} == {"a", "b"}
    assert weighted.tokens == 12 * LENGTH


def test_any_run_of_windows_is_a_mixture(tokenizer: Any) -> None:
    drawn = draw(tokenizer, corpus("a"), corpus("b"), corpus("c"), windows=24, weights=[2.0, 1.0, 1.0]).corpus

    for start in range(0, 24, 4):
        assert Counter(drawn[start : start + 4]) == {0: 2, 1: 1, 2: 1}


def test_a_text_gives_the_same_windows_whatever_stands_beside_it(tokenizer: Any) -> None:
    mixed_letters = make_corpus(
        "x", "jsonl", tuple(Document(f"x{i}", "".join(chr(97 + (i * j) % 26) for j in range(90))) for i in range(1, 9))
    )

    alone = draw(tokenizer, mixed_letters, windows=6).ids
    beside = draw(tokenizer, corpus("a"), mixed_letters, windows=12)

    assert torch.equal(beside.of_corpus(1), alone)
    assert torch.equal(draw(tokenizer, corpus("a"), mixed_letters, windows=12).ids, beside.ids)
    assert not torch.equal(draw(tokenizer, corpus("a"), mixed_letters, windows=12, seed=1).ids, beside.ids)


def test_what_a_text_lacks_the_others_give(tokenizer: Any) -> None:
    drawn = draw(tokenizer, corpus("a", documents=1), corpus("b"), corpus("c"), windows=30, weights=[1.0, 2.0, 1.0])

    # Four windows instead of eight; of the other four the texts beside it get two thirds and one third.
    assert Counter(drawn.corpus) == {0: 4, 1: 18, 2: 8}
    assert drawn.exhausted == (0,)
    every = draw(tokenizer, corpus("a", documents=1), corpus("b", documents=1), windows=30)
    assert (Counter(every.corpus), every.exhausted) == ({0: 4, 1: 4}, (0, 1))


def test_a_text_shorter_than_a_window_is_named(tokenizer: Any) -> None:
    with pytest.raises(InputRefused, match="shorter than one window") as caught:
        draw(tokenizer, corpus("a"), corpus("b", documents=1, characters=7), windows=4)

    assert (caught.value.where, caught.value.found) == ("b", "8 tokens")


def test_whole_windows_come_from_single_documents(tokenizer: Any) -> None:
    """Long documents are few and stand among many short ones, and their ends are left out."""
    long = [Document(f"long{i}", chr(65 + i) * (3 * LENGTH + 5)) for i in range(3)]
    short = [Document(f"short{i}", chr(97 + i) * 5) for i in range(20)]
    mixed = make_corpus("x", "jsonl", (*short[:10], *long, *short[10:]))

    drawn = draw(tokenizer, mixed, windows=9, whole=True)

    for window in drawn.ids:
        assert len(set(tokenizer.decode(window, skip_special_tokens=True))) == 1
    assert {document.name for document in drawn.documents} == {"long0", "long1", "long2"}
    plain = [
        set(tokenizer.decode(window, skip_special_tokens=True)) for window in draw(tokenizer, mixed, windows=9).ids
    ]
    assert max(map(len, plain)) > 1


def test_short_documents_are_joined_when_long_ones_run_out(tokenizer: Any) -> None:
    few = make_corpus("x", "jsonl", (Document("long", "A" * 20), *(Document(f"s{i}", "b" * 5) for i in range(8))))

    drawn = draw(tokenizer, few, windows=9, whole=True)

    assert len(drawn.ids) == 4
    assert drawn.exhausted == (0,)


def test_a_text_without_long_windows_leaves_them_to_the_others(tokenizer: Any) -> None:
    drawn = draw(tokenizer, corpus("a"), corpus("b", documents=1, characters=7), windows=4, whole=True)

    assert (drawn.corpus, drawn.exhausted) == ((0, 0, 0, 0), (1,))


def test_a_text_that_spells_its_special_tokens_gets_no_others(tokenizer: Any) -> None:
    documents = tuple(Document(f"d{i}", "<s>" + "a" * 15, spelled_out=True) for i in range(4))

    ids = draw(tokenizer, make_corpus("x", "jsonl", documents), windows=4).ids

    assert ids[:, 0].tolist() == [1] * 4
    assert int((ids == 1).sum()) == 4
