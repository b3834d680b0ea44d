"""Splits: llama.cpp's table, and that every token is decoded once, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Span, UBatch, make_ubatch, split_equal, split_seq, split_simple


def spans_of(lengths: list[int], seqs: list[int] | None = None) -> list[Span]:
    seqs = list(range(len(lengths))) if seqs is None else seqs
    return [Span(s, 0, range(100 * s, 100 * s + n), []) for s, n in zip(seqs, lengths, strict=True)]


def shapes(pieces: list[UBatch]) -> list[tuple[int, int]]:
    return [(p.n_seqs, p.n_seq_tokens) for p in pieces]


@pytest.mark.parametrize(
    ("lengths", "n_ubatch", "keep", "expected"),
    [
        ([4, 2], 8, 0, [(2, 2), (1, 2)]),
        ([2, 2], 4, 2, [(2, 2)]),
        ([2, 3], 4, 2, [(1, 2), (1, 3)]),
        ([3, 3], 4, 2, [(1, 3), (1, 3)]),
        ([5], 4, 2, [(1, 3), (1, 2)]),
        ([6], 4, 2, [(1, 4), (1, 2)]),
        ([3, 4], 6, 2, [(1, 3), (1, 4)]),
        ([40, 40], 16, 9, [(2, 8), (2, 8), (2, 8), (1, 16), (1, 16)]),
        ([2, 2, 2, 2, 2], 512, 2, [(5, 2)]),
        ([4, 2, 4], 512, 4, [(1, 4), (1, 2), (1, 4)]),
    ],
)
def test_equal_split_table(lengths, n_ubatch, keep, expected):
    assert shapes(split_equal(spans_of(lengths), n_ubatch, keep=keep)) == expected


def test_seq_split_is_one_sequence_at_a_time():
    pieces = split_seq(spans_of([5, 2]), 3)
    assert [(p.seq_ids, (*p.positions[:, 0],), p.n_seq_tokens) for p in pieces] == [
        ((0,), (0,), 3),
        ((0,), (3,), 2),
        ((1,), (0,), 2),
    ]


def test_simple_split_takes_any_tokens_as_rows():
    pieces = split_simple(spans_of([2, 3]), 4)
    assert [(p.seq_ids, (*p.positions[:, 0],), p.n_seq_tokens, p.reason) for p in pieces] == [
        ((0, 0, 1, 1), (0, 1, 0, 1), 1, "n_ubatch"),
        ((1,), (2,), 1, "all tokens"),
    ]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    n_ubatch=st.integers(1, 48),
    keep=st.integers(0, 10),
    equal=st.booleans(),
)
def test_every_token_once_and_in_order(lengths, n_ubatch, keep, equal):
    spans = spans_of(lengths)
    pieces = split_equal(spans, n_ubatch, keep=keep) if equal else split_seq(spans, n_ubatch)
    decoded: list[list[int]] = [[] for _ in spans]
    last = [0] * len(spans)
    for piece in pieces:
        assert 1 <= piece.tokens.size <= n_ubatch
        for i, tokens in zip(piece.seq_ids, piece.tokens.tolist(), strict=True):
            decoded[i].extend(tokens)
            last[i] = piece.n_seq_tokens
    assert decoded == [list(span.tokens) for span in spans]
    if equal and n_ubatch > keep:
        for span, n in zip(spans, last, strict=True):
            assert n >= min(keep, len(span.tokens))


def test_ubatch_tensors():
    spans = [Span(3, 10, [5, 6, 7], [0, 2]), Span(1, 0, [8, 9, 4], [2])]
    ubatch = make_ubatch(spans, (0, 1), (1, 1), 2, "x")
    assert ubatch.tokens.tolist() == [[6, 7], [9, 4]]
    assert ubatch.positions.tolist() == [[11, 12], [1, 2]]
    assert ubatch.seq_ids == (3, 1)
    assert ubatch.outputs.tolist() == [1, 3]
