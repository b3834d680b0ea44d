"""A heat map with selectable cells, by mouse and keyboard."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PySide6.QtCore import QEvent, QPoint, QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QKeyEvent, QMouseEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy

from app.looks import Theme, figures_font
from app.trace_models.tune_surface import BEST, CURRENT, HeatMap, cell_colours
from app.widgets.build import TipWidget

_GAP = 1.0
_FRAME = 2.0
_STAR = "★ "
_PAD = 6
_MOST_WIDE, _MOST_HIGH = 22.0, 5.0
"""Largest cell size, in characters and lines."""
_STEPS = {
    Qt.Key.Key_Left: (0, -1),
    Qt.Key.Key_Right: (0, 1),
    Qt.Key.Key_Up: (1, 0),
    Qt.Key.Key_Down: (-1, 0),
}
_CHOOSE = (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space)

Cell = tuple[int, int]
"""Row, from the bottom, and column."""


class HeatGrid(TipWidget):
    """The best cell has a star and a frame, the current one a dashed frame; arrow keys move, Return
    chooses."""

    pointed = Signal(object)  # Cell, or None
    chosen = Signal(int, int)  # row, column

    def __init__(self, theme: Theme, name: str) -> None:
        super().__init__()
        self._theme = theme
        self.shown: HeatMap | None = None
        self._at: Cell | None = None
        self.tip: Callable[[int, int], str] = lambda _row, _column: ""
        """Text of the tooltip of a cell, empty for none."""
        self.setAccessibleName(name)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setMouseTracking(True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)

    def set_map(self, heat_map: HeatMap | None) -> None:
        before = self.shown
        self.shown = heat_map
        if before is None or heat_map is None or before.values.shape != heat_map.values.shape:
            self._point(None)
        elif self._at is not None:
            self.pointed.emit(self._at)  # the cell's figures have changed
        self._describe()
        line = self.fontMetrics().height()
        n_y = heat_map.values.shape[0] if heat_map is not None else 1
        self.setMaximumHeight(round(n_y * _MOST_HIGH * line) + _lines_around(line) + 2)
        self.update()

    def sizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        return QSize(60 * metrics.averageCharWidth(), 16 * metrics.height())

    def minimumSizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        return QSize(24 * metrics.averageCharWidth(), 6 * metrics.height())

    @property
    def most_wide(self) -> int:
        """The width of all cells at their largest size."""
        n_x = self.shown.values.shape[1] if self.shown is not None else 1
        cells = n_x * _MOST_WIDE * self.fontMetrics().averageCharWidth()
        return round(self._left() + cells) + 2

    def cell_box(self, row: int, column: int) -> QRectF:
        """The rectangle of a cell, including the gaps around it."""
        area, width, height = self._area()
        return QRectF(
            area.left() + column * width, area.bottom() - (row + 1) * height, width, height
        )

    def cell_at(self, place: QPointF) -> Cell | None:
        """The cell at a place, None where there is none."""
        area, width, height = self._area()
        if self.shown is None or not area.contains(place):
            return None
        n_y, n_x = self.shown.values.shape
        column = min(int((place.x() - area.left()) / width), n_x - 1)
        row = min(int((area.bottom() - place.y()) / height), n_y - 1)
        return row, column

    def _area(self) -> tuple[QRectF, float, float]:
        """The cells' area, and width and height of a cell."""
        metrics, heat_map = self.fontMetrics(), self.shown
        n_y, n_x = heat_map.values.shape if heat_map is not None else (1, 1)
        left = min(self._left(), self.width() / 3)
        top = metrics.height() + 2
        width = (self.width() - left - 2) / max(1, n_x)
        height = (self.height() - _lines_around(metrics.height())) / max(1, n_y)
        width = max(1.0, min(width, _MOST_WIDE * metrics.averageCharWidth()))
        height = max(1.0, min(height, _MOST_HIGH * metrics.height()))
        return QRectF(left, top, width * n_x, height * n_y), width, height

    def _left(self) -> int:
        """Width of the labels left of the cells."""
        labels = self.shown.y_labels if self.shown is not None else ()
        widest = max(map(self.fontMetrics().horizontalAdvance, labels), default=0)
        return widest + 2 * _PAD

    def paintEvent(self, _event: QPaintEvent) -> None:
        heat_map = self.shown
        if heat_map is None:
            return
        painter = QPainter(self)
        painter.setFont(figures_font())
        self._paint_labels(painter, heat_map)
        shares = heat_map.shares
        _, width, height = self._area()
        metrics = self.fontMetrics()
        widest = max(
            (metrics.horizontalAdvance(t) for row in heat_map.texts for t in row), default=0
        )
        has_text = widest + 2 <= width and metrics.height() <= height
        has_star = widest + 2 + metrics.horizontalAdvance(_STAR) <= width
        for row, column in np.ndindex(*shares.shape):
            box = self.cell_box(row, column).adjusted(_GAP, _GAP, -_GAP, -_GAP)
            share = float(shares[row, column])
            if share != share:
                painter.setPen(self._theme.color("plot.grid"))
                painter.setBrush(Qt.BrushStyle.NoBrush)
                painter.drawRect(box.adjusted(0.5, 0.5, -0.5, -0.5))
                ink = self._theme.color("ui.muted")
            else:
                name = heat_map.grounds[row][column] if heat_map.grounds else ""
                colour, ink = cell_colours(self._theme, share, name)
                painter.fillRect(box, colour)
            if has_text:
                painter.setPen(ink)
                text = heat_map.texts[row][column]
                if (row, column) == heat_map.marks.get(BEST) and has_star:
                    text = f"{_STAR}{text}"
                painter.drawText(box, Qt.AlignmentFlag.AlignCenter, text)
        self._paint_marks(painter, heat_map)
        painter.end()

    def _paint_labels(self, painter: QPainter, heat_map: HeatMap) -> None:
        metrics, (area, width, height) = self.fontMetrics(), self._area()
        painter.setPen(self._theme.color("plot.text"))
        right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        line = metrics.height()
        painter.drawText(
            QRectF(0, 0, self.width(), line), Qt.AlignmentFlag.AlignLeft, heat_map.y_name
        )
        under = QRectF(area.left(), area.bottom() + line + 3, area.width(), line)
        painter.drawText(under, Qt.AlignmentFlag.AlignCenter, heat_map.x_name)
        step = max(1, int(np.ceil(line / height)))
        for row in range(0, len(heat_map.y_labels), step):
            box = self.cell_box(row, 0)
            beside = QRectF(0, box.center().y() - line / 2, area.left() - _PAD, line)
            text = metrics.elidedText(
                heat_map.y_labels[row], Qt.TextElideMode.ElideRight, int(beside.width())
            )
            painter.drawText(beside, right, text)
        widest = max((metrics.horizontalAdvance(t) for t in heat_map.x_labels), default=0) + 4
        step = max(1, int(np.ceil(min(widest, 12 * metrics.averageCharWidth()) / width)))
        for column in range(0, len(heat_map.x_labels), step):
            middle = self.cell_box(0, column).center().x()
            room = step * width
            box = QRectF(middle - room / 2, area.bottom() + 2, room, line)
            text = metrics.elidedText(
                heat_map.x_labels[column], Qt.TextElideMode.ElideRight, int(room)
            )
            painter.drawText(box, Qt.AlignmentFlag.AlignCenter, text)

    def _paint_marks(self, painter: QPainter, heat_map: HeatMap) -> None:
        painter.setBrush(Qt.BrushStyle.NoBrush)
        for mark, role, style in (
            (BEST, "status.ok", Qt.PenStyle.SolidLine),
            (CURRENT, "plot.limit", Qt.PenStyle.DashLine),
        ):
            cell = heat_map.marks.get(mark)
            if cell is not None:
                box = self.cell_box(*cell)
                inset = 0.0 if mark == BEST else _FRAME + 1.0
                # outlined, to be visible on any cell colour
                painter.setPen(QPen(self._theme.color("plot.background"), _FRAME + 2.0))
                painter.drawRect(box.adjusted(inset, inset, -inset, -inset))
                painter.setPen(QPen(self._theme.color(role), _FRAME, style))
                painter.drawRect(box.adjusted(inset, inset, -inset, -inset))
        if self._at is not None:
            painter.setPen(QPen(self._theme.color("ui.text"), 1.0))
            painter.drawRect(self.cell_box(*self._at).adjusted(0.5, 0.5, -0.5, -0.5))

    def _point(self, cell: Cell | None) -> None:
        if cell != self._at:
            self._at = cell
            self.pointed.emit(cell)
            self._describe()
            self.update()

    def _describe(self) -> None:
        """Set the accessible description: the cell pointed at, else the whole."""
        shown = self.shown
        self.setAccessibleDescription("" if shown is None else _words(shown, self._at))

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Leave and not self.hasFocus():
            self._point(None)
        if event.type() == QEvent.Type.FocusOut and not self.underMouse():
            self._point(None)
        if event.type() == QEvent.Type.FocusIn and self.shown is not None and self._at is None:
            self._point(self._first())
        return super().event(event)

    def tip_at(self, at: QPoint) -> str:
        cell = self.cell_at(at.toPointF())
        return "" if cell is None else self.tip(*cell)

    def _first(self) -> Cell:
        """The cell where key navigation starts."""
        marks = {} if self.shown is None else self.shown.marks
        return marks.get(CURRENT, marks.get(BEST, (0, 0)))

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        cell = self.cell_at(event.position())
        if cell is not None:
            self._point(cell)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        cell = self.cell_at(event.position())
        if event.button() == Qt.MouseButton.LeftButton and cell is not None:
            self._point(cell)
            self.chosen.emit(*cell)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        heat_map, key = self.shown, Qt.Key(event.key())
        if heat_map is None or not (key in _STEPS or key in _CHOOSE):
            super().keyPressEvent(event)
            return
        if key in _STEPS:
            at, step = self._at, _STEPS[key]
            n_y, n_x = heat_map.values.shape
            row, column = self._first() if at is None else (at[0] + step[0], at[1] + step[1])
            self._point((min(max(row, 0), n_y - 1), min(max(column, 0), n_x - 1)))
        elif self._at is not None:
            self.chosen.emit(*self._at)


def _lines_around(line: int) -> int:
    """Height of names and labels above and below the cells."""
    return 3 * line + 6


def _words(heat_map: HeatMap, at: Cell | None) -> str:
    """A cell in words, or without one the best and the current one."""
    if at is not None:
        return f"{heat_map.place(*at)}: {heat_map.texts[at[0]][at[1]]}"
    words = [" by ".join(filter(None, (heat_map.y_name, heat_map.x_name)))]
    for mark, (row, column) in heat_map.marks.items():
        words.append(f"{mark}: {heat_map.place(row, column)}, {heat_map.texts[row][column]}")
    return "; ".join(words)
