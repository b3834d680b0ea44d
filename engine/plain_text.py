"""Plain text: formatting of bytes and counts, and escapes for characters that a terminal would
interpret or not show."""

from __future__ import annotations

import math
import unicodedata

_UNITS = ("B", "KiB", "MiB", "GiB")


def size_text(n_bytes: float) -> str:
    """Three significant digits with a binary unit: 0 B, 512 KiB, 9.41 MiB; all digits below 1024 of
    a unit: 1,020 KiB."""
    value = float(n_bytes)
    for unit in _UNITS:
        if value < 1023.5:
            return three_digits(value) + f" {unit}"
        value /= 1024
    return three_digits(value) + " TiB"


def three_digits(value: float) -> str:
    """Three significant digits; from 1,000 on the rounded integer."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def counted(n: int, what: str) -> str:
    """A count with its noun, whose plural ends in s."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


TEXT = "\n\t\u200c\u200d"
"""Characters allowed in a text of several lines in addition to printable ones: line breaks, and the
joiners of Persian, Indic scripts and emoji."""


def terminal_text(text: str, keep: str = "") -> str:
    r"""One line in which control, format and unassigned characters (C1 and bidi controls, line
    separators, tags and lone surrogates, too) are escapes such as \x1b, \n or \u202e.

    keep: characters left as they are. Spaces of any width are kept, too.
    """
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in keep or unicodedata.category(char) == "Zs"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def duration_text(seconds: float) -> str:
    """Seconds in whole units: 44 s, 3 min 20 s, 2 h 5 min."""
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
