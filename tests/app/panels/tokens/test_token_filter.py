"""The filter language: what a query means, and what is said when it means nothing."""

from __future__ import annotations

import pytest

from app.panels.tokens.token_hits import (
    ChoiceTerm,
    FilterError,
    KindTerm,
    NumberTerm,
    TextTerm,
    parse_filter,
)


@pytest.mark.parametrize(
    ("query", "terms"),
    [
        ("", ()),
        ("   ", ()),
        ("rejected", (KindTerm("rejected"),)),
        ("kind:bonus", (KindTerm("bonus"),)),
        ("depth>2", (NumberTerm("depth", ">", 2),)),
        ("p<=0.1", (NumberTerm("p", "<=", 0.1),)),
        ("rank!=1", (NumberTerm("rank", "!=", 1),)),
        ("seq:1", (NumberTerm("seq", "=", 1),)),
        ("path:restore", (ChoiceTerm("path", ("restore", "restore_depth")),)),
        ("path:restore_depth", (ChoiceTerm("path", ("restore_depth",)),)),
        ("drafter:ngram-mod", (ChoiceTerm("drafter", ("ngram-mod",)),)),
        ("return arr", (TextTerm("return arr"),)),
        ("else:", (TextTerm("else:"),)),
        ("x < y", (TextTerm("x < y"),)),
        ('"rejected"', (TextTerm("rejected"),)),
        ('" if"', (TextTerm(" if"),)),
        (
            "rejected q>0.5  def f",
            (KindTerm("rejected"), NumberTerm("q", ">", 0.5), TextTerm("def f")),
        ),
        ("a b rejected c", (TextTerm("a b"), KindTerm("rejected"), TextTerm("c"))),
        ('depth=0 "a b" c', (NumberTerm("depth", "=", 0), TextTerm("a b"), TextTerm("c"))),
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


def test_text_in_lower_case_is_found_in_either_case() -> None:
    assert TextTerm("abc").folded
    assert not TextTerm("Abc").folded
