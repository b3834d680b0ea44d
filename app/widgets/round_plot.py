"""A plot with rounds or positions on the x-axis: follows the newest, zooms, selects one."""

from __future__ import annotations

from collections.abc import Callable

import pyqtgraph as pg
from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QHelpEvent, QKeyEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QFrame, QToolTip, QWidget

from app.theme import Theme
from app.widgets.chip import Chip

_FIRST_SPAN = 96
_LEAST_SPAN = 8
_WIDEST_LABEL = "seq 00 "
_PAN = 0.25
_ZOOM = 0.7


class RoundPlot(pg.PlotWidget):
    """Round n covers x from n - 0.5 to n + 0.5. The y-axis is up to the view that uses it.

    unit: what is counted on the x-axis, round or position.

    Wheel: zoom at the cursor. Drag: pan. Keys: Left and Right step through rounds, W and S
    zoom, A and D pan, End follows the newest round again.
    """

    clicked = Signal(float, float)  # x, y
    round_stepped = Signal(int)  # -1 or +1
    x_changed = Signal(float, float)
    follow_changed = Signal(bool)

    def __init__(
        self,
        theme: Theme,
        y_label: str,
        parent: QWidget | None = None,
        *,
        unit: str = "round",
    ) -> None:
        super().__init__(parent)
        self.tip: Callable[[float, float], str] = lambda _x, _y: ""
        """Text of the tooltip for an x and a y, empty for none."""
        self._y_label, self._unit = y_label, unit
        self._first = 0
        self._n_rounds = 0
        self._cursor_round: int | None = None
        self._linked: RoundPlot | None = None
        self._span = float(_FIRST_SPAN)
        self._follow = True
        self._taking = False
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        plot = self.getPlotItem()
        plot.setMenuEnabled(False)
        plot.hideButtons()
        metrics = self.fontMetrics()
        plot.getAxis("left").setWidth(metrics.horizontalAdvance(_WIDEST_LABEL) + metrics.height())
        plot.getAxis("bottom").setHeight(2 * metrics.height() + 4)
        self.box = plot.getViewBox()
        self.box.setMouseEnabled(x=True, y=False)
        self.box.disableAutoRange()
        self.box.setDefaultPadding(0.0)
        self.cursor_line = pg.InfiniteLine(angle=90, movable=False)
        self.cursor_line.setZValue(20)
        self.cursor_line.hide()
        plot.addItem(self.cursor_line, ignoreBounds=True)
        self._chip = Chip("→ Jump to live", theme, self)
        self._chip.setToolTip(f"Follow the newest {unit} again (End)")
        self._chip.hide()
        self._chip.clicked.connect(lambda: self.set_follow(True))
        self.box.sigXRangeChanged.connect(self._on_x_changed)
        self.box.sigRangeChangedManually.connect(self._on_moved_by_hand)
        self.scene().sigMouseClicked.connect(self._on_clicked)
        self.retheme(theme)
        self.show_rounds(0)

    @property
    def n_rounds(self) -> int:
        """How many rounds there are."""
        return self._n_rounds

    @property
    def follow(self) -> bool:
        """Whether the newest round is kept in sight."""
        return self._follow

    @property
    def x_range(self) -> tuple[float, float]:
        """The rounds in sight."""
        left, right = self.box.viewRange()[0]
        return left, right

    def show_rounds(self, n_rounds: int, first: int = 0) -> None:
        """Say that there are rounds first..n_rounds; while following, the newest are in sight."""
        self._n_rounds, self._first = n_rounds, first
        if self._follow:
            newest = max(n_rounds, 0 if self._linked is None else self._linked.n_rounds)
            right = max(float(newest), first + self._span) - 0.5
            self.box.setXRange(right - self._span, right, padding=0)
        self._place_chip()

    def set_span(self, span: int) -> None:
        """How many rounds are in sight while following."""
        self._span = float(span)
        self.show_rounds(self._n_rounds, self._first)

    def set_follow(self, follow: bool) -> None:
        """Keep the newest round in sight, or stay where the reader is."""
        if follow != self._follow:
            self._follow = follow
            self.follow_changed.emit(follow)
        self.show_rounds(self._n_rounds, self._first)

    def set_cursor(self, round_: int | None) -> None:
        """Put the cursor line on a round, and the round into sight, or hide the line."""
        self._cursor_round = round_
        self._name_axis()
        self.cursor_line.setVisible(round_ is not None)
        if round_ is None:
            return
        self.cursor_line.setValue(round_)
        left, right = self.x_range
        if not left <= round_ <= right:
            self.set_follow(False)
            half = (right - left) / 2
            self.box.setXRange(round_ - half, round_ + half, padding=0)

    def link_x(self, other: RoundPlot) -> None:
        """Share the rounds in sight, and following, with another plot."""
        for one, two in ((self, other), (other, self)):
            one._linked = two
            one.x_changed.connect(two.take_x)
            one.follow_changed.connect(two.set_follow)
        self.take_x(*other.x_range)

    def take_x(self, left: float, right: float) -> None:
        """Show these rounds because a linked plot does."""
        self._taking = True
        self._span = right - left
        self.box.setXRange(left, right, padding=0)
        self._taking = False

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self.setBackground(theme.color("plot.background"))
        self._theme = theme
        for side in ("left", "bottom"):
            axis = self.getPlotItem().getAxis(side)
            axis.setPen(QPen(theme.color("plot.axis")))
            axis.setTickPen(QPen(theme.color("plot.axis")))
            axis.setStyle(tickLength=3)
            axis.enableAutoSIPrefix(False)
            axis.setTextPen(theme.color("plot.text"))
        self._name_axis()
        pen = QPen(theme.color("plot.cursor"))
        pen.setCosmetic(True)
        self.cursor_line.setPen(pen)
        self._chip.retheme(theme)

    def _name_axis(self) -> None:
        """Label the axes; a selected round is named in the colour of its line."""
        plot, text = self.getPlotItem(), self._theme.color("plot.text").name()
        plot.getAxis("left").setLabel(self._y_label, color=text)
        if self._cursor_round is None:
            plot.getAxis("bottom").setLabel(self._unit, color=text)
        else:
            colour = self._theme.color("plot.cursor").name()
            plot.getAxis("bottom").setLabel(f"{self._unit} {self._cursor_round}", color=colour)

    def _on_x_changed(self) -> None:
        left, right = self.x_range
        self._place_chip()
        if not self._taking:
            self.x_changed.emit(left, right)

    def _on_moved_by_hand(self) -> None:
        left, right = self.x_range
        self._span = max(right - left, float(_LEAST_SPAN))
        follow = left <= self._n_rounds - 1 <= right
        if follow != self._follow:
            self._follow = follow
            self.follow_changed.emit(follow)
        self._place_chip()

    def _place_chip(self) -> None:
        self._chip.setVisible(not self._follow and self._n_rounds - 1 > self.x_range[1])
        room = self.rect()
        self._chip.move(room.right() - self._chip.width() - 8, room.top() + 8)

    def _on_clicked(self, event: object) -> None:
        if event.button() != Qt.MouseButton.LeftButton:  # type: ignore[attr-defined]
            return
        place = event.scenePos()  # type: ignore[attr-defined]
        if self.box.sceneBoundingRect().contains(place):
            at = self.box.mapSceneToView(place)
            self.clicked.emit(at.x(), at.y())

    def viewportEvent(self, event: QEvent) -> bool:
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            place = self.mapToScene(event.pos())
            inside = self.box.sceneBoundingRect().contains(place)
            at = self.box.mapSceneToView(place)
            text = self.tip(at.x(), at.y()) if inside else ""
            QToolTip.showText(event.globalPos(), text, self)
            return True
        return bool(super().viewportEvent(event))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        left, right = self.x_range
        step, middle = (right - left) * _PAN, (left + right) / 2
        actions: dict[int, Callable[[], None]] = {
            Qt.Key.Key_Left: lambda: self.round_stepped.emit(-1),
            Qt.Key.Key_Right: lambda: self.round_stepped.emit(+1),
            Qt.Key.Key_A: lambda: self._move_to(left - step, right - step),
            Qt.Key.Key_D: lambda: self._move_to(left + step, right + step),
            Qt.Key.Key_W: lambda: self._zoom(middle, right - left, _ZOOM),
            Qt.Key.Key_S: lambda: self._zoom(middle, right - left, 1 / _ZOOM),
            Qt.Key.Key_End: lambda: self.set_follow(True),
        }
        act = actions.get(event.key())
        if act is None:
            event.ignore()
        else:
            act()

    def _zoom(self, middle: float, span: float, factor: float) -> None:
        half = max(span * factor, float(_LEAST_SPAN)) / 2
        self._move_to(middle - half, middle + half)

    def _move_to(self, left: float, right: float) -> None:
        self.box.setXRange(left, right, padding=0)
        self._on_moved_by_hand()

    def resizeEvent(self, event: QResizeEvent | None) -> None:
        super().resizeEvent(event)
        if event is not None:
            self._place_chip()
