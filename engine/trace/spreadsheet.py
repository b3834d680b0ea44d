"""The variant of an exported trace that spreadsheets may open: no cell of it is a formula.

A text cell that a spreadsheet would take for a formula, or that begins with an apostrophe
itself, gets an apostrophe in front; so taking one away gives every text back. The files begin
with a byte order mark, without which Excel does not read them as UTF-8. Numbers stay numbers: a
minus sign before digits alone runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PLAIN, EXCEL = "plain", "excel"
"""Values of csv_variant in session.json."""

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""The full-width forms count where the spreadsheet runs in an East Asian locale (OWASP)."""

_GUARD = "'"
_GUARDED = (*FORMULA_STARTS, _GUARD)


def encoding(variant: str) -> str:
    """Python's name for the encoding of a variant's files."""
    return "utf-8-sig" if variant == EXCEL else "utf-8"


def guard(cells: Sequence[Any]) -> list[Any]:
    """Cells of one column, those that could run made text; numbers are left alone."""
    return [
        _GUARD + cell
        if isinstance(cell, str) and cell.startswith(_GUARDED) and not _is_number(cell)
        else cell
        for cell in cells
    ]


def unguard(row: Sequence[str]) -> list[str]:
    """What `guard` was given, from cells that were read back."""
    return [cell[1:] if cell.startswith(_GUARD) else cell for cell in row]


def _is_number(cell: str) -> bool:
    if not cell.isascii() or "_" in cell:
        return False
    try:
        float(cell)
    except ValueError:
        return False
    return cell[0] in "+-" and cell[1:2].isdigit()
