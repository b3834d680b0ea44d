"""Functions on numbers and strings that the demo models are taught."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

from tests.demo_training.texts.functions import WORDS, FunctionFamily, Inputs

_NOUNS = ("apple", "banana", "garden", "window", "music", "river", "summer", "paper", "hello")
_PALINDROMES = ("level", "radar", "noon", "civic", "kayak")
_COLOURS = ("red", "blue", "green", "yellow", "white")
_NUMBER = ("n", "number", "value")


def _colours(rng: Random) -> tuple[str]:
    a, b = rng.sample(_COLOURS, 2)
    return (f"{a} {b} {a}",)


def _noun(rng: Random) -> tuple[str]:
    return (rng.choice(_NOUNS),)


def _mirrored(rng: Random) -> tuple[str]:
    return (rng.choice(rng.choice([_NOUNS, _PALINDROMES])),)


def _below(stop: int, start: int = 0) -> Inputs:
    return lambda rng: (rng.randrange(start, stop),)


def _clamped(rng: Random) -> tuple[int, int, int]:
    return rng.choice([(3, 5, 8), (9, 5, 8), (6, 5, 8), (1, 2, 4), (7, 2, 4), (3, 2, 4)])


def _fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


ON_VALUES = (
    FunctionFamily(
        ("count_vowels", "vowel_count", "number_of_vowels"),
        (WORDS,),
        (
            "Return the number of vowels in $p.",
            "Count the vowels of $p.",
            "Count the letters of $p that are vowels.",
        ),
        """
    $count = 0
    for $x in $p.lower():
        if $x in "aeiou":
            $count += 1
    return $count
""",
        lambda word: sum(letter in "aeiou" for letter in word),
        _noun,
        {"count": ("count", "total", "result"), "x": ("letter", "char", "c")},
    ),
    FunctionFamily(
        ("is_palindrome", "reads_both_ways", "is_mirrored"),
        (WORDS,),
        (
            "Return True if $p is the same backwards.",
            "Tell whether $p reads the same from both ends.",
            "Compare $p with its mirror image.",
        ),
        """
    $left, $right = 0, len($p) - 1
    while $left < $right:
        if $p[$left] != $p[$right]:
            return False
        $left += 1
        $right -= 1
    return True
""",
        lambda word: word == word[::-1],
        _mirrored,
        {"left": ("left", "start", "i"), "right": ("right", "end", "j")},
    ),
    FunctionFamily(
        ("factorial", "fact", "product_up_to"),
        (_NUMBER,),
        (
            "Return the product of all numbers up to $p.",
            "Return $p factorial.",
            "Multiply the numbers from 1 to $p.",
        ),
        """
    $result = 1
    for $i in range(2, $p + 1):
        $result *= $i
    return $result
""",
        math.factorial,
        _below(6),
        {"result": ("result", "product", "total"), "i": ("i", "k", "factor")},
    ),
    FunctionFamily(
        ("fibonacci", "fib", "nth_fibonacci"),
        (_NUMBER,),
        (
            "Return the Fibonacci number at place $p.",
            "Add the last two numbers $p times.",
            "Count up the Fibonacci numbers to $p.",
        ),
        """
    $a, $b = 0, 1
    for _ in range($p):
        $a, $b = $b, $a + $b
    return $a
""",
        _fibonacci,
        _below(9),
        {"a": ("a", "last", "first"), "b": ("b", "next_one", "second")},
    ),
    FunctionFamily(
        ("gcd", "greatest_divisor", "common_divisor"),
        (("a", "first", "x"), ("b", "second", "y")),
        (
            "Return the greatest common divisor of $p and $q.",
            "Find the largest number that divides $p and $q.",
            "Apply the rule of Euclid to $p and $q.",
        ),
        """
    while $q:
        $p, $q = $q, $p % $q
    return $p
""",
        math.gcd,
        lambda rng: rng.choice([(6, 4), (9, 6), (8, 2), (7, 5), (4, 8), (6, 3), (5, 3)]),
    ),
    FunctionFamily(
        ("is_prime", "has_no_divisor", "prime_number"),
        (_NUMBER,),
        (
            "Return True if $p is a prime number.",
            "Tell whether $p is prime.",
            "Try all divisors of $p up to its root.",
        ),
        """
    if $p < 2:
        return False
    $i = 2
    while $i * $i <= $p:
        if $p % $i == 0:
            return False
        $i += 1
    return True
""",
        lambda n: n > 1 and all(n % i for i in range(2, n)),
        _below(10, 1),
        {"i": ("i", "divisor", "k")},
    ),
    FunctionFamily(
        ("count_words", "word_count", "word_numbers"),
        (("text", "line", "sentence"),),
        (
            "Return how often each word of $p occurs.",
            "Count the words of $p.",
            "Return a dict from the words of $p to their numbers.",
        ),
        """
    $counts = {}
    for $word in $p.split():
        $counts[$word] = $counts.get($word, 0) + 1
    return $counts
""",
        lambda text: dict(Counter(text.split())),
        _colours,
        {"counts": ("counts", "result", "found"), "word": ("word", "part", "key")},
    ),
    FunctionFamily(
        ("clamp", "limit", "keep_between"),
        (("value", "number", "x"), ("low", "minimum", "lower"), ("high", "maximum", "upper")),
        (
            "Return $p, but at least $q and at most $r.",
            "Keep $p between $q and $r.",
            "Cut $p off at $q and $r.",
        ),
        """
    if $p < $q:
        return $q
    if $p > $r:
        return $r
    return $p
""",
        lambda value, low, high: max(low, min(value, high)),
        _clamped,
    ),
)
