"""ngram-simple on histories made by hand, and against the rules spelt out."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.draft.drafter import Draft, DraftRequest
from engine.draft.ngram_drafter import NgramSizes
from engine.draft.ngram_map import NgramSimple
from engine.model.layers import TargetRows


def draft_of(history: list[int], last: int, n: int, m: int) -> Draft:
    drafter = NgramSimple(NgramSizes(n, m))
    drafter.begin(0, history[:2])
    drafter.observe(0, 2, history[2:], TargetRows(torch.empty(0)))
    (draft,) = drafter.draft([DraftRequest(0, len(history), last, 99)])
    assert draft.drafter == "ngram-simple"
    assert not draft.probs
    return draft


def test_the_history_must_be_longer_than_ngram_draft_and_one():
    # L = 6 = n + m + 1 is too short, L = 7 is not; the n-gram is 1 2
    assert draft_of([9, 1, 2, 3, 4, 1], 2, 2, 3).reason == "too-short-history"
    found = draft_of([9, 8, 1, 2, 3, 4, 1], 2, 2, 3)
    assert (found.tokens, found.match_pos, found.reason) == ([3, 4, 1], 2, "")


def test_the_latest_occurrence_wins():
    found = draft_of([9, 1, 2, 3, 3, 1, 2, 4, 4, 4, 1], 2, 2, 3)
    assert (found.tokens, found.match_pos) == ([4, 4, 4], 5)


def test_the_ngram_ends_in_the_token_not_yet_decoded():
    assert draft_of([9, 1, 2, 3, 3, 3, 3, 1], 5, 2, 3).reason == "no-match"


def test_position_0_is_no_match():
    assert draft_of([1, 2, 3, 4, 5, 6, 7, 1], 2, 2, 3).reason == "no-match"
    assert draft_of([0, 1, 2, 3, 4, 5, 6, 7, 1], 2, 2, 3).match_pos == 1


def test_the_match_starts_before_the_last_n_plus_1_tokens():
    # L = 8, n = 2: a start of 5 may match, one of 6 may not (all of it repeats 7 7)
    found = draft_of([9, 8, 6, 5, 4, 7, 7, 7], 7, 2, 1)
    assert (found.match_pos, found.reason, found.n_raw) == (5, "copy<n", 1)
    assert draft_of([9, 8, 6, 5, 4, 3, 7, 7], 7, 2, 1).reason == "no-match"


def test_fewer_tokens_than_the_ngram_are_no_draft():
    # the match at 4 leaves 2 tokens: enough for n = 2, not for n = 3
    found = draft_of([9, 8, 9, 9, 1, 2, 3, 1], 2, 2, 3)
    assert (found.tokens, found.n_raw, found.reason) == ([3, 1], 0, "history-end")
    assert draft_of([9, 8, 9, 9, 1, 2, 3, 4, 1, 2], 3, 3, 4).reason == "history-end"
    short = draft_of([9, 8, 9, 9, 9, 1, 1, 1, 1], 1, 3, 4)
    assert (short.tokens, short.match_pos, short.n_raw, short.reason) == ([], 5, 1, "copy<n")


def test_an_ngram_of_one_token():
    assert draft_of([9, 5, 6, 7], 5, 1, 1).tokens == [6]


def test_a_sequence_that_ended_is_forgotten():
    drafter = NgramSimple(NgramSizes(1, 1))
    drafter.begin(0, [9, 5, 6, 7])
    drafter.forget(0)
    drafter.observe(0, 0, [1, 2, 3, 4], TargetRows(torch.empty(0)))
    (draft,) = drafter.draft([DraftRequest(0, 4, 5, 9)])
    assert draft.reason == "no-match"


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(0, 2),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_every_draft_follows_the_rules(history, last, n, m):
    draft = draft_of(history, last, n, m)
    length, expected = len(history), []
    if length > n + m + 1:
        pattern = [*history[length - n + 1 :], last] if n > 1 else [last]
        for j in range(length - n - 1, 0, -1):
            if history[j : j + n] == pattern:
                copy = min(m, length - (j + n))
                expected = history[j + n : j + n + copy] if copy >= n else []
                break
    assert draft.tokens == expected
