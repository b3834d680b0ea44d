"""Bytes of a token become visible text that hides nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trace.token_text import (
    NEWLINE_MARK,
    display_text,
    inline_newlines,
    line_text,
    styled_newlines,
)


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        (b" middle", " middle"),
        (b"    ", "    "),
        (b"\n\n  x", "\n\n  x"),
        (b"\r\n", "\n"),
        (b"\r", "⟨0D⟩"),
        (b"\tx", "    x"),
        (b"\x07", "⟨07⟩"),
        (b"\xe4\xb8", "⟨E4⟩⟨B8⟩"),
        (b"\xad", "⟨AD⟩"),
        ("é推🎉".encode(), "é推🎉"),
        (b"a\xf0\x9f", "a⟨F0⟩⟨9F⟩"),
        ("\u200d".encode(), "⟨U+200D⟩"),
        ("👩\u200d💻".encode(), "👩\u200d💻"),
        ("\u202eabc".encode(), "⟨U+202E⟩abc"),
        ("\u0301".encode(), "◌\u0301"),
        ("e\u0301".encode(), "e\u0301"),
        ("\ufe0f".encode(), "⟨U+FE0F⟩"),
        ("\u2028".encode(), "⟨2028⟩"),
        (b"", "⟨#7⟩"),
    ],
)
def test_display(piece: bytes, shown: str) -> None:
    assert display_text(piece, 7) == shown


@given(st.binary(min_size=1, max_size=12))
def test_no_token_is_invisible_or_breaks_a_terminal(piece: bytes) -> None:
    shown = display_text(piece, 0)
    assert shown
    assert all(char == "\n" or ord(char) >= 32 for char in shown)
    shown.encode()


def test_line_feeds_of_styled_and_of_ghost_tokens() -> None:
    assert styled_newlines(";\n  ") == f";{NEWLINE_MARK}\n  "
    assert inline_newlines(";\n  ") == f";{NEWLINE_MARK}  "


def test_spaces_alone_can_be_seen_in_a_table() -> None:
    assert line_text(b"   ", 7) == "⟨3 spaces⟩"
    assert line_text(b" a ", 7) == " a "
    assert line_text(b"\t", 7) == "⟨tab⟩"
    assert line_text(b"\r\n\n    ", 7) == "⟨2 newlines, 4 spaces⟩"
    assert line_text(b"\n", 7) == "⟨newline⟩"
    assert line_text(b"", 7) == "⟨#7⟩"
