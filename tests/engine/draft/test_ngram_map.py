"""ngram-map-k and -k4v: every rule on a history made by hand, and against the rules spelt out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draft.drafter import Draft, DraftRequest
from engine.draft.ngram_drafter import NgramSizes
from engine.draft.ngram_map import MOST_HITS, N_SLOTS, NgramMap, slot_of
from engine.model.layers import TargetRows

A, B, X, Y, Z = 1, 2, 7, 8, 9


class Spoken:
    """A drafter that reads a growing text. `ask` appends tokens, the last one not decoded."""

    def __init__(self, prompt: list[int], n: int, m: int, min_hits: int = 1, k4v: bool = False):
        self.drafter = NgramMap(NgramSizes(n, m, min_hits), with_values=k4v)
        self.tokens = list(prompt)
        self.drafter.begin(0, prompt)

    def ask(self, *tokens: int) -> Draft:
        *decoded, last = tokens
        self.say(*decoded)
        (draft,) = self.drafter.draft([DraftRequest(0, len(self.tokens), last, 99)])
        self.say(last)
        return draft

    def say(self, *tokens: int) -> None:
        self.drafter.observe(0, len(self.tokens), list(tokens), TargetRows(torch.empty(0)))
        self.tokens += tokens

    def accept(self, n: int, *, is_other: bool = False) -> None:
        self.drafter.accept(0, n, is_other=is_other)


def filler(n: int, start: int = 100) -> list[int]:
    return list(range(start, start + n))


@pytest.mark.parametrize("k4v", [False, True])
def test_1_a_history_below_2n_plus_m_is_too_short(k4v):
    # n = 2, m = 2: 6 decoded tokens are enough, 5 are not
    assert Spoken([Z, A, B, X, A], 2, 2, k4v=k4v).ask(B).reason == "too-short-history"
    assert Spoken([Z, A, B, X, Y, A], 2, 2, k4v=k4v).ask(B).tokens == [X, Y]
    # the match at 2 is above L - n - m - 1
    assert Spoken([Z, Z, A, B, X, A], 2, 2, k4v=k4v).ask(B).reason == "no-match"


def test_2_the_key_ends_in_the_token_not_yet_decoded():
    text = Spoken([Z, Z, A, B, X, Y, *filler(9)], 2, 2)
    assert text.ask(A, X).reason == "no-match"
    found = text.ask(A, B)
    assert (found.tokens, found.match_pos, found.reason) == ([X, Y], 2, "")


def test_3_without_a_table_entry_the_latest_occurrence_of_the_prompt_wins():
    prompt = [Z, A, B, X, X, A, B, Y, Y, *filler(9), A]
    assert Spoken(prompt, 2, 2).ask(B).match_pos == 5


def test_3_with_a_table_entry_the_one_that_was_entered_wins():
    text = Spoken([Z, A, B, X, X, A, B, Y, Y, *filler(9), A], 2, 2)
    text.ask(B)
    # the scan enters the latest first and a slot keeps what it has
    text.say(A, B, Z, Z, *filler(9))
    assert text.ask(A, B).match_pos == 5


def test_3_a_table_entry_too_near_the_end_is_not_used():
    # a scan may end at L - n - m - 1 = 3, an entry must lie below it
    drafter = NgramMap(NgramSizes(2, 2), with_values=False)
    drafter.begin(0, [Z, Z, Z, A, B, X, Y, A])
    request = [DraftRequest(0, 8, B, 9)]
    assert [drafter.draft(request)[0].reason for _ in range(2)] == ["", "no-match"]


def test_3_the_prompt_is_searched_before_the_answer():
    text = Spoken([Z, Z, A, B, X, X, *filler(9)], 2, 2)
    text.say(A, B, Y, Y, *filler(9, 200))
    assert text.ask(A, B).match_pos == 2
    answer_only = Spoken([Z, Z, *filler(9)], 2, 2)
    answer_only.say(Z, A, B, Y, Y, A, B, X, X, *filler(9, 200))
    assert answer_only.ask(A, B).match_pos == 16  # the latest of the answer


def test_3_and_4_what_was_entered_is_not_scanned_again():
    text = Spoken([Z, Z, A, B, X, X, *filler(9)], 2, 2)
    text.ask(99)
    drafter_map = text.drafter._maps[0]
    assert drafter_map.table.last == 10  # 15 decoded tokens - n - m - 1
    drafter_map.table._slots.clear()
    assert text.ask(A, B).reason == "no-match"


def test_4_a_hash_collision_is_no_match_and_keeps_the_first():
    # two 1-grams of one slot: the second is never found through the table
    other = A + N_SLOTS * pow(1, 1)
    assert slot_of([A]) == slot_of([other])
    text = Spoken([Z, A, X, X, *filler(9)], 1, 1)
    assert text.ask(99).reason == "no-match"
    text.say(other, Y, *filler(9, 300))
    assert text.ask(98).reason == "no-match"  # enters the colliding n-gram: the slot is taken
    text.say(*filler(9, 400))
    assert text.ask(other).reason == "no-match"
    assert text.ask(A).tokens == [X]


def test_slots_are_a_32_bit_fold():
    # (5 * 2654435761 + 7) mod 2^32 mod 2^18
    assert slot_of([5, 7]) == (5 * 2654435761 + 7) % 2**32 % 2**18
    assert N_SLOTS == 2**18


def test_6_hits_are_counted_and_capped():
    text = Spoken([Z, A, B, X, Y, *filler(9)], 2, 2)
    for hits in (1, 2, 3):
        text.ask(A, B)
        assert text.drafter._map(0).keys[A, B].hits == hits
    text.drafter._map(0).keys[A, B].hits = MOST_HITS
    text.ask(A, B)
    assert text.drafter._map(0).keys[A, B].hits == MOST_HITS == 16380


@pytest.mark.parametrize("k4v", [False, True])
def test_7_and_8_a_draft_is_no_longer_than_what_was_accepted_before(k4v):
    text = Spoken([Z, A, B, X, Y, Z, *filler(9)], 2, 3, k4v=k4v)
    assert text.ask(A, B).tokens == [X, Y, Z]
    text.accept(3)
    assert text.ask(A, B).tokens == [X, Y, Z]
    text.accept(1)
    found = text.ask(A, B)
    assert (found.tokens, found.n_raw, found.reason) == ([X], 3, "accepted-before")
    text.accept(0, is_other=True)
    assert text.ask(A, B).tokens == [X]
    text.accept(0)
    found = text.ask(A, B)
    assert (found.tokens, found.n_raw, found.reason) == ([], 3, "muted")
    assert text.ask(A, B).reason == "muted"


def test_feedback_belongs_to_the_latest_look_up_only():
    text = Spoken([Z, A, B, X, Y, *filler(9)], 2, 2)
    text.ask(A, B)
    assert text.ask(99).reason == "no-match"
    text.accept(0)
    assert text.ask(A, B).tokens == [X, Y]


@pytest.mark.parametrize("k4v", [False, True])
def test_min_hits_holds_back_k4v_only(k4v):
    text = Spoken([Z, A, B, X, Y, *filler(9)], 2, 2, min_hits=3, k4v=k4v)
    reasons = [text.ask(A, B).reason for _ in range(3)]
    assert reasons == (["min-hits", "min-hits", ""] if k4v else ["", "", ""])


def continuations(*pairs: tuple[int, int]) -> list[int]:
    """A prompt in which A B goes on with each pair, the last of them looked up first."""
    return [Z, *(t for pair in pairs for t in (A, B, *pair)), *filler(9)]


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([(X, X)], ""),
        ([(X, X), (Y, Y)], "ambiguous"),  # 1 against 1
        ([(X, X), (X, X), (Y, Y)], ""),  # 2 against 1: twice as many are enough
        ([(X, X), (X, X), (X, X), (Y, Y), (Z, Z)], "ambiguous"),  # 3 against 2
        ([(X, X), (X, X), (X, X), (X, X), (Y, Y), (Z, Z)], ""),  # 4 against 2
        ([(X, X), (X, Y), (Y, X), (Y, Y), (Z, Z), (Z, Z)], "ambiguous"),
    ],
)
def test_8_one_continuation_must_dominate(pairs, reason):
    found = Spoken(continuations(*pairs), 2, 2, k4v=True).ask(A, B)
    assert found.reason == reason
    assert found.tokens == ([] if reason else list(pairs[-1])), "the draft follows the match"


def test_8_a_fifth_continuation_is_not_counted():
    pairs = [(X, X), (X, Y), (Y, X), (Y, Y), (Z, Z), (Z, Z)]
    text = Spoken(continuations(*pairs), 2, 2, k4v=True)
    text.ask(A, B)
    key = text.drafter._map(0).keys[A, B]
    assert [(v.start, v.hits) for v in key.values] == [(3, 1), (7, 1), (11, 1), (15, 1)]
    assert key.counted_to == 21


def test_8_occurrences_are_counted_from_position_0_and_on_from_the_last_match():
    text = Spoken([A, B, X, X, A, B, X, X, *filler(9)], 2, 2, k4v=True)
    text.ask(A, B)
    key = text.drafter._map(0).keys[A, B]
    assert (key.counted_to, key.values[0].hits) == (4, 2)
    text.ask(A, B)
    assert key.values[0].hits == 3  # the match itself starts the next count


def test_begin_with_a_shorter_history_deletes_what_lies_behind():
    prompt = [Z, A, B, X, Y, *filler(9), X, Y, Z, Z, *filler(9, 200)]
    text = Spoken(prompt, 2, 2)
    text.ask(A, B)
    text.accept(0)
    text.ask(X, Y)
    text.accept(0)
    starts = {ngram: key.start for ngram, key in text.drafter._map(0).keys.items()}
    assert starts == {(A, B): 1, (X, Y): 14}
    text.drafter.begin(0, prompt[:15])
    text.tokens = prompt[:15]
    assert set(text.drafter._map(0).keys) == {(A, B)}, "X Y reaches beyond the shorter history"
    table = text.drafter._maps[0].table
    assert max(table._slots.values()) < 15 and table.last == 14
    text.say(*filler(9, 300))
    assert text.ask(A, B).reason == "muted"
    text.drafter.begin(0, [Z])
    assert not text.drafter._map(0).keys


def test_begin_deletes_values_and_keys_left_without_one():
    prompt = [Z, A, B, X, X, *filler(9), A, B, Y, Y, *filler(9, 200)]
    text = Spoken(prompt, 2, 2, k4v=True)
    text.ask(A, B)
    assert len(text.drafter._map(0).keys[A, B].values) == 2
    text.drafter._map(0).keys[A, B].start = 1
    text.drafter.begin(0, prompt[:16])
    assert [v.start for v in text.drafter._map(0).keys[A, B].values] == [3]
    text.drafter.begin(0, prompt[:3])
    assert not text.drafter._map(0).keys


def test_begin_with_a_longer_history_keeps_everything():
    prompt = [Z, A, B, X, Y, *filler(9)]
    text = Spoken(prompt, 2, 2)
    text.ask(A, B)
    text.accept(1)
    text.drafter.begin(0, [*prompt, A, B, *filler(3, 300)])
    assert text.drafter._map(0).keys[A, B].limit == 1


def test_sequences_do_not_share_and_end_for_good():
    drafter = NgramMap(NgramSizes(2, 2), with_values=False)
    prompt = [Z, A, B, X, Y, *filler(9), A]
    request = [DraftRequest(0, 15, B, 9), DraftRequest(1, 15, B, 9)]
    drafter.begin(0, prompt)
    drafter.begin(1, prompt)
    drafter.draft(request)
    drafter.accept(0, 0, is_other=False)
    assert [draft.tokens for draft in drafter.draft(request)] == [[], [X, Y]]
    drafter.forget(0)
    drafter.begin(0, prompt)
    assert [draft.tokens for draft in drafter.draft(request)] == [[X, Y], [X, Y]]


class Rules:
    """The rules for one sequence with lists and loops, as the specification numbers them."""

    def __init__(self, n, m, min_hits, k4v, begun):
        self.n, self.m, self.min_hits, self.k4v, self.begun = n, m, min_hits, k4v, begun
        self.slots = [0] * N_SLOTS
        self.last, self.keys, self.used = 0, [], None

    def draft(self, history, last):
        n, m, length = self.n, self.m, len(history)
        self.used = None
        if length < 2 * n + m:
            return []
        key = [*history, last][-n:]
        newest, match = length - n - m - 1, 0
        candidate = self.slots[slot_of(key)]
        if candidate and candidate < newest and history[candidate : candidate + n] == key:
            match = candidate
        order = [j for j in range(self.begun - n - m - 1, 0, -1) if j > self.last]
        order += [j for j in range(newest, 0, -1) if j > self.begun and j > self.last]
        for j in order:
            if not match and history[j : j + n] == key:
                match = j
        for j in order:
            slot = slot_of(history[j : j + n])
            self.slots[slot] = self.slots[slot] or j
        self.last = max(self.last, newest)
        if not match:
            return []
        entry = next((e for e in self.keys if e["key"] == key), None)
        if entry is None:
            entry = {"key": key, "hits": 0, "stat": 0, "n_acc": m, "values": []}
            self.keys.append(entry)
        entry["hits"] += 1
        if not self.k4v:
            self.used = entry
            return history[match + n : match + n + min(m, entry["n_acc"])]
        if entry["hits"] < self.min_hits:
            return []
        for i in range(entry["stat"], match + 1):
            if history[i : i + n] != key:
                continue
            tokens = history[i + n : i + n + m]
            for value in entry["values"]:
                if value["tokens"] == tokens:
                    value["count"] += 1
                    break
            else:
                if len(entry["values"]) < 4:
                    entry["values"].append({"tokens": tokens, "count": 1, "n_acc": m})
        entry["stat"] = match
        counts = [value["count"] for value in entry["values"]]
        best = counts.index(max(counts))
        others = sum(counts) - counts[best]
        if others > 0 and counts[best] < 2 * others:
            return []
        self.used = entry["values"][best]
        return history[match + n : match + n + min(m, self.used["n_acc"])]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_draft_follows_the_rules(data):
    n, m = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    min_hits, k4v = data.draw(st.integers(1, 2)), data.draw(st.booleans())
    tokens = data.draw(st.lists(st.sampled_from([0, 1, N_SLOTS + 1]), min_size=10, max_size=70))
    begun = data.draw(st.integers(0, 30))
    text = Spoken(tokens[:begun], n, m, min_hits, k4v)
    rules = Rules(n, m, min_hits, k4v, min(begun, len(tokens)))
    for at in range(len(text.tokens), len(tokens)):
        expected = rules.draft(tokens[:at], tokens[at])
        assert text.ask(tokens[at]).tokens == expected
        if expected and rules.used is not None:
            accepted = data.draw(st.integers(0, len(expected)))
            rules.used["n_acc"] = accepted
            text.accept(accepted)
