"""Styles of tokens on a terminal, by kind, as the window has them: never by colour alone."""

from __future__ import annotations

from engine.trace.records import GHOST_KINDS

# middle tones of the 256 colours, legible on light and on dark: 32 blue, 166 vermilion, 244 grey
_STYLES = {
    "accepted": "4;38;5;32",  # underlined
    "rejected": "9;38;5;166",  # struck out
    "ignored": "3;9;38;5;244",  # struck out, italic
    "replacement": "1;38;5;166",  # bold: few terminals have the double underline
    "unknown": "38;5;244",
}
LEGEND = (
    "On a terminal accepted drafts are blue and underlined, rejected ones struck out, the\n"
    "target's replacements vermilion and bold; NO_COLOR=1 and TERM=dumb switch that off."
)


def styled(text: str, kind: str) -> tuple[str, str]:
    """A piece for `print_texts`. A draft that was not accepted stays on its line."""
    if kind in GHOST_KINDS:
        text = text.replace("\n", "↵").replace("\t", "→")
    return text, _STYLES.get(kind, "")
