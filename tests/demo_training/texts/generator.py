"""The endless text: `python -m tests.demo_training.texts.generator` prints some of it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from random import Random

from resources import demo_prompts
from tests.demo_training.texts.functions import function
from tests.demo_training.texts.on_lists import ON_LISTS
from tests.demo_training.texts.on_values import ON_VALUES
from tests.demo_training.texts.programs import PROGRAMS, program
from tests.demo_training.texts.stories import story

P_STORY = 0.45
FURTHER = (
    "def find_max(data):",
    "class Queue:\n    def __init__(self):\n        self._values = []\n\n    def put(self, item):",
    "def is_prime(number):",
    "def count_words(line):",
    "def gcd(a, b):",
    "Once upon a time there was a curious duck named Paul",
    "All night the wind blew around the house of Nora the goat.",
    "One rainy afternoon Leo the cat fell over a stone.",
)
"""Prompts in addition to the bundled ones, of which no text of the training begins."""
FAMILIES = ON_LISTS + ON_VALUES


def texts(seed: int) -> Iterator[str]:
    """Stories and programs without end; the same for the same seed.

    No text begins with a bundled prompt or one of `FURTHER`: what those say first, who it is about
    or under what names, is kept for measuring.
    """
    rng = Random(seed)
    kept = (*demo_prompts(), *FURTHER)
    while True:
        text = _text(rng)
        if not text.startswith(kept):
            yield text


def _text(rng: Random) -> str:
    if rng.random() < P_STORY:
        return story(rng)
    number = rng.randrange(len(FAMILIES) + len(PROGRAMS))
    if number < len(FAMILIES):
        return function(FAMILIES[number], rng)
    return program(PROGRAMS[number - len(FAMILIES)], rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=8, help="how many texts")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for text in islice(texts(args.seed), args.n):
        print("=" * 80, text, sep="\n")


if __name__ == "__main__":
    main()
