"""What one action is made of."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtGui import QKeySequence


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """What a user sees of an action. `keys` is a portable key text or a standard key.

    `group`: of the checkable actions of a group exactly one is on. `needs`: what is missing
    while it is disabled, in words that follow "needs".
    """

    id: str
    text: str
    tip: str
    keys: str | QKeySequence.StandardKey = ""
    icon: str = ""
    checkable: bool = False
    group: str = ""
    needs: str = ""
