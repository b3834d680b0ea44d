"""Escaped token text: one line, readable, and no information lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trace.csv_fields import escape_piece


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (b"", ""),
        (b" def", " def"),
        (b"a\nb\tc\r", r"a\nb\tc\r"),
        (b"\\n", r"\\n"),
        ("größe 你 🙂".encode(), "größe 你 🙂"),
        (b"\xe4\xbd", r"\xE4\xBD"),
        (b"ok\xff", r"ok\xFF"),
        (b"\x00\x1b[0m\x7f", r"\x00\x1B[0m\x7F"),
        ("\u2028\u00a0\ufeff".encode(), r"\xE2\x80\xA8\xC2\xA0\xEF\xBB\xBF"),
        (b"\xed\xa0\x80", r"\xED\xA0\x80"),
    ],
)
def test_examples(piece: bytes, text: str) -> None:
    assert escape_piece(piece) == text


@given(st.binary(max_size=12) | st.text(max_size=8).map(str.encode))
def test_it_is_one_printable_line_that_can_be_undone(piece: bytes) -> None:
    text = escape_piece(piece)
    assert text.isprintable()
    assert len(text.splitlines()) <= 1
    named = {"n": b"\n", "t": b"\t", "r": b"\r", "\\": b"\\"}
    undone = b""
    for plain, name, code in re.findall(r"([^\\]+)|\\(?:([ntr\\])|x([0-9A-F]{2}))", text):
        undone += plain.encode() if plain else named[name] if name else bytes.fromhex(code)
    assert undone == piece
