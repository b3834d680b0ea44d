"""Fuzzy matching of a few typed letters against texts, with a score for each match."""

from __future__ import annotations

_FIRST_OF_WORD = 8
_NEXT_TO_LAST = 10
_GAP = 1


def score(query: str, text: str) -> int | None:
    """How well the letters of the query, in order, fit into the text; None if they do not.

    Spaces and case do not count. Letters at the beginning of a word and letters side by side
    are worth more; so is a text with little beside them. The best of all placements is taken.
    """
    letters = query.replace(" ", "").lower()
    body = text.lower()
    # best[j]: the best score with the letters so far, the last of them at j
    best: dict[int, int] = {}
    for i, letter in enumerate(letters):
        following: dict[int, int] = {}
        top: int | None = None
        for j, char in enumerate(body):
            before = best.get(j - 1)
            if char == letter:
                own = _FIRST_OF_WORD if j == 0 or not body[j - 1].isalnum() else 0
                ways = [] if i else [own]
                if top is not None:
                    ways.append(top + own - _GAP)
                if before is not None:
                    ways.append(before + own + _NEXT_TO_LAST)
                if ways:
                    following[j] = max(ways)
            if before is not None and (top is None or before > top):
                top = before
        if not following:
            return None
        best = following
    return max(best.values(), default=0) * 4 - len(body) // 8
