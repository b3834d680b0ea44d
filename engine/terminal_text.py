"""Text for a terminal: what such a device would obey, or show as nothing, becomes an escape."""

from __future__ import annotations

import unicodedata

TEXT = "\n\t\u200c\u200d"
"""What text of several lines may hold in addition to printable characters: its lines, and the
joiners that Persian, Indic scripts and emoji need."""


def terminal_text(text: str, keep: str = "") -> str:
    """One line in which control, format and unassigned characters, C1 and bidi controls, line
    separators, tags and lone surrogates among them, are escapes such as \\x1b, \\n or \\u202e.

    keep: characters left as they are. Spaces of any width are kept too.
    """
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in keep or unicodedata.category(char) == "Zs"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
