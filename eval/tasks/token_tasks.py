"""Tasks whose prompts are random tokens: copy and induction."""

from __future__ import annotations

from random import Random

from mla_convert.eval.tasks.prompts import CannotPose, Encoder, Ids, Prompt

COPY_ANSWER = 4
COPIES = 4
CUE = 2
# Tokens for each group of a cue and what follows it, so that every group occurs some ten times.
TOKENS_PER_GROUP = 32
# Fewer tokens than this repeat by chance, so that there is more than one right answer.
SMALLEST_POOL = 16
POOL = 1_000
WORD_LETTERS = 3


def word_tokens(encoder: Encoder) -> Ids:
    """Tokens that are read as words, the first of the vocabulary, which in most are the commonest.

    Those that bring their space along are preferred: a row of them is a row of words. Where the vocabulary has not
    `POOL` of those, all that are read as letters are taken.

    Raises:
        CannotPose: If there are fewer than `SMALLEST_POOL` of either.
    """
    special = set(encoder.tokenizer.all_special_ids)
    spaced: list[int] = []
    letters: list[int] = []
    for token in range(len(encoder.tokenizer)):
        text = encoder.tokenizer.decode([token])
        word = text.strip()
        if token in special or not (word.isascii() and word.isalpha()):
            continue
        letters.append(token)
        if text != word and len(word) >= WORD_LETTERS:
            spaced.append(token)
        if len(spaced) == POOL:
            return tuple(spaced)
    if len(letters) < SMALLEST_POOL:
        raise CannotPose(f"{len(letters)} of its tokens are words or letters, fewer than {SMALLEST_POOL}")
    return tuple(letters[:POOL])


def copy(encoder: Encoder, random: Random, length: int, questions: int) -> list[Prompt]:
    """A sequence of random words `COPIES` times: the last tokens of the last copy are asked for in turn."""
    pool, body = word_tokens(encoder), length - len(encoder.opening)
    period, asked = body // COPIES, COPY_ANSWER * questions
    if period < asked:
        raise CannotPose(f"{COPIES} copies of {asked} tokens do not fit into {length}")
    sequence = random.choices(pool, k=period)
    # Tokens in front make up for what the copies leave of the length.
    whole = encoder.opening + tuple(random.choices(pool, k=body % COPIES) + COPIES * sequence)
    prompts = []
    for start in range(length - asked, length, COPY_ANSWER):
        answer = whole[start : start + COPY_ANSWER]
        prompts.append(Prompt(whole[:start], answer, tuple(_other(pool, token, random) for token in answer)))
    return prompts


def induction(encoder: Encoder, random: Random, length: int, questions: int) -> list[Prompt]:
    """Groups `A B` in random order, again and again, and an `A` at the end: its `B` is asked for.

    `A` is two random words and `B` a third, no word being in two groups. Small models do not get further than one
    word that stands once, so that the harder form would say nothing of them.
    """
    pool, body = word_tokens(encoder), length - len(encoder.opening)
    groups, width = max(questions + 1, length // TOKENS_PER_GROUP), CUE + 1
    if body < 3 * groups * width:
        raise CannotPose(f"{groups} groups of {width} tokens do not fit three times into {length}")
    if len(pool) < groups * width:
        raise CannotPose(f"{len(pool)} of its tokens are words or letters, fewer than {groups * width}")
    words = random.sample(pool, groups * width)
    known = [tuple(words[at : at + width]) for at in range(0, len(words), width)]
    order: list[int] = []
    while len(order) * width < body - width:
        order.extend(random.sample(range(groups), groups))
    # From the front as much is cut off as makes the length right.
    passage = [token for group in order for token in known[group]][width - body :]
    return [
        Prompt((*encoder.opening, *passage, *group[:CUE]), group[CUE:], (known[number - 1][CUE],))
        for number, group in enumerate(known[:questions])
    ]


def _other(pool: Ids, token: int, random: Random) -> int:
    return random.choice([other for other in pool if other != token])
