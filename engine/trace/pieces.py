"""Token bytes as one line of readable text."""

from __future__ import annotations

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
