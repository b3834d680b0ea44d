"""Fuzzy matching against trying every placement."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from app.window.dialogs.fuzzy import score


def naive(query: str, text: str) -> int | None:
    scores = []
    for places in combinations(range(len(text)), len(query)):
        if all(text[p] == c for p, c in zip(places, query, strict=True)):
            total = 0
            for i, p in enumerate(places):
                total += 8 if p == 0 or not text[p - 1].isalnum() else 0
                if i:
                    total += 10 if places[i - 1] == p - 1 else -1
            scores.append(total)
    return max(scores) * 4 - len(text) // 8 if scores else None


@given(st.text("ab", min_size=1, max_size=4), st.text("ab -", max_size=9))
def test_the_best_placement_is_found(query: str, text: str) -> None:
    assert score(query, text) == naive(query, text)


def test_order_counts_and_case_and_spaces_do_not() -> None:
    assert score("opmo", "Open Model…") is not None
    assert score("OP MO", "open model") == score("opmo", "Open Model")
    assert score("mo op", "Open Model") is None
    assert score("", "anything") is not None


def test_beginnings_of_words_win() -> None:
    def best(query: str, *texts: str) -> str:
        return max(texts, key=lambda text: score(query, text) or -99)

    assert best("om", "Open Model", "From", "Bottom") == "Open Model"
    assert best("run", "Run", "Rollback under n", "Truncate") == "Run"
