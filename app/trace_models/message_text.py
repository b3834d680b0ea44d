"""Messages of the engine in the words of the window: fields of the Run panel in place of flags."""

from __future__ import annotations

import re

from engine.option_fields import options_in
from engine.options import RunOptions


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
