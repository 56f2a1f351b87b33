"""Tasks whose prompts are text: needle, passkey, key-value recall, counting."""

from __future__ import annotations

from random import Random

from mla_convert.eval.tasks import words
from mla_convert.eval.tasks.prompts import Encoder, Prompt, Question

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PASSKEY_DIGITS = 5
KEY_EXAMPLES = 2
KEYS_NOT_ASKED = 2
PASSKEY_QUESTIONS = (
    "\nThe pass key is",
    "\nWhat is the pass key? The pass key is",
    "\nNow remember it once more. The pass key is",
    "\nA stranger asks for the pass key. The pass key is",
    "\nThat was the whole story. The pass key is",
    "\nThe door is locked. The pass key is",
)
COUNTING_LAST = range(4_000, 9_000)  # the longest prompt counts some three thousand up to it
COUNTING_STEPS = (1, 2, 3)


def needle(encoder: Encoder, random: Random, length: int) -> list[Prompt]:
    """One prompt for each of `DEPTHS`: a text with a fact about another city at each depth, and a question to one."""
    cities, secrets = random.sample(words.CITIES, len(DEPTHS)), random.sample(words.KEYS, 2 * len(DEPTHS))
    right, wrong = secrets[: len(DEPTHS)], secrets[len(DEPTHS) :]
    facts = [f"The secret word of {city} is {word}." for city, word in zip(cities, right, strict=True)]
    filler = _filler(random, length)

    def build(units: int) -> str:
        # The front sentence may be cut; the first fact stands behind it.
        places = [1 + round(depth * (units - 1)) for depth in DEPTHS]
        return _with(filler[:units][::-1], places, facts)

    questions = [
        Question(f"\nThe secret word of {city} is", f" {word}", f" {other}")
        for city, word, other in zip(cities, right, wrong, strict=True)
    ]
    return encoder.passage(build, questions, length)


def passkey(encoder: Encoder, random: Random, length: int, questions: int) -> list[Prompt]:
    """A number hidden at a seeded place of a text, asked for in several ways."""
    key, wrong = (str(random.randrange(10 ** (PASSKEY_DIGITS - 1), 10**PASSKEY_DIGITS)) for _ in range(2))
    filler, depth = _filler(random, length), random.random()

    fact = f"The pass key is {key}. Remember it: {key} is the pass key."

    def build(units: int) -> str:
        return _with(filler[:units][::-1], [1 + int(depth * (units - 1))], [fact])

    asked = [Question(text, f" {key}", f" {wrong}") for text in PASSKEY_QUESTIONS[:questions]]
    return encoder.passage(build, asked, length)


def key_value(encoder: Encoder, random: Random, length: int, questions: int) -> list[Prompt]:
    """Pairs as JSON writes them at a seeded place of a text; two are repeated as examples, then others asked for."""
    keys = random.sample(words.KEYS, questions + KEY_EXAMPLES + KEYS_NOT_ASKED)
    pairs = [(key, random.choice(words.GOODS)) for key in keys]
    block = "{\n" + "\n".join(f' "{key}": "{value}",' for key, value in pairs) + "\n}"
    filler, depth = _filler(random, length), random.random()

    def build(units: int) -> str:
        return _with(filler[:units][::-1], [1 + int(depth * (units - 1))], [block])

    shown = random.sample(pairs, questions + KEY_EXAMPLES)
    examples = "".join(f'\n "{key}": "{value}",' for key, value in shown[:KEY_EXAMPLES])
    asked = [
        Question(f'\n{{{examples}\n "{key}": "', value, random.choice([word for word in words.GOODS if word != value]))
        for key, value in shown[KEY_EXAMPLES:]
    ]
    return encoder.passage(build, asked, length)


def counting(encoder: Encoder, random: Random, length: int, questions: int) -> list[Prompt]:
    """Numbers in steps of one, two or three, to be continued."""
    step, last = random.choice(COUNTING_STEPS), random.choice(COUNTING_LAST)

    def build(units: int) -> str:
        return ", ".join(str(last - step * back) for back in reversed(range(units))) + ","

    asked = []
    for number in range(questions):
        further = "".join(f" {last + step * ahead}," for ahead in range(1, number + 1))
        right = last + step * (number + 1)
        asked.append(Question(further, f" {right}", f" {right + 10 * random.randint(1, 9)}"))
    return encoder.passage(build, asked, length)


def _with(sentences: list[str], places: list[int], facts: list[str]) -> str:
    """The text with each fact in front of the sentence at its place; places ascend."""
    for place, fact in reversed(list(zip(places, facts, strict=True))):
        sentences.insert(place, fact)
    return " ".join(sentences)


def _filler(random: Random, length: int) -> list[str]:
    """More made-up sentences than fit into `length` tokens."""
    return [words.sentence(random) for _ in range(length // 4 + 2)]
