"""The filter language: what a query means, and what is said when it means nothing."""

from __future__ import annotations

import pytest

from app.panels.tokens.token_hits import FilterError, Term, parse_filter


@pytest.mark.parametrize(
    ("query", "terms"),
    [
        ("", ()),
        ("   ", ()),
        ("rejected", (Term("kind", "rejected"),)),
        ("kind:bonus", (Term("kind", "bonus"),)),
        ("depth>2", (Term("depth", 2, ">"),)),
        ("p<=0.1", (Term("p", 0.1, "<="),)),
        ("rank!=1", (Term("rank", 1, "!="),)),
        ("seq:1", (Term("seq", 1),)),
        ("path:restore", (Term("path", ("restore", "restore_depth")),)),
        ("path:restore_depth", (Term("path", ("restore_depth",)),)),
        ("drafter:ngram-mod", (Term("drafter", ("ngram-mod",)),)),
        ("return arr", (Term("", "return arr"),)),
        ("else:", (Term("", "else:"),)),
        ("x < y", (Term("", "x < y"),)),
        ('"rejected"', (Term("", "rejected"),)),
        ('" if"', (Term("", " if"),)),
        (
            "rejected q>0.5  def f",
            (Term("kind", "rejected"), Term("q", 0.5, ">"), Term("", "def f")),
        ),
        ("a b rejected c", (Term("", "a b"), Term("kind", "rejected"), Term("", "c"))),
        ('depth=0 "a b" c', (Term("depth", 0), Term("", "a b"), Term("", "c"))),
    ],
)
def test_what_a_query_means(query: str, terms: tuple[object, ...]) -> None:
    assert parse_filter(query) == terms


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("depth>two", ("depth", "number", "'two'")),
        ("p<nan", ("number", "'nan'")),
        ("dept>2", ("'dept'", "depth", "quotes")),
        ("path:restored", ("'restored'", "seq_rm")),
        ("kind:wrong", ("'wrong'", "ignored")),
        ("std::x", ("'std:'", "path:", "quotes")),
        ('a "b', ("quote", "'b'")),
    ],
)
def test_a_wrong_query_is_told_in_a_sentence(query: str, words: tuple[str, ...]) -> None:
    with pytest.raises(FilterError) as caught:
        parse_filter(query)
    message = str(caught.value)
    assert message.endswith(".")
    assert all(word in message for word in words), message
