"""Functions on lists that the demo models are taught."""

from __future__ import annotations

from random import Random

from tests.demo_training.texts.functions import ELEMENT, LISTS, FunctionFamily

_SMALL, _LARGE = ("smaller", "left", "low"), ("larger", "right", "high")
# few enough that a small model learns the order of any three
_DIGITS = range(1, 7)


def _three(rng: Random) -> tuple[list[int]]:
    return (rng.sample(_DIGITS, 3),)


def _rising(rng: Random) -> tuple[list[int], int]:
    numbers = sorted(rng.sample(_DIGITS, 3))
    return numbers, rng.choice(numbers)


def _twice(rng: Random) -> tuple[list[int]]:
    a, b = rng.sample(range(1, 10), 2)
    return (rng.choice([[a, b, a], [a, a, b], [a, b, b]]),)


def _nested(rng: Random) -> tuple[list[list[int]]]:
    a, b, c = rng.sample(range(1, 10), 3)
    return (rng.choice([[[a, b], [c]], [[a], [b, c]]]),)


ON_LISTS = (
    FunctionFamily(
        ("quicksort", "quick_sort", "sort_list", "sort_numbers"),
        (LISTS,),
        (
            "Return the items of $p in rising order.",
            "Sort $p around its first item.",
            "Return a sorted copy of $p.",
        ),
        """
    if len($p) < 2:
        return $p
    $pivot = $p[0]
    $small = [$x for $x in $p[1:] if $x < $pivot]
    $large = [$x for $x in $p[1:] if $x >= $pivot]
    return $f($small) + [$pivot] + $f($large)
""",
        sorted,
        _three,
        {"pivot": ("pivot", "first", "middle"), "small": _SMALL, "large": _LARGE, "x": ("x", "n")},
    ),
    FunctionFamily(
        ("bubble_sort", "sort_in_place", "swap_sort"),
        (LISTS,),
        (
            "Sort $p by swapping neighbours.",
            "Sort $p in place and return it.",
            "Let the large items of $p rise to the end.",
        ),
        """
    for $i in range(len($p)):
        for $j in range(len($p) - 1 - $i):
            if $p[$j] > $p[$j + 1]:
                $p[$j], $p[$j + 1] = $p[$j + 1], $p[$j]
    return $p
""",
        sorted,
        _three,
        {"i": ("i", "end"), "j": ("j", "k")},
    ),
    FunctionFamily(
        ("largest", "find_max", "highest", "find_largest"),
        (LISTS,),
        (
            "Return the largest of $p.",
            "Find the greatest item of $p.",
            "Look through $p for the largest.",
        ),
        """
    $best = $p[0]
    for $x in $p[1:]:
        if $x > $best:
            $best = $x
    return $best
""",
        max,
        _three,
        {"best": ("best", "result", "top"), "x": ELEMENT},
    ),
    FunctionFamily(
        ("smallest", "find_min", "lowest", "find_smallest"),
        (LISTS,),
        (
            "Return the smallest of $p.",
            "Find the least item of $p.",
            "Look through $p for the smallest.",
        ),
        """
    $best = $p[0]
    for $x in $p[1:]:
        if $x < $best:
            $best = $x
    return $best
""",
        min,
        _three,
        {"best": ("best", "result", "least"), "x": ELEMENT},
    ),
    FunctionFamily(
        ("reverse", "reverse_list", "backwards"),
        (LISTS,),
        (
            "Return $p from back to front.",
            "Return a copy of $p in reverse order.",
            "Turn $p around.",
        ),
        """
    $result = []
    for $x in $p:
        $result.insert(0, $x)
    return $result
""",
        lambda items: items[::-1],
        _three,
        {"result": ("result", "turned", "output"), "x": ELEMENT},
    ),
    FunctionFamily(
        ("unique", "remove_duplicates", "without_repeats"),
        (LISTS,),
        (
            "Return each item of $p once.",
            "Return $p without repeated items.",
            "Keep the first of equal items in $p.",
        ),
        """
    $seen = set()
    $result = []
    for $x in $p:
        if $x not in $seen:
            $seen.add($x)
            $result.append($x)
    return $result
""",
        lambda items: list(dict.fromkeys(items)),
        _twice,
        {"seen": ("seen", "known"), "result": ("result", "kept", "output"), "x": ELEMENT},
    ),
    FunctionFamily(
        ("flatten", "join_lists", "merge_lists"),
        (("lists", "rows", "groups", "parts"),),
        (
            "Return one list with the items of all $p.",
            "Join $p into one list.",
            "Put the items of $p into a single list.",
        ),
        """
    $result = []
    for $row in $p:
        for $x in $row:
            $result.append($x)
    return $result
""",
        lambda lists: [item for row in lists for item in row],
        _nested,
        {"result": ("result", "flat", "output"), "row": ("row", "group", "part"), "x": ELEMENT},
    ),
    FunctionFamily(
        ("binary_search", "find_index", "search_sorted"),
        (LISTS, ("target", "wanted", "key")),
        (
            "Return the index of $q in the sorted $p, or -1.",
            "Find $q in $p by halving.",
            "Search $p for $q and return where it is.",
        ),
        """
    $low, $high = 0, len($p) - 1
    while $low <= $high:
        $middle = ($low + $high) // 2
        if $p[$middle] == $q:
            return $middle
        if $p[$middle] < $q:
            $low = $middle + 1
        else:
            $high = $middle - 1
    return -1
""",
        lambda items, target: items.index(target),
        _rising,
        {
            "low": ("low", "left", "start"),
            "high": ("high", "right", "end"),
            "middle": ("middle", "mid"),
        },
    ),
    FunctionFamily(
        ("even_numbers", "keep_even", "only_even"),
        (LISTS,),
        (
            "Return the even items of $p.",
            "Leave the odd items of $p out.",
            "Keep what 2 divides of $p.",
        ),
        """
    $result = []
    for $x in $p:
        if $x % 2 == 0:
            $result.append($x)
    return $result
""",
        lambda items: [item for item in items if item % 2 == 0],
        _three,
        {"result": ("result", "even", "kept"), "x": ELEMENT},
    ),
)
