"""TOML from anyone: scenarios and plans, which the parser of the standard library reads in a time
that grows with the square of a key's parts."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MOST_PARTS = 64
_PART = r"""(?:[\w-]++|"[^"\n]{0,40}+"|'[^'\n]{0,40}+')"""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_PART}\s*+\.\s*+){{{MOST_PARTS}}}", re.ASCII)


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a text. Raises ValueError or RecursionError for what is not TOML, and ValueError
    for a text of more than MOST_PARTS words joined by points, as only a key out of range has."""
    if found := _LONG_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"more than {MOST_PARTS} words joined by points (at line {line})")
    return tomllib.loads(text)
