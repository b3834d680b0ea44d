"""The variant of an exported trace that spreadsheets may open: no cell of it is a formula.

A spreadsheet takes a text for a formula by its first character, and where a text begins depends
on the locale: in many, fields end at semicolons, quotes in the middle of such a field mean
nothing, and a line feed inside of them ends the row. So an apostrophe goes in front of a
dangerous character at the beginning of a cell and behind everything that may end a field, and in
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
"""Besides the comma, which quotes take care of: list separators of locales and imports (the last
is the Arabic semicolon), and line ends."""

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
    """Cells, those that could run made text; numbers are left alone."""
    return [
        _DANGEROUS.sub(_GUARD, cell)
        if isinstance(cell, str) and not _NUMBER.fullmatch(cell)
        else cell
        for cell in cells
    ]


def unguard(cells: Sequence[str]) -> list[str]:
    """What `guard` was given, from cells that were read back."""
    return [_GUARDED.sub("", cell) for cell in cells]
