"""Wrapping is checked against plain string wrapping at one pixel per character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.panels.tokens.token_layout import TokenLayout
from engine.trace.token_text import NEWLINE_MARK

GHOST = 3


class Source:
    def __init__(self, texts: list[str], kinds: bytes | None = None) -> None:
        self.texts = texts
        self.kinds = bytearray(kinds if kinds is not None else bytes(len(texts)))


def laid_out(texts: list[str], columns: int, **options: object) -> TokenLayout:
    layout = TokenLayout(Source(texts), len, columns + len(NEWLINE_MARK), **options)  # type: ignore[arg-type]
    layout.advance_to(len(texts))
    return layout


def rows(layout: TokenLayout) -> list[str]:
    return ["".join(span.text for span in layout.spans(row)) for row in range(layout.n_rows)]


def test_breaks_between_words_not_inside_them() -> None:
    assert rows(laid_out(["The", " run", "ning", " dog", " sat"], 12)) == [
        "The running",
        " dog sat",
    ]


def test_a_word_of_several_tokens_moves_whole() -> None:
    assert rows(laid_out(["go", " spec", "ul", "ation"], 12)) == ["go", " speculation"]


def test_a_word_wider_than_the_row_breaks_between_tokens() -> None:
    assert rows(laid_out(["abcd", "efgh", "ijkl"], 10)) == ["abcdefgh", "ijkl"]


def test_a_token_wider_than_the_row_is_cut() -> None:
    layout = laid_out(["ab", "0123456789012", "x"], 5)
    assert rows(layout) == ["ab", "01234", "56789", "012x"]
    assert layout.row_of(1) == 1
    assert layout.row_of(2) == 3


def test_line_feeds_break_and_keep_indentation() -> None:
    layout = laid_out(["if x:", "\n    ", "return", "\n\n", "def"], 40)
    assert rows(layout) == ["if x:", "    return", "", "def"]
    assert [layout.row_of(token) for token in range(5)] == [0, 0, 1, 1, 3]


def test_a_trailing_line_feed_opens_an_empty_row() -> None:
    layout = laid_out(["a", ";\n"], 10)
    assert rows(layout) == ["a;", ""]


def test_the_mark_of_a_line_feed_hangs_into_the_margin() -> None:
    assert rows(laid_out(["12345", NEWLINE_MARK + "\n", "6"], 5)) == ["12345" + NEWLINE_MARK, "6"]


def test_ideographs_break_anywhere() -> None:
    assert rows(laid_out(["ab", "推测", "解码", "快"], 5)) == ["ab推测", "解码快"]


def test_hidden_kinds_take_no_room() -> None:
    source = Source(["a", "GHOST", "b"], bytes([0, GHOST, 0]))
    layout = TokenLayout(source, len, 40, hidden=frozenset((GHOST,)))
    layout.advance_to(3)
    assert rows(layout) == ["ab"]
    assert [span.token for span in layout.spans(0)] == [0, 2]
    assert layout.row_of(1) == 0


def test_a_layout_may_begin_anywhere() -> None:
    layout = laid_out(["skipped", "one", " two"], 40, start=1)
    assert rows(layout) == ["one two"]
    assert layout.first_token(0) == 1


TOKENS = st.lists(st.text(alphabet="ab \n推", min_size=1, max_size=9), min_size=1, max_size=40)


@given(TOKENS, st.integers(1, 14), st.data())
def test_appending_in_pieces_gives_the_same_rows(
    texts: list[str], columns: int, data: st.DataObject
) -> None:
    whole = laid_out(texts, columns)
    source = Source([])
    piecewise = TokenLayout(source, len, columns + len(NEWLINE_MARK))
    at = 0
    while at < len(texts):
        step = data.draw(st.integers(1, 7))
        source.texts.extend(texts[at : at + step])
        source.kinds.extend(bytes(len(texts[at : at + step])))
        at += step
        assert piecewise.advance(1.0)
    assert rows(piecewise) == rows(whole)


@given(TOKENS, st.integers(1, 14))
def test_nothing_is_lost_and_nothing_overflows(texts: list[str], columns: int) -> None:
    layout = laid_out(texts, columns)
    found = rows(layout)
    assert "".join(found) == "".join(texts).replace("\n", "")
    assert all(len(row) <= columns + len(NEWLINE_MARK) for row in found)
    for token, text in enumerate(texts):
        if text[0] != "\n":
            spans = list(layout.spans(layout.row_of(token)))
            assert token in [span.token for span in spans]


@given(TOKENS, st.integers(1, 14))
def test_spans_stand_side_by_side(texts: list[str], columns: int) -> None:
    layout = laid_out(texts, columns)
    for row in range(layout.n_rows):
        x = 0.0
        for span in layout.spans(row):
            assert span.x == x
            x += span.width


def test_work_is_done_in_slices() -> None:
    layout = TokenLayout(Source(["word "] * 5000), len, 60)
    assert not layout.advance(0.0)
    assert not layout.complete
    assert layout.advance(60.0)
    assert layout.n_rows == pytest.approx(5000 * 5 / 60, rel=0.1)
