"""Wrapping of tokens into rows, in time slices. Uses widths, not fonts."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

from app.trace_models.token_stream import TokenStream
from engine.trace.token_text import NEWLINE_MARK

_TOKENS_PER_CHECK = 512
_WIDE_SCRIPTS = 0x2E80


class TokenFragment(NamedTuple):
    """The part of a token in one row; x and width in pixels."""

    token: int
    text: str
    x: float
    width: float


class TokenLayout:
    """Rows of tokens, wrapped at a width.

    Tokens are only appended, so earlier rows stay and appending costs the same at any length. Rows
    break between words if possible, between tokens if a word is wider than the row, and inside a
    token that is wider than a row.
    """

    def __init__(
        self,
        source: TokenStream,
        measure: Callable[[str], float],
        width: float,
        hidden: frozenset[int] = frozenset(),
        start: int = 0,
    ) -> None:
        self.width = width
        self.hidden = hidden
        self._source = source
        self._measure = measure
        self._limit = width - measure(NEWLINE_MARK)
        self._row_tokens = array("q", [start])
        self._row_offsets = array("q", [0])
        self.placed = start
        """Every token before this index is laid out."""
        self._x = 0.0
        self._break = -1
        self._break_x = 0.0
        self._after_space = False

    @property
    def n_rows(self) -> int:
        """Rows so far; the last one may be empty."""
        return len(self._row_tokens)

    @property
    def complete(self) -> bool:
        """Whether every token of the source is laid out."""
        return self.placed >= len(self._source.texts)

    def advance(self, seconds: float) -> bool:
        """Lay out new tokens for about this long; True when done."""
        deadline = time.perf_counter() + seconds
        while not self.complete:
            self.advance_to(self.placed + _TOKENS_PER_CHECK)
            if time.perf_counter() > deadline:
                break
        return self.complete

    def advance_to(self, stop: int) -> None:
        """Lay out all tokens before index `stop`."""
        texts, kinds = self._source.texts, self._source.kinds
        hidden, measure, limit = self.hidden, self._measure, self._limit
        for token in range(self.placed, min(stop, len(texts))):
            if kinds[token] in hidden:
                continue
            text = texts[token]
            if "\n" in text:
                self._place_lines(token, text)
                continue
            if self._x and (self._after_space or _breaks_before(text)):
                self._break, self._break_x = token, self._x
            width = measure(text)
            if self._x + width > limit:
                self._wrap(token)
                if self._x + width > limit:
                    self._place_wide(token, 0, text, width)
                    continue
            self._x += width
            self._after_space = _breaks_after(text)
        self.placed = max(self.placed, min(stop, len(texts)))

    def first_token(self, row: int) -> int:
        """Index of the token that the row begins with (or in)."""
        return self._row_tokens[row]

    def row_of(self, token: int) -> int:
        """The row in which a token begins."""
        row = bisect_left(self._row_tokens, token)
        begins = row < self.n_rows and self._row_tokens[row] == token
        return row if begins and self._row_offsets[row] == 0 else row - 1

    def spans(self, row: int) -> Iterator[TokenFragment]:
        """The visible parts of the tokens in a row, from left to right."""
        token, offset = self._row_tokens[row], self._row_offsets[row]
        if row + 1 < self.n_rows:
            last, last_offset = self._row_tokens[row + 1], self._row_offsets[row + 1]
        else:
            last, last_offset = self.placed, 0
        texts, kinds, measure = self._source.texts, self._source.kinds, self._measure
        x = 0.0
        while token < last or (token == last and last_offset > offset):
            if kinds[token] not in self.hidden:
                text = texts[token]
                part = text[offset : last_offset if token == last else len(text)]
                if part.endswith("\n"):
                    part = part[:-1]
                if part:
                    width = measure(part)
                    yield TokenFragment(token, part, x, width)
                    x += width
            token += 1
            offset = 0

    def _new_row(self, token: int, offset: int = 0) -> None:
        self._row_tokens.append(token)
        self._row_offsets.append(offset)
        self._x = 0.0
        self._break = -1

    def _wrap(self, token: int) -> None:
        """Start a new row at the last break opportunity, else at this token."""
        moved_from, kept = self._break, self._x - self._break_x
        if moved_from >= 0:
            self._new_row(moved_from)
            if moved_from != token:
                self._x = kept
        elif self._x:
            self._new_row(token)

    def _place_wide(self, token: int, offset: int, text: str, width: float) -> None:
        """Cut text that is wider than a whole row, from `offset` of its token on."""
        if self._x:
            self._new_row(token, offset)
        while width > self._limit and len(text) > 1:
            fits = bisect_right(range(1, len(text)), self._limit, key=self._width_up_to(text))
            offset += max(1, fits)
            text = text[max(1, fits) :]
            self._new_row(token, offset)
            width = self._measure(text)
        self._x = width

    def _width_up_to(self, text: str) -> Callable[[int], float]:
        return lambda n: self._measure(text[:n])

    def _place_lines(self, token: int, text: str) -> None:
        offset = 0
        lines = text.split("\n")
        for i, line in enumerate(lines):
            if i:
                at_end = offset == len(text)
                self._new_row(token + 1 if at_end else token, 0 if at_end else offset)
            if line:
                # the line feed's mark may extend into the margin
                width = self._measure(line)
                hang = self._limit if i == len(lines) - 1 else self.width
                if self._x + width > hang:
                    if i == 0:
                        self._break_for(token, line)
                    if self._x + width > hang:
                        self._place_wide(token, offset, line, width)
                        offset += len(line) + 1
                        continue
                self._x += width
            offset += len(line) + 1
        self._after_space = _breaks_after(text)

    def _break_for(self, token: int, line: str) -> None:
        if self._x and (self._after_space or _breaks_before(line)):
            self._break, self._break_x = token, self._x
        self._wrap(token)


def _breaks_before(text: str) -> bool:
    return text[0] == " " or ord(text[0]) >= _WIDE_SCRIPTS


def _breaks_after(text: str) -> bool:
    return text[-1] == " " or ord(text[-1]) >= _WIDE_SCRIPTS
