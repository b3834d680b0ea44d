"""ngram-mod: the pool, when it learns, when it forgets, how long a draft becomes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draft import ngram_mod
from engine.draft.drafter import Draft, DraftRequest
from engine.draft.ngram_mod import EMPTY, N_ENTRIES, NgramMod, NgramModOptions, NgramPool, entry_of
from engine.model.layers import TargetRows


def entry(ngram: list[int]) -> int:
    """The fold in 64 bits, as specified."""
    value = 0
    for token in ngram:
        value = (value * 6364136223846793005 + token) % 2**64
    return value % (4 * 2**20)


def mod(n_match: int = 2, n_min: int = 0, n_max: int = 4) -> NgramMod:
    return NgramMod(NgramModOptions(n_match, n_min, n_max))


def ask(drafter: NgramMod, history: list[int], last: int, seq: int = 0) -> Draft:
    drafter.observe(seq, 0, history, TargetRows(torch.empty(0)))
    (draft,) = drafter.draft([DraftRequest(seq, len(history), last, 99)])
    return draft


def run(n: int, start: int = 1000) -> list[int]:
    return list(range(start, start + n))


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30))
def test_entries_are_a_64_bit_fold(ngram):
    assert entry_of(ngram) == entry(ngram)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=0, max_size=60), st.integers(1, 5))
def test_the_pool_holds_what_a_dictionary_holds(tokens, n):
    pool, expected = NgramPool(n), {}
    pool.add(tokens)
    for i in range(len(tokens) - n):
        expected[entry(tokens[i : i + n])] = tokens[i + n]
    assert pool.n_used == len(expected)
    assert {int(i): int(pool._entries[i]) for i in np.flatnonzero(pool._entries != EMPTY)} == (
        expected
    )
    window, found = list(tokens[:n]), []
    while len(window) >= n and len(found) < 20:
        token = expected.get(entry(window[-n:]))
        if token is None:
            break
        found.append(token)
        window.append(token)
    if len(tokens) >= n:
        assert pool.follow(tokens[:n], 20) == found


def test_the_pool_has_4_mi_entries():
    assert N_ENTRIES == 4 * 2**20
    assert NgramPool(1)._entries.nbytes == 16 * 2**20


def test_the_prompt_is_learned_at_once_and_its_last_ngram_later():
    drafter = mod()
    prompt = [1, 2, 3, 4, 5]
    drafter.begin(0, prompt)
    assert ask(drafter, prompt, 9).reason == "pool-miss"
    assert ask(drafter, [*prompt, 1], 2).tokens == [3, 4, 5]
    assert ask(drafter, [*prompt, 4], 5).reason == "pool-miss"


def test_a_prompt_shorter_than_the_ngram_teaches_nothing():
    drafter = mod(n_match=4)
    drafter.begin(0, [1, 2, 3])
    assert drafter.pool.n_used == 0
    assert ask(drafter, [1, 2, 3], 4).reason == "too-short-history"
    assert ask(drafter, [1, 2, 3, 4], 5).reason == "pool-miss"


def test_new_tokens_are_learned_once_more_than_32_lie_behind():
    drafter = mod()
    prompt = run(4)
    drafter.begin(0, prompt)
    added_to = len(prompt) - 2
    exactly = [*prompt, *run(added_to + 32 - 4, 2000)]
    assert len(exactly) - added_to == 32
    ask(drafter, exactly, 7)
    assert drafter.pool.n_used == 2
    ask(drafter, [*exactly, 7], 8)
    assert drafter.pool.n_used == len(exactly) + 1 - 2


def test_look_ups_go_on_with_what_they_found():
    drafter = mod(n_match=3, n_max=5)
    prompt = [*run(9), 1]
    drafter.begin(0, prompt)
    full = ask(drafter, [*prompt, 1000, 1001], 1002)
    assert (full.tokens, full.reason) == (run(5, 1003), "")
    cut = ask(drafter, [*prompt, 1003, 1004], 1005)
    assert (cut.tokens, cut.reason, cut.match_pos) == ([1006, 1007, 1008, 1], "pool-miss", None)


def test_a_miss_before_n_min_is_no_draft():
    prompt = [*run(9), 1]
    for n_min, tokens, reason in ((4, 4, "pool-miss"), (5, 0, "n_min")):
        drafter = mod(n_match=3, n_min=n_min, n_max=5)
        drafter.begin(0, prompt)
        found = ask(drafter, [*prompt, 1003, 1004], 1005)
        assert (len(found.tokens), found.n_raw, found.reason) == (
            tokens,
            4 * (reason == "n_min"),
            reason,
        )


def test_n_min_above_n_max_counts_only_where_a_look_up_misses():
    drafter = mod(n_match=3, n_min=48, n_max=2)
    drafter.begin(0, run(9))
    assert ask(drafter, run(11), 1002).reason == "pool-miss"
    assert ask(drafter, [*run(9), 1000, 1001], 1002).tokens == [1003, 1004]


def test_no_tokens_wanted_is_a_reason():
    drafter = mod(n_max=0)
    drafter.begin(0, run(9))
    assert ask(drafter, run(9), 1).reason == "n_max"


def test_later_ngrams_overwrite_earlier_ones():
    drafter = mod()
    drafter.begin(0, [1, 2, 3, 1, 2, 4, 9])
    assert ask(drafter, [0, 1], 2).tokens[0] == 4


def test_a_pool_a_quarter_full_is_emptied_at_begin(monkeypatch):
    monkeypatch.setattr(ngram_mod, "MOST_OCCUPANCY", 6 / N_ENTRIES)
    drafter = mod()
    drafter.begin(0, run(8))
    assert drafter.pool.n_used == 6  # the limit itself is not too much
    drafter.begin(1, run(3, 2000))
    assert drafter.pool.n_used == 0
    assert ask(drafter, run(3, 2000), 2000, seq=1).reason == "pool-miss"


def test_the_limit_of_the_pool_is_a_quarter():
    assert ngram_mod.MOST_OCCUPANCY == 0.25


def test_sequences_share_the_pool_and_it_outlives_them():
    drafter = mod()
    drafter.begin(0, run(9))
    drafter.forget(0)
    drafter.begin(1, [5, 6])
    assert ask(drafter, [5, 1000], 1001, seq=1).tokens == run(4, 1002)


def verified(drafter: NgramMod, *accepted: int) -> int:
    """Draft 4 tokens and accept that many, for each; entries in use afterwards."""
    for n in accepted:
        assert len(ask(drafter, [1, 1000], 1001).tokens) == 4
        drafter.accept(0, n, is_other=False)
    return drafter.pool.n_used


def test_five_bad_drafts_in_a_row_empty_the_pool():
    drafter = mod()
    drafter.begin(0, run(12))
    assert verified(drafter, 0, 0, 0, 0) == 10
    assert verified(drafter, 0) == 0


def test_a_quarter_accepted_is_not_bad_and_breaks_the_row():
    drafter = mod()
    drafter.begin(0, run(12))
    assert verified(drafter, 0, 0, 0, 0, 1, 0, 0, 0, 0) == 10
    assert verified(drafter, 0) == 0


def test_the_row_belongs_to_the_drafts_of_this_drafter():
    drafter = mod()
    drafter.begin(0, run(12))
    verified(drafter, 0, 0, 0, 0)
    drafter.accept(0, 0, is_other=True)
    assert ask(drafter, [1, 2], 3).reason == "pool-miss"
    drafter.accept(0, 0, is_other=False)
    assert drafter.pool.n_used == 10


def test_an_emptied_pool_learns_the_sequence_anew():
    drafter = mod()
    text = [*run(40), 1]
    drafter.begin(0, text)
    for _ in range(5):
        ask(drafter, [*text, 1000], 1001)
        drafter.accept(0, 0, is_other=False)
    assert drafter.pool.n_used == 0
    assert ask(drafter, [*text, 1000], 1001).tokens == run(4, 1002)


@pytest.mark.parametrize("cut_to", [1, 3])
def test_a_draft_cut_by_the_limit_is_judged_by_its_own_length(cut_to):
    drafter = mod(n_max=8)
    drafter.begin(0, run(20))
    for _ in range(5):
        ask(drafter, [1, 1000], 1001)
        drafter.accept(0, cut_to, is_other=False)
    assert (drafter.pool.n_used == 0) is (cut_to / 8 < 0.25)
