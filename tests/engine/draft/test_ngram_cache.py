"""ngram-cache: what it learns, which table speaks, how much evidence each length needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.draft.drafter import Draft, DraftRequest
from engine.draft.lookup_tables import LAX, STRICT, LookupCache, learn, most_frequent, most_likely
from engine.draft.ngram_cache import NgramCache
from engine.model.taps import TargetRows


def cache(**tables: dict) -> NgramCache:
    """static, dynamic: n-gram -> {token: count}."""
    return NgramCache(packed(tables.get("static")), packed(tables.get("dynamic")))


def packed(table: dict | None) -> LookupCache | None:
    if table is None:
        return None
    values, records = [], {}
    for ngram, counts in table.items():
        records[ngram] = len(values)
        values += [*ngram, *[-1] * (4 - len(ngram)), len(counts)]
        values += [number for pair in counts.items() for number in pair]
    return LookupCache(np.array(values, np.int32), records)


def ask(drafter: NgramCache, history: list[int], last: int) -> Draft:
    drafter.observe(0, 0, history, TargetRows(torch.empty(0)))
    (draft,) = drafter.draft([DraftRequest(0, len(history), last, 99)])
    return draft


@given(st.lists(st.integers(0, 3), max_size=12))
def test_every_ngram_with_a_successor_is_learned(tokens):
    table, expected = {}, {}
    learn(table, tokens)
    for n in range(1, 5):
        for start in range(len(tokens) - n):
            counts = expected.setdefault(tuple(tokens[start : start + n]), {})
            counts[tokens[start + n]] = counts.get(tokens[start + n], 0) + 1
    assert table == expected


def test_the_first_look_up_learns_history_and_last():
    drafter = cache()
    draft = ask(drafter, [1, 2, 3, 4, 1, 2], 3)
    assert draft.tokens == [4, 1, 2, 3, 4, 1, 2, 3]
    assert (draft.reason, draft.match_pos, draft.drafter) == ("", None, "ngram-cache")


def test_ngrams_across_two_look_ups_are_not_learned():
    drafter = cache()
    ask(drafter, [1, 2], 3)
    ask(drafter, [1, 2, 3, 4], 5)  # learns 4 -> 5, but not 3 -> 4
    table = drafter._contexts[0].table
    assert table == {(1,): {2: 1}, (2,): {3: 1}, (1, 2): {3: 1}, (4,): {5: 1}}


def test_a_single_new_token_teaches_nothing():
    drafter = cache()
    ask(drafter, [1, 2], 3)
    before = {ngram: dict(counts) for ngram, counts in drafter._contexts[0].table.items()}
    ask(drafter, [1, 2, 3], 4)
    ask(drafter, [1, 2, 3], 4)
    assert drafter._contexts[0].table == before
    assert drafter._contexts[0].n_learned == 4


def test_a_round_in_which_it_was_not_asked_is_caught_up_with():
    drafter = cache()
    ask(drafter, [1], 2)
    ask(drafter, [1, 2, 3, 4, 5], 6)
    assert (3, 4, 5) in drafter._contexts[0].table


def test_sequences_learn_apart_and_are_forgotten():
    drafter = cache()
    ask(drafter, [1, 2, 3, 4, 1, 2], 3)
    drafter.observe(1, 0, [1, 2], TargetRows(torch.empty(0)))
    (other,) = drafter.draft([DraftRequest(1, 2, 3, 9)])
    assert other.reason == "no-match"
    drafter.forget(0)
    assert ask(drafter, [1, 2], 3).reason == "no-match"


def test_two_tokens_are_needed():
    assert ask(cache(), [], 1).reason == "too-short-history"
    assert ask(cache(), [2], 1).reason == "no-match"


@pytest.mark.parametrize(
    ("floor", "length", "samples", "percent"),
    [
        (LAX, 1, 2, 66),
        (LAX, 2, 2, 50),
        (LAX, 3, 1, 50),
        (LAX, 4, 1, 50),
        (STRICT, 1, 4, 75),
        (STRICT, 2, 3, 66),
        (STRICT, 3, 2, 66),
        (STRICT, 4, 2, 66),
    ],
)
def test_evidence_by_length(floor, length, samples, percent):
    ngram = tuple(range(length))

    def drafted(counts):
        return most_likely({ngram: counts}.get, list(ngram), {}, floor)

    assert drafted({7: samples}) == 7
    assert drafted({7: samples - 1}) is None
    assert drafted({7: percent, 8: 100 - percent}) == 7
    assert drafted({7: percent - 1, **{8 + i: 1 for i in range(101 - percent)}}) is None


def test_the_longest_ngram_with_evidence_speaks():
    table = {(4,): {1: 9}, (3, 4): {2: 9}, (1, 2, 3, 4): {3: 9, 4: 9, 5: 9}}
    assert most_likely(table.get, [1, 2, 3, 4], {}, STRICT) == 2
    assert most_likely(table.get, [4], {}, STRICT) == 1


def test_a_static_count_weighs_a_hundred_times():
    counts = {1: 60, 2: 50}
    find = {(5, 6): counts}.get
    assert most_likely(find, [5, 6], {}, LAX) == 1
    assert most_likely(find, [5, 6], {2: 1}, LAX) is None  # 2 is chosen, but 50 of 110 is too few
    assert most_likely({(5, 6): {1: 50, 2: 50}}.get, [5, 6], {2: 1}, LAX) == 2
    assert most_likely({(5, 6): {1: 50, 2: 50}}.get, [5, 6], {1: 1, 2: 2}, LAX) == 2


@pytest.mark.parametrize(
    ("counts", "token"),
    [({}, None), ({7: 1}, None), ({7: 2}, 7), ({7: 1, 8: 1}, 7), ({7: 1, 8: 1, 9: 1}, None)],
)
def test_the_static_table_alone(counts, token):
    assert most_frequent(counts) == token
    drafter = cache(static={(1, 2): counts} if counts else {})
    assert ask(drafter, [9, 1], 2).tokens == ([] if token is None else [token])


def test_context_comes_before_dynamic_and_dynamic_before_static():
    static, dynamic = {(1, 2): {5: 9}}, {(2,): {6: 9}}
    assert ask(cache(static=static, dynamic=dynamic), [9, 1], 2).tokens[0] == 6
    assert ask(cache(static=static), [9, 1], 2).tokens[0] == 5
    drafter = cache(static=static, dynamic=dynamic)
    assert ask(drafter, [1, 2, 7, 1, 2, 7, 1], 2).tokens[0] == 7


def test_drafted_tokens_are_looked_up_in_turn():
    dynamic = {(i,): {i + 1: 4} for i in range(3, 20)}
    draft = ask(cache(dynamic=dynamic), [1, 2], 3)
    assert (draft.tokens, draft.reason) == (list(range(4, 12)), "")
    dynamic.pop((6,))
    draft = ask(cache(dynamic=dynamic), [1, 2], 3)
    assert (draft.tokens, draft.reason) == ([4, 5, 6], "no-match")


def test_an_empty_draft_says_whether_anything_was_known():
    assert ask(cache(), [1, 2], 3).reason == "no-match"
    assert ask(cache(dynamic={(3,): {1: 1}}), [1, 2], 3).reason == "low-count"
