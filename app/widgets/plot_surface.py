"""The base of all plots: frame, axes and items in theme colours, and the pointer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pyqtgraph as pg
from PySide6.QtCore import QEvent, QPoint, QSize, Qt, Signal
from PySide6.QtGui import QBrush, QContextMenuEvent, QPen
from PySide6.QtWidgets import QFrame, QMenu

from app.looks import Theme
from app.widgets.build import shows_tip
from app.widgets.line_styles import plot_pen

_Item = TypeVar("_Item", bound=pg.GraphicsObject)


def draw_nothing(*items: pg.PlotCurveItem | pg.ScatterPlotItem) -> None:
    """Empty these items, unless they are: pyqtgraph does work for empty ones too."""
    for item in items:
        x, _ = item.getData()
        if x is not None and len(x):
            item.setData([], [])


class PlotSurface(pg.PlotWidget):
    """A plot without pyqtgraph's menu and buttons. widest_label: at its left axis."""

    clicked = Signal(float, float)  # x, y
    double_clicked = Signal()

    def __init__(self, theme: Theme, widest_label: str, *, box: pg.ViewBox | None = None) -> None:
        figures = ValueAxis()
        axes = {"left": figures, "bottom": PlotAxis("bottom")}
        super().__init__(axisItems=axes, enableMenu=False, viewBox=box)
        self._theme = theme
        self._dressing: list[Callable[[Theme], None]] = []
        self.tip: Callable[[float, float], str] = lambda _x, _y: ""
        """Tooltip text for an x and a y, empty for none."""
        self.menu: QMenu | None = None
        """Opened by a right click and the menu key."""
        self._ticks: dict[str, Sequence[tuple[float, str]]] = {}
        self._names: dict[str, tuple[str, str]] = {}
        """Names of the axes, with their colour roles."""
        self._labels: dict[str, tuple[str, str]] = {}
        self.setFrameShape(QFrame.Shape.NoFrame)
        plot = self.getPlotItem()
        plot.hideButtons()
        for side in ("top", "right"):  # never shown, but they would follow every change of range
            plot.getAxis(side).unlinkFromView()
        metrics = self.fontMetrics()
        figures.line_height = metrics.height()
        figures.setWidth(metrics.horizontalAdvance(widest_label) + metrics.height())
        self.axis_height = 2 * metrics.height() + 4
        """Height of the x-axis's figures and name."""
        plot.getAxis("bottom").setHeight(self.axis_height)
        # pyqtgraph drops a label that is wider than the rest of its tick, such as the 0
        plot.getAxis("bottom").setStyle(hideOverlappingLabels=metrics.averageCharWidth())
        self.box = plot.getViewBox()
        self.box.setMouseEnabled(x=False, y=False)
        self.scene().sigMouseClicked.connect(self._on_clicked)
        theme.apply(self._dress)

    def sizeHint(self) -> QSize:
        """Qt's own is the current size: on a scrolling page it would never shrink."""
        return self.minimumSizeHint()

    def put(
        self,
        item: _Item,
        pen: str = "",
        brush: str = "",
        *,
        width: float = 1.0,
        style: Qt.PenStyle = Qt.PenStyle.SolidLine,
        dashes: Sequence[float] = (),
        pattern: Qt.BrushStyle = Qt.BrushStyle.SolidPattern,
        casing: float = 0.0,
    ) -> _Item:
        """Add an item in the colours of these roles. A pattern has an outline in its colour;
        symbols of a line are filled by the brush, hollow without. casing: width of a background
        line that separates it from bars."""
        edge = pen or ("" if pattern is Qt.BrushStyle.SolidPattern else brush)

        def dress(theme: Theme) -> None:
            line, thin = QPen(Qt.PenStyle.NoPen), QPen(Qt.PenStyle.NoPen)
            if edge:
                line = plot_pen(theme.color(edge), width, style, dashes)
                thin = thin if brush else plot_pen(theme.color(edge))
            fill = QBrush(theme.color(brush), pattern) if brush else QBrush(Qt.BrushStyle.NoBrush)
            if isinstance(item, pg.BarGraphItem):
                item.setOpts(pen=line, brush=fill)
                return
            item.setPen(line)
            if isinstance(item, pg.PlotDataItem):
                item.setSymbolPen(thin)
                item.setSymbolBrush(fill)
            elif isinstance(item, pg.ScatterPlotItem):
                item.setBrush(fill)
            elif casing:
                item.setShadowPen(plot_pen(theme.color("plot.background"), casing))

        if edge or brush:
            self._dressing.append(dress)
            dress(self._theme)
        self.addItem(item, ignoreBounds=True)
        return item

    def _dress(self) -> None:
        """Apply the theme's colours to background, axes, figures and items."""
        theme = self._theme
        self.setBackground(theme.color("plot.background"))
        for side in ("left", "bottom"):
            axis = self.getPlotItem().getAxis(side)
            axis.setPen(QPen(theme.color("plot.axis")))
            axis.setTickPen(QPen(theme.color("plot.axis")))
            axis.setStyle(tickLength=3, maxTickLevel=1)  # the finest ticks cost most and tell least
            axis.setTextPen(theme.color("plot.text"))
        self._label_axes()
        for dress in self._dressing:
            dress(theme)

    def name_axes(self, left: str, bottom: str, role: str = "plot.text") -> None:
        """Label the axes; role: colour of the x-axis's name."""
        self._names = {"left": (left, "plot.text"), "bottom": (bottom, role)}
        self._label_axes()

    def _label_axes(self) -> None:
        for side, (name, role) in self._names.items():
            label = name, self._theme.color(role).name()
            if self._labels.get(side) != label:  # pyqtgraph lays out again for an equal one, too
                self._labels[side] = label
                self.getPlotItem().getAxis(side).setLabel(name, color=label[1])

    def set_x_range(self, left: float, right: float) -> None:
        """Show this part of the x-axis; pyqtgraph does work for an equal range too."""
        if self.box.state["targetRange"][0] != [left, right]:
            self.box.setXRange(left, right, padding=0)

    def set_y_range(self, low: float, high: float) -> None:
        if self.box.state["targetRange"][1] != [low, high]:
            self.box.setYRange(low, high, padding=0)

    def set_ticks(self, side: str, ticks: Sequence[tuple[float, str]]) -> None:
        """Set the tick labels of an axis; pyqtgraph redraws it for equal ones too."""
        if self._ticks.get(side) != ticks:
            self._ticks[side] = ticks
            self.getPlotItem().getAxis(side).setTicks([ticks])

    def set_rows(self, ticks: Sequence[tuple[float, str]]) -> None:
        """Label rows along the left axis: every second or third if not all fit."""
        step = math.ceil(len(ticks) * self.line_height / max(1.0, self.box.height()))
        self.set_ticks("left", ticks[:: max(1, step)])

    @property
    def line_height(self) -> int:
        """Pixels of a figure at the left axis."""
        return self.fontMetrics().ascent()

    def place_items(self) -> None:
        """Place items by the axes, before painting."""
        self.box.prepareForPaint()
        for item in self.getPlotItem().items:
            if isinstance(item, pg.InfiniteLine) and item.isVisible():
                item.boundingRect()  # computed on demand, then laid out anew

    def _on_clicked(self, event: object) -> None:
        if event.button() != Qt.MouseButton.LeftButton:  # type: ignore[attr-defined]
            return
        if event.double():  # type: ignore[attr-defined]
            self.double_clicked.emit()
            return
        place = event.scenePos()  # type: ignore[attr-defined]
        if self.box.sceneBoundingRect().contains(place):
            at = self.box.mapSceneToView(place)
            self.clicked.emit(at.x(), at.y())

    def viewportEvent(self, event: QEvent) -> bool:
        return shows_tip(event, self, self._tip_at) or bool(super().viewportEvent(event))

    def _tip_at(self, pos: QPoint) -> str:
        place = self.mapToScene(pos)
        at = self.box.mapSceneToView(place)
        return self.tip(at.x(), at.y()) if self.box.sceneBoundingRect().contains(place) else ""

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        if self.menu is not None:
            self.menu.popup(event.globalPos())
            event.accept()


