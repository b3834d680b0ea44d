"""Number formats: figures, sizes, and errors, of which only 0 is shown as exact; and foreign texts
in tooltips and in the window's terms."""

from __future__ import annotations

import math
import re
from html import escape

from PySide6.QtGui import Qt

from engine.option_fields import options_in
from engine.options import RunOptions
from engine.plain_text import size_text
from engine.report.text import visible

NOT_OBSERVED = "–"
EXACT = "exact"
NOT_FINITE = "not finite"
NOT_RECORDED = "not recorded"


def significant(value: float | None) -> str:
    """Three significant digits, including zeros, or the mark for "not observed"."""
    if value is None:
        return NOT_OBSERVED
    rounded = float(f"{value:.3g}")
    return f"{rounded:#.3g}".rstrip(".") if abs(rounded) < 1000 else f"{rounded:,.0f}"


def probability_text(value: float | None) -> str:
    """Three decimals, or 1.2e-4 where those would be zeros; a dash if not observed."""
    if value is None:
        return NOT_OBSERVED
    if 0 < value < 0.001:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.3f}"


def whole_text(value: object) -> str:
    """An integer, or the mark for "not observed" (None)."""
    return NOT_OBSERVED if value is None else f"{value:,}"


def size_or_none(n_bytes: int | None) -> str:
    """A size, or the mark for "not observed" (None)."""
    return NOT_OBSERVED if n_bytes is None else size_text(n_bytes)


def short_count(n: int) -> str:
    """A count in at most four characters: 999, 1.2k, 35k, 120k, 1.2M."""
    text, value = str(n), float(n)
    for unit in "kMG":
        if value < 999.5:
            break
        value /= 1000
        text = f"{value:.2g}{unit}" if value < 99.5 else f"{value:.0f}{unit}"
    return text


def error_text(value: float | None) -> str:
    """At most three significant digits; 0 is "exact", None a dash; also "not finite"."""
    if value is None:
        return NOT_OBSERVED
    if not math.isfinite(value):
        return NOT_FINITE
    if value == 0:
        return EXACT
    return f"{value:.1e}" if value < 0.001 or value >= 1000 else f"{value:.3g}"


def plain_tip(text: str) -> str:
    """A text that a tooltip shows literally: it loads nothing, and no character changes the text
    direction."""
    text = visible(text, keep_lines=True)
    if not Qt.mightBeRichText(text):
        return text
    return "<br>".join(f"<span>{escape(line)}</span>" for line in text.split("\n"))


def in_window(text: str) -> str:
    """A message in the window's terms: "Raise -c" becomes "Raise “context”", a page of `draftscope
    help` becomes Help; flags without a field stay, as do texts that concern the terminal."""
    text = _PAGE.sub("Help (Shift+F1)", _TERMINAL.sub("", text))
    return _FLAG.sub(lambda found: _FIELDS.get(found[0], found[0]), text)


_FIELDS = {
    flag: f"“{' '.join(filter(None, (placed.row.label, placed.row.short)))}”"
    for placed in options_in(RunOptions)
    if placed.option.row is not None
    for flag in placed.option.flags
}
_PAGE = re.compile("`draftscope help [a-z-]+`")
_TERMINAL = re.compile(", or name its format with --[a-z-]+ [A-Z]+")
_FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*(?![\w-])")
