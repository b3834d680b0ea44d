"""Searching a history against a search by slices."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from engine.draft.ngram_drafter import History

# ids whose bytes look like parts of one another, so that matches across borders are tempting
TOKENS = st.sampled_from([0, 1, 256, 65536, 1 << 24, 257, 0x01010101])


def naive(tokens, ngram, low, high):
    n = len(ngram)
    return [j for j in range(low, high + 1) if tokens[j : j + n] == ngram]


@given(
    st.lists(TOKENS, max_size=40),
    st.lists(TOKENS, min_size=1, max_size=3),
    st.integers(0, 10),
    st.integers(-3, 45),
)
@example([0, 0], [0], 0, -2)
def test_searches_find_what_slices_find(tokens, ngram, low, high):
    history = History(tokens)
    expected = naive(tokens, ngram, low, high)
    assert list(history.find_all(ngram, low, high)) == expected
    assert history.find_last(ngram, low, high) == (expected[-1] if expected else -1)
    for start in range(len(tokens)):
        assert history.holds(ngram, start) == (tokens[start : start + len(ngram)] == ngram)


@given(st.lists(TOKENS, max_size=9), st.lists(st.tuples(st.integers(0, 9), st.lists(TOKENS))))
def test_writing_replaces_the_end(tokens, writes):
    history, expected = History(tokens), list(tokens)
    for at, added in writes:
        pos0 = min(at, len(expected))
        history.write(pos0, added)
        expected[pos0:] = added
        assert (len(history), history.part(0)) == (len(expected), expected)
        assert list(history.find_all(added or [1], 0, len(expected))) == naive(
            expected, added or [1], 0, len(expected)
        )


def test_parts_count_from_the_end_too():
    history = History([1, 2, 3, 4])
    assert (history.part(-3), history.part(1, 3), history.part(4)) == ([2, 3, 4], [2, 3], [])
