"""A plot over the rounds of a run, or positions: follows the newest one, zooms, selects a range."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent, QPaintEvent, QResizeEvent

from app.looks import Theme
from app.trace_models.run_rows import UNITS, RunAxis, RunOverlay
from app.widgets.fitted_labels import Chip
from app.widgets.line_styles import plot_pen
from app.widgets.plot_surface import PlotSurface

_FIRST_SPAN = 96
_LEAST_SPAN = 8
_WIDEST_LABEL = "seq 000 "
_BARE_AXIS = 5
_LEAST_LINES, _LEAST_HIGH = 2.5, 40
"""Minimum height of a plot in lines, and in pixels for tall fonts."""
_NAMED_FROM = 4
"""Height in lines from which the x-axis has a name."""
_PAN = 0.25
_RANGE_ALPHA = 0.15
_ZOOM = 0.7


class _DragBox(pg.ViewBox):
    """A view box whose drags are signalled. dragged: with the left button, from one x to another,
    and whether the button was released. With Shift it pans, like with the middle button."""

    dragged = Signal(float, float, bool)

    def mouseDragEvent(self, event: Any, axis: int | None = None) -> None:
        shifted = event.modifiers() & Qt.KeyboardModifier.ShiftModifier
        if event.button() != Qt.MouseButton.LeftButton or shifted:
            super().mouseDragEvent(event, axis)
            return
        event.accept()
        places = (event.buttonDownScenePos(), event.scenePos())
        x0, x1 = (self.mapSceneToView(place).x() for place in places)
        self.dragged.emit(x0, x1, bool(event.isFinish()))


class RoundPlot(PlotSurface):
    """A plot whose rounds are placed by `run_axis`; the y-axis belongs to the view that uses it.

    unit: what the x-axis counts, round or position.

    Wheel: zoom at the cursor. Drag: select a range; with Shift or the middle button: pan. Double
    click: back to the initial zoom. Keys: Left and Right step through rounds, W and S zoom, A and D
    pan, F zooms to the selected range, Home shows all rounds, End follows the newest round again,
    Escape clears the range.
    """

    round_stepped = Signal(int)  # -1 or +1
    range_chosen = Signal(int, int)  # first and last round
    range_left = Signal()
    x_changed = Signal(float, float)
    follow_changed = Signal(bool)
    unit_changed = Signal()

    def __init__(self, theme: Theme, y_label: str, *, unit: str = "round") -> None:
        super().__init__(theme, _WIDEST_LABEL, box=_DragBox(enableMenu=False))
        self.overlay: RunOverlay | None = None
        """A second run on the same axis; `show_all` includes its end."""
        self._y_label, self._unit = y_label, unit
        self._first = 0
        self.n_rounds = 0
        self._cursor_round: int | None = None
        self.run_axis = RunAxis()
        self._linked: list[RoundPlot] = []
        self._first_span = float(_FIRST_SPAN)
        self._span: float | None = None
        """The user's zoom while following; None: the initial zoom."""
        self.pinned = False
        self.follow = self.has_axis = self._names_axis = True
        """Whether the newest round is kept visible; whether the x-axis has figures."""
        self._axis_high = self.axis_height
        self._taking = False
        self._taken: tuple[float, float] | None = None
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setMinimumHeight(min(round(_LEAST_LINES * self.fontMetrics().height()), _LEAST_HIGH))
        self.box.setMouseEnabled(x=True, y=False)
        self.box.disableAutoRange()
        self.box.setDefaultPadding(0.0)
        self.cursor_line = self.put(pg.InfiniteLine(angle=90, movable=False), "plot.cursor")
        self.cursor_line.setZValue(20)
        self.cursor_line.hide()
        self.chosen_range: tuple[int, int] | None = None
        self._range_item = pg.LinearRegionItem(movable=False)
        self._range_item.setZValue(15)  # above bars and images, below the cursor
        self._range_item.hide()
        self.addItem(self._range_item, ignoreBounds=True)
        self.box.dragged.connect(self._on_dragged)
        self._chip = Chip("→ To the end", theme, self)
        self._chip.setToolTip(f"Follow the newest {unit} again (End)")
        self._chip.hide()
        self._chip.clicked.connect(lambda: self.set_follow(True))
        self.box.sigXRangeChanged.connect(self._on_x_changed)
        self.box.sigResized.connect(self._fit_name)
        self.box.sigRangeChangedManually.connect(self._on_moved_by_hand)
        self.double_clicked.connect(self.reset_zoom)
        theme.apply(self._colour_plot)
        self.show_rounds(0)

    @property
    def x_range(self) -> tuple[float, float]:
        """Ends of the visible part of the x-axis, in its unit."""
        left, right = self._taken or self.box.viewRange()[0]
        return left, right

    @property
    def rounds_in_sight(self) -> tuple[int, int]:
        """First visible round and one past the last, among existing ones."""
        first, stop = self.run_axis.between(*self.x_range)
        return first, min(stop, self.n_rounds)

    @property
    def n_pixels(self) -> int:
        return max(64, round(self.box.width()))

    @property
    def pixel(self) -> float:
        """Width of a pixel in units of x."""
        left, right = self.x_range
        return (right - left) / self.n_pixels

    def show_rounds(self, n_rounds: int, first: int = 0) -> None:
        """Set the rounds to first..n_rounds; while following, the newest are visible, and at the
        initial zoom all of a finished run."""
        self.n_rounds, self._first = n_rounds, first
        if self.follow:
            newest = max(n_rounds, *(plot.n_rounds for plot in self._linked), 0)
            axis = self.run_axis
            left, right = axis.start(first), axis.start(newest)
            rows = axis.rows
            is_whole = newest and self._span is None and rows is not None and rows.run.ended
            span = self._first_span * axis.round_width if self._span is None else self._span
            span = min(math.inf if is_whole else span, self._room(newest, right - left))
            right = max(right, left + span)
            self._set_x(right - span, right)
        self._place_chip()

    def _room(self, n_rounds: int, length: float) -> float:
        """Axis length for a run of this length: all of it at the end, and before that with room to
        grow, because a scale that moves with every round could not be read."""
        rows, width = self.run_axis.rows, self.run_axis.round_width
        if rows is None or not n_rounds or self._unit != "round":
            return math.inf
        if self.overlay is not None:
            length = max(length, self.overlay.end(self.run_axis.unit))
            n_rounds = max(n_rounds, math.ceil(length / width))
        if rows.run.ended:
            return max(length, _LEAST_SPAN * width)
        return max(1 << n_rounds.bit_length(), 2 * _LEAST_SPAN) * width

    def show_axis(self, shown: bool) -> None:
        """Show figures and name of the x-axis, or leave that to a plot below."""
        if shown != self.has_axis:
            self.has_axis = shown
            self.getPlotItem().getAxis("bottom").setStyle(showValues=shown)
            self._fit_axis()
            self._place_chip()
            self.getPlotItem().layout.activate()  # it may be painted before the next events

    def set_span(self, span: int) -> None:
        """Set how many rounds are visible while following."""
        self._first_span, self._span = float(span), None
        self.show_rounds(self.n_rounds, self._first)

    def set_follow(self, follow: bool) -> None:
        if follow != self.follow:
            self.follow = follow
            self.follow_changed.emit(follow)
        self.show_rounds(self.n_rounds, self._first)

    def reset_zoom(self) -> None:
        """Return to the initial zoom, at the newest rounds."""
        for plot in (self, *self._linked):
            plot._span = None
        self.set_follow(True)

    def set_pinned(self, pinned: bool) -> None:
        """Keep the visible range for later runs, here and in linked plots."""
        for plot in (self, *self._linked):
            plot.pinned = pinned
        if pinned:
            self.set_follow(False)

    def begin_run(self) -> None:
        """Reset the zoom for another run, unless the visible range is pinned."""
        self.n_rounds = self._first = 0
        self.set_range(None)
        if self.pinned:
            self.show_rounds(0)
        else:
            self.reset_zoom()

    def show_all(self) -> None:
        """Show all rounds, and new ones while there is room."""
        axis = self.run_axis
        left, right = axis.start(self._first), axis.start(self.n_rounds)
        if self.overlay is not None:
            right = max(right, self.overlay.end(axis.unit))
        self._move_to(left, max(right, left + _LEAST_SPAN * axis.round_width))

    def set_unit(self, unit: str) -> None:
        """Count rounds, tokens or time (app.trace_models.run_rows), here and in linked plots,
        keeping the visible range."""
        axis = self.run_axis
        if unit == axis.unit:
            return
        first, stop = self.rounds_in_sight
        left, right = self.x_range
        rounds_wide = (right - left) / axis.round_width
        axis.unit = unit
        left, right = axis.start(first), axis.start(stop)
        if self.follow or right <= left:
            right = max(right, left + rounds_wide * axis.round_width)
        for plot in (self, *self._linked):
            plot._span = None if plot._span is None else right - left
            plot.take_x(left, right)
            plot.set_cursor(plot._cursor_round)
            plot.set_range(plot.chosen_range)
            plot.show_rounds(plot.n_rounds, plot._first)
            plot.unit_changed.emit()

    def set_cursor(self, round_: int | None) -> None:
        """Move the cursor line to a round and make it visible, or hide the line."""
        self._cursor_round = round_
        self._name_axis()
        self.cursor_line.setVisible(round_ is not None)
        if round_ is None:
            return
        place = self.run_axis.centre(round_)
        self.cursor_line.setValue(place)
        left, right = self.x_range
        if not left <= place <= right:
            self.set_follow(False)
            span = right - left
            left = min(place, max(place - span / 2, self.run_axis.start(self._first)))
            self._set_x(left, left + span)

    def set_range(self, chosen: tuple[int, int] | None) -> None:
        self.chosen_range = chosen
        self._range_item.setVisible(chosen is not None)
        if chosen is not None:
            first, last = chosen
            ends = self.run_axis.starts(np.array([first, last + 1]))
            self._range_item.setRegion(ends.tolist())

    def zoom_to_range(self) -> None:
        if self.chosen_range is not None:
            left, right = self._range_item.getRegion()
            room = max(0.05 * (right - left), self.run_axis.round_width)
            self.set_follow(False)
            self._move_to(left - room, right + room)

    def _on_dragged(self, x0: float, x1: float, is_over: bool) -> None:
        """Handle a drag from one x to another."""
        if not self.n_rounds:
            return
        at = sorted(self.run_axis.round_at(x) for x in (x0, x1))
        first, last = (min(max(one, self._first), self.n_rounds - 1) for one in at)
        self.set_range((first, last))
        if is_over:
            self.range_chosen.emit(first, last)

    def link_x(self, other: RoundPlot) -> None:
        """Share axis, visible range and following with another plot and those linked to it."""
        self.run_axis = other.run_axis
        for linked in (other, *other._linked):
            for one, two in ((self, linked), (linked, self)):
                one.x_changed.connect(two.take_x)
                one.follow_changed.connect(two.take_follow)
        for linked in (other, *other._linked):
            linked._linked.append(self)
        self._linked = [other, *(plot for plot in other._linked if plot is not self)]
        self.follow, self._span, self.pinned = other.follow, other._span, other.pinned
        if self._cursor_round is not None:
            self.cursor_line.setValue(self.run_axis.centre(self._cursor_round))
        self._name_axis()
        self.take_x(*other.x_range)

    def take_follow(self, follow: bool) -> None:
        """Set following, from a linked plot."""
        if follow != self.follow:
            self.set_follow(follow)

    def take_x(self, left: float, right: float) -> None:
        """Set the visible range, from a linked plot; deferred while hidden."""
        self._taken = left, right
        if not self.viewport().visibleRegion().isEmpty():
            self._use_taken()

    def _colour_plot(self) -> None:
        self._name_axis()
        shade = self._theme.color("plot.cursor")
        for edge in self._range_item.lines:
            edge.setPen(plot_pen(shade))
        shade.setAlphaF(_RANGE_ALPHA)
        self._range_item.setBrush(shade)

    def _name_axis(self) -> None:
        """Label the axes; a selected round is named in its line's colour. pyqtgraph shows a label
        whenever it is written."""
        self._write_names()
        self.getPlotItem().getAxis("bottom").showLabel(self._names_axis)
        self._fit_name()

    def _fit_axis(self) -> None:
        """Hide the x-axis's name if the plot would become too low."""
        line = self.fontMetrics().height()
        named = self.has_axis and self.height() >= _NAMED_FROM * line
        high = self.axis_height if named else self.axis_height - line
        high = high if self.has_axis else _BARE_AXIS
        if (named, high) != (self._names_axis, self._axis_high):
            self._names_axis, self._axis_high = named, high
            axis = self.getPlotItem().getAxis("bottom")
            axis.setHeight(high)
            axis.showLabel(named)

    def _write_names(self) -> None:
        counts_rounds = self._unit == "round"
        if self._cursor_round is None:
            words = UNITS[self.run_axis.unit] if counts_rounds else self._unit
            self.name_axes(self._y_label, words)
            return
        words = f"{self._unit} {self._cursor_round}"
        if counts_rounds:
            words = self.run_axis.text(self._cursor_round)
        self.name_axes(self._y_label, words, "plot.cursor")

    def _set_x(self, left: float, right: float) -> None:
        """Set the visible range, here and in linked plots."""
        self._use_taken()
        self.set_x_range(left, right)

    def _use_taken(self) -> None:
        if self._taken is not None:
            (left, right), self._taken = self._taken, None
            self._taking = True
            self.set_x_range(left, right)
            self._taking = False

    def _on_x_changed(self) -> None:
        left, right = self.x_range
        self._place_chip()
        if not self._taking:
            self.x_changed.emit(left, right)

    def _on_moved_by_hand(self) -> None:
        before = self.x_range
        left, right = self._bounded(*before)
        if (left, right) != before:
            self._set_x(left, right)
        for plot in (self, *self._linked):
            plot._span = max(right - left, _LEAST_SPAN * self.run_axis.round_width)
        newest = self.run_axis.centre(self.n_rounds - 1)
        follow = left <= newest <= right and not self.pinned
        if follow != self.follow:
            self.follow = follow
            self.follow_changed.emit(follow)
        self._place_chip()

    def _bounded(self, left: float, right: float) -> tuple[float, float]:
        """The nearest range within the run, at most as wide as the run."""
        axis = self.run_axis
        n_rounds = max(self.n_rounds, *(plot.n_rounds for plot in self._linked), 0)
        if not n_rounds:
            return left, right
        start, stop = axis.start(self._first), axis.start(n_rounds)
        if self.overlay is not None:
            stop = max(stop, self.overlay.end(axis.unit))
        wide = min(right - left, max(stop - start, self._first_span * axis.round_width))
        left = min(max((left + right - wide) / 2, start), max(stop - wide, start))
        return left, left + wide

    def _place_chip(self) -> None:
        newest = self.run_axis.centre(self.n_rounds - 1)
        is_left = not self.follow and newest > self.x_range[1]
        self._chip.setVisible(is_left and self.has_axis)  # in a stack of plots, the last one has it
        room = self.rect()
        self._chip.move(room.right() - self._chip.width() - 8, room.top() + 8)

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
            Qt.Key.Key_Home: self.show_all,
            Qt.Key.Key_End: lambda: self.set_follow(True),
            Qt.Key.Key_F: self.zoom_to_range,
        }
        if event.key() == Qt.Key.Key_Escape and self.chosen_range is not None:
            self.range_left.emit()
            return
        act = actions.get(event.key())
        if act is None:
            event.ignore()
        else:
            act()

    def _zoom(self, middle: float, span: float, factor: float) -> None:
        half = max(span * factor, _LEAST_SPAN * self.run_axis.round_width) / 2
        self._move_to(middle - half, middle + half)

    def _move_to(self, left: float, right: float) -> None:
        self._set_x(left, right)
        self._on_moved_by_hand()

    def paintEvent(self, event: QPaintEvent) -> None:
        self._use_taken()
        super().paintEvent(event)

    def resizeEvent(self, event: QResizeEvent | None) -> None:
        super().resizeEvent(event)
        if event is not None:
            self._fit_axis()
            self._place_chip()

    def _fit_name(self, _box: object = None) -> None:
        """Hide the name if it is longer than the axis."""
        metrics = self.fontMetrics()
        length = metrics.horizontalAdvance(self._y_label) + metrics.averageCharWidth()
        self.getPlotItem().getAxis("left").showLabel(length <= self.box.height())
