"""Fixed words that prompts are made of; which of them, and in which order, is a matter of the seed."""

from __future__ import annotations

from random import Random
from typing import Final

SUBJECTS: Final = (
    "The old miller", "A young teacher", "The quiet gardener", "My neighbour", "The tall sailor", "A patient doctor",
    "The village baker", "Her cousin", "The new clerk", "A tired farmer", "The friendly guard", "His aunt",
)  # fmt: skip
VERBS: Final = (
    "walked to", "looked at", "talked about", "came back from", "waited near", "drew a picture of",
    "remembered", "wrote about", "went past", "dreamed of", "returned to", "asked about",
)  # fmt: skip
PLACES: Final = (
    "the river", "the market", "the wooden bridge", "the library", "the harbour", "the garden",
    "the mountain road", "the small station", "the empty field", "the bakery", "the stone tower", "the forest",
)  # fmt: skip
TIMES: Final = (
    "in the morning", "after lunch", "before the rain", "late in the evening", "on a warm day", "during the winter",
    "without a word", "with some friends", "for a short while", "once again", "as usual", "in good spirits",
)  # fmt: skip
CITIES: Final = (
    "Paris", "London", "Berlin", "Rome", "Madrid", "Vienna", "Dublin", "Oslo", "Athens", "Moscow",
    "Cairo", "Tokyo", "Sydney", "Boston", "Chicago", "Toronto",
)  # fmt: skip
GOODS: Final = (
    "apples", "books", "candles", "flowers", "hats", "knives", "lamps", "oranges", "pencils", "shoes",
    "stones", "toys", "bottles", "carpets", "clocks", "horses", "potatoes", "chairs",
)  # fmt: skip
KEYS: Final = (
    "apple", "button", "candle", "desert", "engine", "flame", "ghost", "hammer", "island", "jacket",
    "kitchen", "ladder", "mirror", "needle", "orange", "pencil", "queen", "rocket", "silver", "table",
    "umbrella", "violin", "window", "yellow", "anchor", "basket", "castle", "dragon", "eagle", "feather",
    "guitar", "honey", "iron", "jungle", "kettle", "lemon", "magnet", "night", "ocean", "paper",
)  # fmt: skip
OPENINGS: Final = (
    "The history of the city begins with a small settlement on the banks of the river, where people",
    "Once upon a time there was a young girl who lived with her grandmother in a house near the forest",
    "Water boils at a lower temperature in the mountains than at the sea because the pressure of the air",
    "To make a simple soup for four people, take two onions, three carrots and a handful of",
    "Dear Sir or Madam, I am writing to you about the letter that I received last week from",
    "The three most important things that a student should learn about computers before the first year are",
    "In the year 1869 the first railway across the continent was finished, and the journey from",
    "The main difference between a plant cell and an animal cell can be seen under a microscope: the plant",
)


def sentence(random: Random) -> str:
    """A made-up sentence without digits, with a full stop."""
    return f"{random.choice(SUBJECTS)} {random.choice(VERBS)} {random.choice(PLACES)} {random.choice(TIMES)}."
