"""Display text of tokens: control characters and invalid bytes are made visible."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.plain_text import counted
from engine.trace.store import TraceStore

NEWLINE_MARK = "⏎"
HIDDEN = "⟨?⟩"
"""Shown for a token whose id and text are unknown."""
_TAB = " " * 4
_SPACE_RUNS = re.compile(r" +|\t+|(?:\r?\n)+|\r+")
_SPACES = {" ": "space", "\t": "tab", "\n": "newline", "\r": "return"}
_JOINERS = ("\u200c", "\u200d")
_UNSEEN = ("Cc", "Zl", "Zp")

MEANING = {
    "prompt": "part of the prompt",
    "target": "chosen by the target, without a draft",
    "accepted": "drafted and accepted by the target",
    "rejected": "drafted, the target chose another token",
    "ignored": "drafted, but not used: after the first rejection, or not verified",
    "replacement": "the target's token at the rejection",
    "bonus": "the target's token after a fully accepted draft",
    "replayed": "decoded again after a restore",
    "unknown": "generated; the engine did not report its part and round",
    "side": "drafted and verified on another branch of the tree",
}
"""Meaning of each token kind of the trace."""


def display_text(piece: bytes, token_id: int) -> str:
    """The token as visible text; the only control character left is the line feed.

    Bytes that are not UTF-8 on their own show as ⟨E4⟩, control and format characters as their code,
    a tab as four spaces, a combining mark without its base on a dotted circle, and a token without
    bytes as its id; without an id (below 0) as ⟨?⟩.
    """
    if not piece:
        return f"⟨#{token_id}⟩" if token_id >= 0 else HIDDEN
    text = piece.decode("utf-8", "surrogateescape")
    if text.isascii() and text.isprintable():
        return text
    text = text.replace("\r\n", "\n")
    return "".join(_visible(char, first=i == 0) for i, char in enumerate(text))


def pieces_at(store: TraceStore, rows: np.ndarray) -> list[bytes]:
    """The bytes of tokens, by row numbers [n] of the tokens table. For other engines only the text
    may be known, or nothing."""
    ids = store.tokens.column("token_id")[rows].tolist()
    texts = store.tokens.column("text")[rows].tolist()
    pieces, pool = store.pieces, store.text_pool
    return [
        pool.text(text).encode() if text else pieces.get(token_id, b"")
        for token_id, text in zip(ids, texts, strict=True)
    ]


def row_text(store: TraceStore, row: Mapping[str, Any]) -> str:
    """The token of a row of the tokens table in one line; see `pieces_at`."""
    token_id = row["token_id"]
    piece = row["text"].encode() if row["text"] else store.pieces.get(token_id, b"")
    return line_text(piece, -1 if token_id is None else token_id)


def styled_newlines(text: str) -> str:
    """Line feeds preceded by a mark, so that a style has something to draw on."""
    return text.replace("\n", NEWLINE_MARK + "\n")


def inline_newlines(text: str) -> str:
    """Line feeds as marks only, for text that is not part of the output."""
    return text.replace("\n", NEWLINE_MARK)


def line_text(piece: bytes, token_id: int) -> str:
    """The token in one line for a table; white space alone is described: ⟨newline, 4 spaces⟩."""
    if piece and not piece.strip(b" \t\r\n"):
        return f"⟨{', '.join(_named_space(run) for run in _SPACE_RUNS.findall(piece.decode()))}⟩"
    return inline_newlines(display_text(piece, token_id))


def _named_space(run: str) -> str:
    name, n = _SPACES[run[-1]], len(run.replace("\r\n", "\n"))
    return name if n == 1 else counted(n, name)


def _visible(char: str, *, first: bool) -> str:
    code = ord(char)
    if char == "\n":
        return char
    if char == "\t":
        return _TAB
    if 0xDC80 <= code <= 0xDCFF:
        return f"⟨{code - 0xDC00:02X}⟩"
    category = unicodedata.category(char)
    if category in _UNSEEN:
        return f"⟨{code:02X}⟩"
    if category == "Cf" and (first or char not in _JOINERS):
        return f"⟨U+{code:04X}⟩"
    if first and category in ("Mn", "Me"):
        selector = 0xFE00 <= code <= 0xFE0F or code >= 0xE0100
        return f"⟨U+{code:04X}⟩" if selector else "◌" + char
    return char
