"""Samples for legends: each painted in its colour into a small square."""

from __future__ import annotations

from PySide6.QtCore import QPoint, QRect, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPen, QPolygon


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