_CUT = 2
"""Pixels by which a figure at the edge is moved; its tick stays."""
_STEPS = ((1.0, 2.0), (2.0, 2.5), (5.0, 2.0))
"""First digits of round steps, and the factor to the next one."""


def wider_step(step: float) -> float:
    """The next round step: 1, 2, 5, 10, 20 …"""
    digit = float(f"{step:e}"[0])
    return step * next(factor for first, factor in reversed(_STEPS) if digit >= first)


class PlotAxis(pg.AxisItem):
    """An axis that avoids pyqtgraph's layout at every change of range or colour, and figures drawn
    partly outside."""

    _html = ""

    def updateAutoSIPrefix(self) -> None:
        """Figures are never scaled; pyqtgraph scales them even as it switches that off."""
        self._updateLabel()

    def _updateLabel(self) -> None:
        html = self.labelString()
        if html != self._html:
            self._html = html
            super()._updateLabel()
            self.resizeEvent()  # otherwise a longer name would start where the old one did
        self.picture = None
        self.update()

    def generateDrawSpecs(self, p: object) -> Any:
        """The axis, ticks and figures without those cut by the upper edge; figures that only touch
        it, or the right edge, are moved inside."""
        specs = super().generateDrawSpecs(p)
        if specs is None:
            return None
        axis, ticks, texts = specs
        corner = self.scenePos()
        right, top = self.getViewWidget().width() - corner.x(), -corner.y()
        texts = [text for text in texts if text[0].top() >= top - _CUT]
        for rect, *_ in texts:
            rect.moveRight(min(rect.right(), right))
            rect.moveTop(max(rect.top(), top))
        return axis, ticks, texts


class ValueAxis(PlotAxis):
    """An axis that allows two figures; pyqtgraph uses at least three, which overlap."""

    def __init__(self) -> None:
        super().__init__("left")
        self.line_height = 1
        """Pixels that a figure takes."""

    def tickSpacing(self, low: float, high: float, size: float) -> list[tuple[float, float]]:
        """Tick steps as (step, offset), for values low..high on `size` pixels."""
        levels: list[tuple[float, float]] = super().tickSpacing(low, high, size)
        room = size / self.line_height
        if not levels or (high - low) / levels[0][0] <= room:
            return levels
        step = levels[0][0]
        while (high - low) / step > room and wider_step(step) <= high - low:
            step = wider_step(step)
        return [(step, 0.0)]
