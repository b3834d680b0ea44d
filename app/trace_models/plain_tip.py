"""Text from files in tooltips, which Qt takes for HTML where it looks like that."""

from __future__ import annotations

from html import escape

from PySide6.QtGui import Qt

from engine.report.text import visible


def plain_tip(text: str) -> str:
    """The text, so that a tooltip shows it as it is written, loads nothing that it names, and no
    character in it turns the direction of what follows."""
    text = visible(text, keep_lines=True)
    if not Qt.mightBeRichText(text):
        return text
    return "<br>".join(f"<span>{escape(line)}</span>" for line in text.split("\n"))
