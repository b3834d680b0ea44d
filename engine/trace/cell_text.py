"""How texts become cells of a CSV file: token bytes as one readable line, and the variant for
spreadsheets, in which no cell is a formula.

A spreadsheet takes a text for a formula by its first character, and where a text begins depends
on the locale: in many, fields end at semicolons, quotes in the middle of such a field mean
nothing, and a line feed inside of them ends the row. So an apostrophe goes in front of a
dangerous character at the beginning of a cell and after everything that may end a field, and in
front of an apostrophe there; taking one away gives every text back. The files begin with a byte
order mark, without which Excel does not read them as UTF-8. Numbers stay numbers: a minus sign
before digits alone runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

PLAIN, EXCEL = "plain", "excel"
"""Values of csv_variant in session.json."""

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""The full-width forms count where the spreadsheet runs in an East Asian locale (OWASP)."""

FIELD_ENDS = (";", "\t", "|", "\r", "\n", "\u061b")
"""In addition to the comma, which quotes take care of: list separators of locales and imports (the
last is the Arabic semicolon), and line ends."""

_GUARD = "'"
_STARTS, _ENDS = re.escape("".join(FORMULA_STARTS)), re.escape("".join(FIELD_ENDS))
# a quote that begins a field may be followed by one that ends it, and by what then begins it
_DANGEROUS = re.compile(f'^(?=[{_STARTS}{_GUARD}])|(?<=[{_ENDS}])(?=[{_STARTS}{_GUARD}"])')
_GUARDED = re.compile(f"(?:^|(?<=[{_ENDS}])){_GUARD}")
_NUMBER = re.compile(r"[+-]?[0-9][0-9.]*(e[+-]?[0-9]+)?", re.IGNORECASE)


def encoding(variant: str) -> str:
    """Python's name for the encoding of a variant's files."""
    return "utf-8-sig" if variant == EXCEL else "utf-8"


def guard(cells: Sequence[Any]) -> list[Any]:
    """Cells with an apostrophe put where a spreadsheet could take a text for a formula; numbers
    stay."""
    return [
        _DANGEROUS.sub(_GUARD, cell)
        if isinstance(cell, str) and not _NUMBER.fullmatch(cell)
        else cell
        for cell in cells
    ]


def unguard(cells: Sequence[str]) -> list[str]:
    """Take the apostrophes of `guard` off again."""
    return [_GUARDED.sub("", cell) for cell in cells]


_NAMED = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def escape_piece(piece: bytes) -> str:
    """Printable characters as they are, everything else escaped; never a raw newline.

    `\\n`, `\\t`, `\\r` and `\\\\` have names. Bytes that are no UTF-8, and the UTF-8 bytes of
    characters that show nothing (controls, joiners, unusual spaces), become `\\xE4`. No two
    byte strings give the same text.
    """
    text = piece.decode("utf-8", "surrogateescape")
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(map(_escape, text))


def _escape(char: str) -> str:
    named = _NAMED.get(char)
    if named is not None:
        return named
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02X}" for byte in char.encode("utf-8", "surrogateescape"))
