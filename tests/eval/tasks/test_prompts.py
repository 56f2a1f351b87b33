"""Prompts: exact lengths, answers that are where they are said to be, and what a tokenizer cannot pose."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.eval.tasks import words
from mla_convert.eval.tasks.prompt_sets import WITHOUT_DEPTH, Posed, pose_all
from mla_convert.eval.tasks.prompts import CannotPose, Encoder, Prompt, Question, common_prefix
from mla_convert.eval.tasks.sizes import TASKS, TaskLength, TaskSizes
from mla_convert.eval.tasks.text_tasks import DEPTHS
from mla_convert.eval.tasks.token_tasks import word_tokens
from tests.conftest import PicoFactory
from tests.eval.tasks.helpers import all_words, word_tokenizer
from tests.eval.test_serving import TINY_TRAINED

SIZES = TaskSizes((TaskLength(200, 2), TaskLength(331, 1)), questions=3)


@pytest.fixture(scope="module")
def trained() -> Encoder:
    return Encoder(load_tokenizer(TINY_TRAINED))


@pytest.fixture(scope="module")
def wordy() -> Encoder:
    return Encoder(word_tokenizer(all_words()))


@pytest.fixture(scope="module")
def posed(trained: Encoder) -> Posed:
    return pose_all(trained, SIZES, 512, seed=0)


def tokens(prompt: Prompt) -> int:
    return len(prompt.context) + len(prompt.answer)


def test_every_task_is_posed_at_every_length(posed: Posed) -> None:
    cells = [(part.task, part.length, part.depth) for part in posed.sets]

    assert posed.left_out == ()
    assert cells == [
        *(
            (task, length, depth)
            for length in (200, 331)
            for task, depths in (("needle", DEPTHS), *((task, (None,)) for task in WITHOUT_DEPTH))
            for depth in depths
        )
    ]
    assert [len(part.prompts) for part in posed.sets if part.task == "passkey"] == [6, 3]
    assert [len(part.prompts) for part in posed.sets if part.task == "needle"] == [2] * 5 + [1] * 5


@pytest.mark.parametrize("name", ["trained", "wordy"])
def test_the_longest_prompt_is_exactly_as_long_as_asked_and_none_is_longer(
    name: str, request: pytest.FixtureRequest
) -> None:
    encoder: Encoder = request.getfixturevalue(name)
    for task in ("needle", *WITHOUT_DEPTH):
        for length in (200, 331):
            sets = pose_all(encoder, TaskSizes((TaskLength(length, 1),), 3), length, seed=4).sets
            sizes = [tokens(prompt) for part in sets if part.task == task for prompt in part.prompts]
            assert max(sizes) == length, (task, length)
            assert min(sizes) >= length - 25, (task, length)


def test_prompts_open_as_the_tokenizer_opens_a_text(wordy: Encoder, posed: Posed, pico: PicoFactory) -> None:
    character = Encoder(load_tokenizer(pico()))

    assert character.opening == (1,)
    assert wordy.opening == ()
    for part in pose_all(character, SIZES, 512, seed=0).sets:
        assert all(prompt.context[0] == 1 and 1 not in prompt.context[1:] for prompt in part.prompts)
        assert max(map(tokens, part.prompts)) == part.length or part.task == "needle"


def test_the_seed_decides_everything(trained: Encoder, posed: Posed) -> None:
    assert pose_all(trained, SIZES, 512, seed=0) == posed
    other = pose_all(trained, SIZES, 512, seed=1)
    assert all(ours.prompts != theirs.prompts for ours, theirs in zip(posed.sets, other.sets, strict=True))


def test_a_tasks_prompts_do_not_depend_on_other_lengths(trained: Encoder, posed: Posed) -> None:
    alone = pose_all(trained, TaskSizes(SIZES.lengths[1:], SIZES.questions), 512, seed=0)

    assert alone.sets == tuple(part for part in posed.sets if part.length == 331)


def test_a_needle_lies_at_its_depth_and_its_answer_stands_there_alone(wordy: Encoder) -> None:
    sets = pose_all(wordy, TaskSizes((TaskLength(400, 1),), 3), 512, seed=0).sets
    for part in (part for part in sets if part.task == "needle"):
        (prompt,) = part.prompts
        (place,) = (at for at, token in enumerate(prompt.context) if token == prompt.answer[0])
        text = wordy.tokenizer.decode(prompt.context)
        question = text.rsplit(".", 1)[1].strip()
        assert text.count(question) == 2
        assert part.depth == pytest.approx(place / 400, abs=0.08)
        assert not set(prompt.wrong) & set(prompt.context)


def test_a_passkey_stands_in_the_text_and_the_wrong_one_does_not(posed: Posed, trained: Encoder) -> None:
    for part in (part for part in posed.sets if part.task == "passkey"):
        for prompt in part.prompts:
            text = trained.tokenizer.decode(prompt.context)
            answer, wrong = (trained.tokenizer.decode(ids).strip() for ids in (prompt.answer, prompt.wrong))
            assert len(answer) == len(wrong) == 5
            assert text.count(answer) == 2
            assert wrong not in text


def test_a_key_stands_before_its_value(posed: Posed, trained: Encoder) -> None:
    for part in (part for part in posed.sets if part.task == "key-value"):
        for prompt in part.prompts:
            text = trained.tokenizer.decode(prompt.context)
            start = text.rsplit("\n", 1)[1]
            answer, wrong = (trained.tokenizer.decode(ids) for ids in (prompt.answer, prompt.wrong))
            assert f"{start}{answer}" in text
            assert f"{start}{wrong}" not in text


def test_counting_goes_on_by_its_step(posed: Posed, trained: Encoder) -> None:
    for part in (part for part in posed.sets if part.task == "counting"):
        for prompt in part.prompts:
            numbers = [int(word) for word in trained.tokenizer.decode(prompt.context).split(",")[1:-1]]
            steps = {after - before for before, after in pairwise(numbers)}
            (step,) = steps
            assert int(trained.tokenizer.decode(prompt.answer)) == numbers[-1] + step
            assert int(trained.tokenizer.decode(prompt.wrong)) != numbers[-1] + step


def test_a_copy_repeats_itself_and_asks_for_its_last_tokens(posed: Posed) -> None:
    part = next(part for part in posed.sets if part.task == "copy")
    for prompt in part.prompts:
        whole = prompt.context + prompt.answer
        period = 200 // 4
        assert whole[-period:] == whole[-2 * period : -period] == whole[-3 * period : -2 * period]
        assert all(wrong != right for wrong, right in zip(prompt.wrong, prompt.answer, strict=True))
    last = [prompt.context + prompt.answer for prompt in part.prompts[:3]]
    assert [len(whole) for whole in last] == [192, 196, 200]
    assert last[2][:196] == last[1]


def test_an_induction_cue_is_always_followed_by_its_answer(posed: Posed) -> None:
    for part in (part for part in posed.sets if part.task == "induction"):
        for prompt in part.prompts:
            cue, body = prompt.context[-2:], prompt.context[:-2]
            after = [body[at + 2] for at in range(len(body) - 2) if body[at : at + 2] == cue]
            assert len(after) >= 3
            assert set(after) == set(prompt.answer)
            assert prompt.wrong != prompt.answer
            assert prompt.wrong[0] in body


def test_prompts_never_exceed_the_models_positions(trained: Encoder) -> None:
    found = pose_all(trained, TASKS["full"], 300, seed=0)

    assert {part.length for part in found.sets} == {256, 300}
    assert max(tokens(prompt) for part in found.sets for prompt in part.prompts) == 300
    assert TASKS["quick"].within(1024) == TASKS["quick"].lengths
    assert TASKS["quick"].within(100) == (TaskLength(100, 2),)
    assert TASKS["full"].within(8192) == TASKS["full"].lengths


def test_without_digits_the_tasks_with_digits_are_left_out_with_a_note() -> None:
    found = pose_all(Encoder(word_tokenizer(all_words(digits=False))), SIZES, 512, seed=0)

    assert {(note.task, note.length) for note in found.left_out} == {
        (task, length) for task in ("passkey", "counting") for length in (200, 331)
    }
    assert all("no tokens for a part" in note.reason for note in found.left_out)
    assert {part.task for part in found.sets} == {"needle", "key-value", "copy", "induction"}


def test_a_tokenizer_without_words_leaves_everything_out() -> None:
    found = pose_all(Encoder(word_tokenizer(list("+-*/"))), SIZES, 512, seed=0)

    assert found.sets == ()
    assert len(found.left_out) == 6 * 2
    assert any("fewer than 16" in note.reason for note in found.left_out)


def test_a_length_too_short_for_a_task_is_a_note(trained: Encoder) -> None:
    found = pose_all(trained, TASKS["quick"], 40, seed=0)

    assert {note.task for note in found.left_out} >= {"needle", "key-value", "copy", "induction"}
    assert all("do" in note.reason and "40" in note.reason for note in found.left_out)


@dataclass(frozen=True)
class Merging:
    """A tokenizer of characters that makes one token of `ab`."""

    bos_token_id: Any = None
    unk_token_id: Any = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text.replace("ab", "X")]}


def test_a_token_across_the_border_belongs_to_the_answer() -> None:
    context, answer = Encoder(Merging()).split("cca", "bd")

    assert (context, answer) == (tuple(map(ord, "cc")), tuple(map(ord, "Xd")))


def test_answers_that_read_the_same_cannot_be_posed(trained: Encoder) -> None:
    with pytest.raises(CannotPose, match="apart"):
        trained.passage(lambda units: "one two three. " * units, [Question("It is", " four", " four")], 64)


def test_common_prefix_by_hand() -> None:
    assert common_prefix((1, 2, 3), (1, 2, 4)) == 2
    assert common_prefix((1, 2), (1, 2, 4)) == 2
    assert common_prefix((), (1,)) == 0


def test_word_tokens_are_words(trained: Encoder, pico: PicoFactory) -> None:
    texts = [trained.tokenizer.decode([token]) for token in word_tokens(trained)]
    letters = Encoder(load_tokenizer(pico()))

    assert all(text.strip().isalpha() for text in texts)
    assert len(set(word_tokens(letters))) == len(word_tokens(letters)) == 52


def test_filler_holds_no_answer() -> None:
    filler = " ".join((*words.SUBJECTS, *words.VERBS, *words.PLACES, *words.TIMES))

    assert not any(letter.isdigit() for letter in filler)
    assert not set(filler.split()) & {*words.CITIES, *words.KEYS, *words.GOODS}
    assert len({*words.KEYS, *words.GOODS}) == len(words.KEYS) + len(words.GOODS)
    assert words.sentence(Random(3)) == words.sentence(Random(3)) != words.sentence(Random(4))
