"""The filter language: what a query means, and what is said when it means nothing."""

from __future__ import annotations

import pytest

from app.models.token_filter import Choice, Compare, FilterError, Kind, Text, parse_filter


@pytest.mark.parametrize(
    ("query", "terms"),
    [
        ("", ()),
        ("   ", ()),
        ("rejected", (Kind("rejected"),)),
        ("kind:bonus", (Kind("bonus"),)),
        ("depth>2", (Compare("depth", ">", 2),)),
        ("p<=0.1", (Compare("p", "<=", 0.1),)),
        ("rank!=1", (Compare("rank", "!=", 1),)),
        ("seq:1", (Compare("seq", "=", 1),)),
        ("path:restore", (Choice("path", ("restore", "restore_depth")),)),
        ("path:restore_depth", (Choice("path", ("restore_depth",)),)),
        ("drafter:ngram-mod", (Choice("drafter", ("ngram-mod",)),)),
        ("return arr", (Text("return arr"),)),
        ("else:", (Text("else:"),)),
        ("x < y", (Text("x < y"),)),
        ('"rejected"', (Text("rejected"),)),
        ('" if"', (Text(" if"),)),
        ("rejected q>0.5  def f", (Kind("rejected"), Compare("q", ">", 0.5), Text("def f"))),
        ("a b rejected c", (Text("a b"), Kind("rejected"), Text("c"))),
        ('depth=0 "a b" c', (Compare("depth", "=", 0), Text("a b"), Text("c"))),
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
    assert Text("abc").folded
    assert not Text("Abc").folded
