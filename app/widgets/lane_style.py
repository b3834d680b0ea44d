"""How lanes are told apart: a colour role and dashes for each, in the order given."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QPen

from app.looks.theme import Theme
from app.models.compared_lanes import ComparedLanes

_ROLES = ("first", "second", "third", "fourth", "fifth", "sixth")
_DASHES: tuple[list[float], ...] = ([], [6, 3], [1.5, 2.5], [8, 3, 1.5, 3], [3, 3])
"""Dash patterns; with five of them and six colours, thirty lanes differ in one or the other."""
_NOISE_DASHES = [1.0, 2.0]


def lane_pen(theme: Theme, lanes: ComparedLanes, run_id: int, width: float = 1.0) -> QPen:
    """The line of a lane."""
    if lanes.is_noise(run_id):
        role, dashes = "lane.noise", _NOISE_DASHES
    else:
        others = [run for run in lanes.followers if not lanes.is_noise(run)]
        place = others.index(run_id)
        role = f"lane.{_ROLES[place % len(_ROLES)]}"
        dashes = _DASHES[place % len(_DASHES)]
    pen = QPen(theme.color(role), width)
    pen.setCosmetic(True)
    if dashes:
        pen.setStyle(Qt.PenStyle.CustomDashLine)
        pen.setDashPattern(dashes)
    return pen
