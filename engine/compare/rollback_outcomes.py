"""Outcomes of the checks of a llama.cpp build, for those who read them without checking."""

from __future__ import annotations

RIGHT, WRONG, FAILED, REFUSED, KNOWN, ABSENT, UNREAD = (
    "right",
    "WRONG",
    "FAILED",
    "refused",
    "known defect",
    "no planes",
    "not judged",
)
BAD = (WRONG, FAILED, KNOWN)
