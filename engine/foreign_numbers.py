"""Numbers from anyone: how large they may be by what they mean, so that sums of some of them fit
the columns of a trace and nothing takes memory without bounds."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeGuard

from msgspec import Meta

COUNT = 2**31 - 1
MOST_TOKENS, MOST_PROMPT_TOKENS = 2**30 - 1, 2**29
"""Of an answer or its drafts, and of either part of a prompt: a position, their sum, fits COUNT."""
LONGEST_DRAFT = 1024
LARGEST = 2**53
"""Up to here float64 has every whole number."""
Count = Annotated[int, Meta(ge=0, le=COUNT)]
Size = Annotated[int, Meta(ge=0, le=LARGEST)]
LONGEST_MS = 1e12
LONGEST_PART_MS = 1e11
"""Of one time that a server or a file tells, 3 years: a sum of several fits LONGEST_MS."""
_REAL = re.compile(r"\d{1,20}(?:\.\d{0,20})?", re.ASCII)


class OutOfRangeError(ValueError):
    """A number that cannot be; the message is a clause about it."""


def whole(text: str, most: int = COUNT) -> int:
    """A number of decimal digits, from 0 to `most`. Raises OutOfRangeError."""
    if not (text.isascii() and text.isdigit()):
        raise OutOfRangeError(f"{text[:40]!r} is not a whole number")
    digits = text.lstrip("0") or "0"
    if len(digits) > 20 or int(digits) > most:
        raise OutOfRangeError(f"{digits[:20]}{'…' * (len(digits) > 20)} is more than {most:,}")
    return int(digits)


def real(text: str, most: float = LONGEST_PART_MS) -> float:
    """A decimal number from 0 to `most`. Raises OutOfRangeError."""
    if _REAL.fullmatch(text) is None:
        raise OutOfRangeError(f"{text[:40]!r} is not a number that is read")
    if (value := float(text)) > most:
        raise OutOfRangeError(f"{text[:40]} is more than {most:,.0f}")
    return value


def is_whole(value: Any, most: int = COUNT) -> TypeGuard[int]:
    """Whether a value is a whole number from 0 to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def is_real(value: Any, most: float = LONGEST_PART_MS) -> TypeGuard[int | float]:
    """Whether a value is a number from 0 to `most`; no NaN is."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most
