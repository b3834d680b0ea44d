"""ngram-cache: what it learns, which table predicts, how much evidence each length needs; files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.draft import ngram_cache
from engine.draft.drafter import Draft, DraftRequest
from engine.draft.ngram_cache import (
    LAX,
    STRICT,
    LookupCache,
    NgramCache,
    learn,
    most_frequent,
    most_likely,
    read_lookup_cache,
)
from engine.errors import LookupCacheError
from engine.model.layers import TargetRows


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
    table = drafter._tables[0]
    assert table == {(1,): {2: 1}, (2,): {3: 1}, (1, 2): {3: 1}, (4,): {5: 1}}


def test_a_single_new_token_teaches_nothing():
    drafter = cache()
    ask(drafter, [1, 2], 3)
    before = {ngram: dict(counts) for ngram, counts in drafter._tables[0].items()}
    ask(drafter, [1, 2, 3], 4)
    ask(drafter, [1, 2, 3], 4)
    assert drafter._tables[0] == before
    assert drafter._n_learned[0] == 4


def test_a_round_in_which_it_was_not_asked_is_caught_up_with():
    drafter = cache()
    ask(drafter, [1], 2)
    ask(drafter, [1, 2, 3, 4, 5], 6)
    assert (3, 4, 5) in drafter._tables[0]


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


GOOD = [1, 2, -1, -1, 2, 3, 7, 4, 1, 5, -1, -1, -1, 1, 6, 2, 1, 2, 3, 4, 1, 5, 9]


def write(folder: Path, values: list[int], extra: bytes = b"") -> Path:
    path = folder / "lookup.bin"
    path.write_bytes(np.array(values, "<i4").tobytes() + extra)
    return path


def test_records_of_all_lengths(tmp_path: Path) -> None:
    table = read_lookup_cache(write(tmp_path, GOOD), 10)
    assert len(table) == 3
    assert table.find((1, 2)) == {3: 7, 4: 1}
    assert table.find((5,)) == {6: 2}
    assert table.find((1, 2, 3, 4)) == {5: 9}
    assert table.find((2, 1)) is None
    assert table.find((1, 2, -1, -1)) is None


def test_an_empty_file_knows_nothing(tmp_path: Path) -> None:
    assert len(read_lookup_cache(write(tmp_path, []), 10)) == 0


def test_the_first_of_two_records_or_counts_holds(tmp_path: Path) -> None:
    values = [1, -1, -1, -1, 2, 3, 7, 3, 1, 1, -1, -1, -1, 1, 5, 5]
    assert read_lookup_cache(write(tmp_path, values), 10).find((1,)) == {3: 7}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2, -1], "byte 0: the file ends inside a record"),
        ([*GOOD, 1], "byte 92: the file ends inside a record"),
        ([-1, -1, -1, -1, 1, 3, 7], r"byte 0: \[-1, -1, -1, -1\] is not an n-gram"),
        ([1, -1, 2, -1, 1, 3, 7], "is not an n-gram"),
        ([1, -2, -1, -1, 1, 3, 7], "is not an n-gram"),
        ([1, 10, -1, -1, 1, 3, 7], "token 10 is outside the vocabulary of 10"),
        ([1, 2, -1, -1, 0, 3, 7], "byte 0: 0 pairs do not fit the file"),
        ([1, 2, -1, -1, -3, 3, 7], "-3 pairs do not fit"),
        ([1, 2, -1, -1, 2, 3, 7], "2 pairs do not fit"),
        ([1, 2, -1, -1, 2**31 - 1, 3, 7], "pairs do not fit"),
        ([1, 2, -1, -1, 1, 3, 0], "byte 24: count 0 is below 1"),
        ([1, 2, -1, -1, 1, 3, -5], "count -5 is below 1"),
        ([1, 2, -1, -1, 1, 10, 1], "byte 20: token 10 is outside"),
        ([1, 2, -1, -1, 2, 3, 1, -1, 1], "byte 28: token -1 is outside"),
    ],
)
def test_refused_with_the_place(tmp_path: Path, values: list[int], message: str) -> None:
    with pytest.raises(LookupCacheError, match=message) as caught:
        read_lookup_cache(write(tmp_path, values), 10)
    assert caught.value.message.startswith("lookup.bin: byte ")
    assert "llama-lookup-create" in caught.value.remedy


def test_half_a_number_and_no_file_and_too_large_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LookupCacheError, match="ends inside a number"):
        read_lookup_cache(write(tmp_path, GOOD, b"\0\0"), 10)
    with pytest.raises(LookupCacheError, match="cannot be read: No such file"):
        read_lookup_cache(tmp_path / "none", 10)
    monkeypatch.setattr(ngram_cache, "_MAX_BYTES", 1 << 20)
    with pytest.raises(LookupCacheError, match=r"lookup\.bin is larger than 1 MiB"):
        read_lookup_cache(write(tmp_path, [0] * (1 << 19)), 10)


@given(st.lists(st.integers(-3, 11), max_size=40))
def test_any_file_is_read_or_refused(tmp_path_factory, values) -> None:
    path = write(tmp_path_factory.mktemp("fuzz"), values)
    try:
        table = read_lookup_cache(path, 10)
    except LookupCacheError:
        return
    for ngram in table._records:
        counts = table.find(ngram)
        assert counts and all(0 <= t < 10 and c > 0 for t, c in counts.items())
