"""Line styles of plots: colour role and dashes for each lane, a cased dashed line for a second run,
and legend samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from PySide6.QtCore import QPoint, QRect, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPen, QPolygon

from app.looks import OVERLAY_ROLES, Theme
from app.trace_models.compared_lanes import ComparedLanes

_ROLES = ("first", "second", "third", "fourth", "fifth", "sixth")
_DASHES: tuple[list[float], ...] = ([], [6, 3], [1.5, 2.5], [8, 3, 1.5, 3], [3, 3])
"""Dash patterns; five of them with six colours distinguish thirty lanes."""
_NOISE_DASHES = [1.0, 2.0]


def plot_pen(
    colour: QColor,
    width: float = 1.0,
    style: Qt.PenStyle = Qt.PenStyle.SolidLine,
    dashes: Sequence[float] = (),
) -> QPen:
    """A pen for plot items. width: in pixels at any zoom."""
    pen = QPen(colour, width, style)
    pen.setCosmetic(True)
    if dashes:
        pen.setDashPattern(list(dashes))
    return pen


def lane_pen(theme: Theme, lanes: ComparedLanes, run_id: int, width: float = 1.0) -> QPen:
    """The line of a lane."""
    if lanes.is_noise(run_id):
        role, dashes = "lane.noise", _NOISE_DASHES
    else:
        others = [run for run in lanes.followers if not lanes.is_noise(run)]
        place = others.index(run_id)
        role = f"lane.{_ROLES[place % len(_ROLES)]}"
        dashes = _DASHES[place % len(_DASHES)]
    return plot_pen(theme.color(role), width, dashes=dashes)


DASHES = (5.0, 3.0)
DOTS = (1.5, 2.5)
OVERLAYS = tuple(zip(OVERLAY_ROLES, (DASHES, (9.0, 2.0, 1.5, 2.0), (3.0, 2.0)), strict=True))
"""Colour role and dashes of each overlaid run."""


@cache
def overlay_sample(dashes: tuple[float, ...]) -> Callable[[QPainter, QRect, QColor], None]:
    """A function that paints a line with these dashes into a legend."""

    def draw(painter: QPainter, box: QRect, colour: QColor) -> None:
        painter.setPen(plot_pen(colour, 1.5, dashes=[length / 1.5 for length in dashes]))
        painter.drawLine(box.left(), box.center().y(), box.right(), box.center().y())

    return draw


def draw_bar(painter: QPainter, box: QRect, colour: QColor) -> None:
    """A filled square."""
    painter.fillRect(box, colour)


def draw_hatched(painter: QPainter, box: QRect, colour: QColor) -> None:
    """A hatched square with an outline."""
    painter.fillRect(box, QBrush(colour, Qt.BrushStyle.BDiagPattern))
    painter.setPen(colour)
    painter.drawRect(box.adjusted(0, 0, -1, -1))


def draw_hollow(painter: QPainter, box: QRect, colour: QColor) -> None:
    """A dotted outline."""
    painter.setPen(QPen(colour, 1.0, Qt.PenStyle.DotLine))
    painter.drawRect(box.adjusted(0, 0, -1, -1))


def draw_cross(painter: QPainter, box: QRect, colour: QColor) -> None:
    """An x."""
    painter.setPen(QPen(colour, 1.5))
    inner = box.adjusted(1, 1, -2, -2)
    painter.drawLine(inner.topLeft(), inner.bottomRight())
    painter.drawLine(inner.topRight(), inner.bottomLeft())


def draw_dashes(painter: QPainter, box: QRect, colour: QColor) -> None:
    """A dashed line across."""
    painter.setPen(QPen(colour, 1.5, Qt.PenStyle.DashLine))
    painter.drawLine(box.left(), box.center().y(), box.right(), box.center().y())


def draw_dots(painter: QPainter, box: QRect, colour: QColor) -> None:
    """A dotted line from top to bottom."""
    painter.setPen(QPen(colour, 1.5, Qt.PenStyle.DotLine))
    painter.drawLine(box.center().x(), box.top(), box.center().x(), box.bottom())


def draw_triangle(painter: QPainter, box: QRect, colour: QColor) -> None:
    """A triangle on its tip."""
    middle = box.center()
    _fill(painter, [box.topLeft(), box.topRight(), QPoint(middle.x(), box.bottom())], colour)


def draw_diamond(painter: QPainter, box: QRect, colour: QColor) -> None:
    """A square on its corner."""
    middle = box.center()
    corners = [
        QPoint(middle.x(), box.top()),
        QPoint(box.right(), middle.y()),
        QPoint(middle.x(), box.bottom()),
        QPoint(box.left(), middle.y()),
    ]
    _fill(painter, corners, colour)


def _fill(painter: QPainter, points: list[QPoint], colour: QColor) -> None:
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(colour)
    painter.drawPolygon(QPolygon(points))
