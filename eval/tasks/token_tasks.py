"""Tasks whose prompts are random tokens: copy and induction."""

from __future__ import annotations

from random import Random

from mla_convert.eval.tasks.prompts import CannotPose, Encoder, Ids, Prompt

COPY_ANSWER = 4
# Fewer tokens than this repeat by chance, so that there is more than one right answer.
SMALLEST_POOL = 16
LARGEST_POOL = 2_000


def word_tokens(encoder: Encoder, random: Random, most: int = LARGEST_POOL) -> Ids:
    """Tokens that are read as letters, in a seeded order.

    Raises:
        CannotPose: If there are too few.
    """
    order = list(range(len(encoder.tokenizer)))
    random.shuffle(order)
    special, found = set(encoder.tokenizer.all_special_ids), []
    for token in order:
        text = encoder.tokenizer.decode([token]).strip()
        if token not in special and text.isascii() and text.isalpha():
            found.append(token)
            if len(found) == most:
                break
    if len(found) < SMALLEST_POOL:
        raise CannotPose(f"{len(found)} of its tokens are words or letters, fewer than {SMALLEST_POOL}")
    return tuple(found)


def copy(encoder: Encoder, random: Random, length: int, questions: int) -> list[Prompt]:
    """A sequence of random tokens, and the same again: the last tokens of the repetition are asked for in turn."""
    pool, body = word_tokens(encoder, random), length - len(encoder.opening)
    half, asked = body // 2, COPY_ANSWER * questions
    if half < 2 * asked:
        raise CannotPose(f"two sequences do not fit into {length} tokens")
    sequence = tuple(random.choices(pool, k=half))
    # A token in front makes an odd length right.
    whole = encoder.opening + tuple(random.choices(pool, k=body % 2)) + sequence + sequence
    prompts = []
    for end in range(length - asked + COPY_ANSWER, length + 1, COPY_ANSWER):
        start = end - COPY_ANSWER
        answer = whole[start:end]
        prompts.append(Prompt(whole[:start], answer, tuple(_other(pool, token, random) for token in answer)))
    return prompts


def induction(encoder: Encoder, random: Random, length: int, questions: int) -> list[Prompt]:
    """Random tokens among which `A B` stands once, and `A` at the end: `B` is asked for."""
    pool, body = word_tokens(encoder, random), length - len(encoder.opening) - 2
    if body < 4 * questions or len(pool) <= 2 * questions:
        raise CannotPose(f"its pairs do not fit into {length} tokens of {len(pool)} words")
    cues, rest = pool[:questions], pool[questions:]
    sequence = random.choices(rest, k=body)
    # Every second place at most, so that no pair lies in another.
    places = [2 * place for place in random.sample(range(body // 2), questions)]
    for cue, place in zip(cues, places, strict=True):
        sequence[place] = cue
    passage = encoder.opening + tuple(sequence)
    pairs = [(cue, sequence[place + 1]) for cue, place in zip(cues, places, strict=True)]
    return [Prompt((*passage, cue), (after,), (_other(rest, after, random),)) for cue, after in pairs]


def _other(pool: Ids, token: int, random: Random) -> int:
    return random.choice([other for other in pool if other != token])
