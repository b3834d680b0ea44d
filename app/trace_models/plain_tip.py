"""Text of others in tooltips, which Qt takes for HTML where it looks like that, and messages of the
engine in the words of the window: fields of the Run panel in place of flags."""

from __future__ import annotations

import re
from html import escape

from PySide6.QtGui import Qt

from engine.option_fields import options_in
from engine.options import RunOptions
from engine.report.text import visible


def plain_tip(text: str) -> str:
    """The text, so that a tooltip shows it as it is written, loads nothing that it names, and no
    character in it turns the direction of what follows."""
    text = visible(text, keep_lines=True)
    if not Qt.mightBeRichText(text):
        return text
    return "<br>".join(f"<span>{escape(line)}</span>" for line in text.split("\n"))


def in_window(text: str) -> str:
    """ "Raise -c" as "Raise “context”"; flags without a field stay as they are."""
    return _FLAG.sub(lambda found: _FIELDS.get(found[0], found[0]), text)


_FIELDS = {
    flag: f"“{' '.join(filter(None, (placed.row.label, placed.row.short)))}”"
    for placed in options_in(RunOptions)
    if placed.option.row is not None
    for flag in placed.option.flags
}
_FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*(?![\w-])")
