"""Text from files in tooltips, which Qt takes for HTML where it looks like that."""

from __future__ import annotations

from html import escape

from PySide6.QtGui import Qt


def plain_tip(text: str) -> str:
    """The text, so that a tooltip shows it as it is written and loads nothing that it names."""
    return f"<span>{escape(text)}</span>" if Qt.mightBeRichText(text) else text
