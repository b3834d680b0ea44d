"""Specification of one action."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtGui import QKeySequence

SEPARATOR = ""
"""Stands for a line between the entries of a menu."""


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """What a user sees of an action. `keys` is a portable key text or a standard key.

    `group`: of the checkable actions of a group exactly one is on. `needs`: what is missing
    while it is disabled, in words that follow "needs". `not_at_servers`: why it is disabled while
    a server is in use.
    """

    id: str
    text: str
    tip: str
    keys: str | QKeySequence.StandardKey = ""
    icon: str = ""
    checkable: bool = False
    group: str = ""
    needs: str = ""
    not_at_servers: str = ""
