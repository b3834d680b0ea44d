"""The two plots of a comparison on one x-axis, with their legends: the error of every lane by
position, with noise and rollbacks, and the states."""

from __future__ import annotations

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QSplitter, QWidget

from app.looks import Theme
from app.panels.divergence.state_map import PARTS, LogAxis, LogScale, StateMap
from app.trace_models.compared_lanes import ComparedLanes
from app.trace_models.shown_text import error_text
from app.widgets.build import hbox, vbox, words
from app.widgets.fields import shown_choice
from app.widgets.legend import Swatch, SwatchLegend
from app.widgets.line_styles import (
    draw_bar,
    draw_cross,
    draw_dashes,
    draw_diamond,
    draw_dots,
    draw_triangle,
    lane_pen,
    plot_pen,
)
from app.widgets.round_plot import RoundPlot
from engine.analysis.findings.run_rows import lane_kind
from engine.trace.records import POLICY

_LINES, _LOW_LINES = (8, 6), (5, 5)
"""Least heights of the plots in lines of text, including the x-axis, and those in a low view."""
_SPANS = (16, 128, 512)
"""Positions shown at first: at least, while the total is unknown, and at most, while more
arrive."""
_MEASURE, _PART = "Measure to plot", "Part of the state to compare"
_NO_STATES = "No states are recorded for this lane: choose one that rolls back."
_NO_PART = "The layers of this model have no such part: choose the other one."


class LanePlots(QSplitter):
    """Error by position, and state error by layer; both share x-axis and cursor."""

    pos_clicked = Signal(int)
    pos_stepped = Signal(int)  # -1 or +1
    range_chosen = Signal(int, int)  # first and last position
    range_left = Signal()

    def __init__(self, theme: Theme) -> None:
        super().__init__(Qt.Orientation.Vertical)
        self._lanes: ComparedLanes | None = None
        self._run_id = -1
        self._span = 0
        self.delta = DeltaPlot(theme)
        self.states = StateMap(theme)
        self.states.link_x(self.delta)
        self.measure = shown_choice(_MEASURE)
        self.measure.addItems([*METRICS.values()])
        self.measure.currentIndexChanged.connect(lambda i: self.delta.set_metric([*METRICS][i]))
        self.part = shown_choice(_PART)
        self.part.addItems(list(PARTS.values()))
        self.part.currentIndexChanged.connect(self._show_part)
        self.legend = SwatchLegend("Error over positions: signs", SWATCHES, theme)
        self.scale = LogScale(theme)
        self.head = QHBoxLayout()
        """The row above the first plot, for further widgets."""
        self._lane_name = words(wraps=False, muted=True)
        middle = Qt.AlignmentFlag.AlignCenter
        self._note = words(_NO_STATES, muted=True, alignment=middle, minimumWidth=1)
        self.legend.set_column(True)
        side = max(
            *(self.legend.column_width(label) for label in self.legend.labels),
            self.scale.sizeHint().width(),
        )
        for widget in (self.legend, self.scale):
            widget.setFixedWidth(side)  # equal widths, so that positions are aligned
        self.head.addWidget(self.measure)
        self.head.addStretch(1)
        below = hbox(self.part, (self._lane_name, 1))
        self.addWidget(_section(self.head, self.delta, self.legend))
        self.addWidget(_section(below, self.states, self.scale, self._note))
        self.setChildrenCollapsible(False)
        self.set_low(False)
        self.setSizes([600, 400])
        for plot in (self.delta, self.states):
            plot.clicked.connect(lambda x, _y: self.pos_clicked.emit(round(x)))
            plot.round_stepped.connect(self.pos_stepped)
            plot.range_chosen.connect(self.range_chosen)
            plot.range_left.connect(self.range_left)

    def set_low(self, low: bool) -> None:
        """Switch to the low layout, or back."""
        least = _LOW_LINES if low else _LINES
        for plot, lines in zip((self.delta, self.states), least, strict=True):
            plot.setMinimumHeight(lines * self.fontMetrics().height())

    def set_lane(self, lanes: ComparedLanes | None, run_id: int) -> None:
        """Show these lanes, with one of them chosen."""
        if lanes is not self._lanes:
            self._span = 0
            self.delta.set_follow(True)
        self._lanes, self._run_id = lanes, run_id
        self.delta.set_lanes(lanes, run_id)
        self.states.set_lane(lanes, run_id)
        self._lane_name.setText("" if lanes is None else f"of {lanes.names[run_id]}")
        self._show_extent()

    def draw(self) -> None:
        """Draw the current data of the lanes."""
        self.delta.draw()
        self.states.draw()
        self._show_extent()

    def fit(self) -> None:
        """End the axis at the last position once the lanes have ended, which is after the last
        rows."""
        before = self._span
        if self._lanes is not None:
            self._set_span(self._lanes)
        if self._span != before:
            self._show_extent()

    def set_cursor(self, pos: int | None) -> None:
        """Put the cursor line on a position."""
        self.delta.set_cursor(pos)
        self.states.set_cursor(pos)

    def set_range(self, chosen: tuple[int, int] | None) -> None:
        """Shade a range of positions, first and last, or none."""
        for plot in (self.delta, self.states):
            plot.set_range(chosen)

    def _show_part(self, index: int) -> None:
        self.states.set_part(list(PARTS)[index])
        self._show_extent()

    def _show_extent(self) -> None:
        positions = self._lanes.positions().tolist() if self._lanes is not None else []
        if self._lanes is not None:
            self._set_span(self._lanes)
        if positions:
            for plot in (self.delta, self.states):
                plot.show_rounds(positions[-1] + 1, positions[0] - 1)
        empty = self.states.is_empty
        self.legend.set_trailing([_REFUSED] if self.delta.has_refusals else [])
        self._note.setText(_NO_PART if self.states.lacks_part else _NO_STATES)
        self.states.setHidden(empty)
        self.scale.setHidden(empty)
        self._note.setVisible(empty)
        self.delta.getPlotItem().showAxis("bottom", empty)  # the plot below shows the same

    def _set_span(self, lanes: ComparedLanes) -> None:
        """Set the range to the expected positions, at the end to those recorded."""
        least, unknown, most = _SPANS
        wanted = min(lanes.n_predict, most) if lanes.n_predict > 0 else unknown
        if lanes.is_over:
            wanted = int(np.ptp(lanes.positions())) + 1 if len(lanes.positions()) else 0
        span = max(wanted + 2, least)
        if span != self._span:
            self._span = span
            for plot in (self.delta, self.states):
                plot.set_span(span)


def _section(head: QHBoxLayout, *body: QWidget) -> QWidget:
    head.setContentsMargins(6, 0, 6, 0)
    row = hbox(margins=(6, 0, 6, 0), spacing=8)
    for widget in body:
        row.addWidget(widget, 0 if isinstance(widget, SwatchLegend | LogScale) else 1)
    vbox(head, (row, 1), of=(page := QWidget()), margins=(0, 2, 0, 2), spacing=2)
    return page


SWATCHES = (
    Swatch("noise", "plot.band", "Up to the worst error of the noise lane so far", draw_bar),
    Swatch(
        "bound", "plot.limit", "Above ten times the noise (NMSE), a lane is suspect", draw_dashes
    ),
    Swatch("first", "status.error", "First divergence of the chosen lane", draw_dots),
    Swatch("seq_rm", "plot.text", "Rejected tokens removed, in the lane's colour", draw_triangle),
    Swatch("restore", "plot.text", "A checkpoint restored, in the lane's colour", draw_diamond),
)
_REFUSED = Swatch("refused", "plot.text", "A rollback refused, in the lane's colour", draw_cross)
"""Shown if there is one."""
_SIGN_OF_PATH = {"seq_rm": "t", "restore": "d", "restore_depth": "d", "refused": "x"}
_SIGN_PIXELS = 8


METRICS = {
    "nmse": "NMSE of the logits",
    "max_abs": "max |Δ| of the logits",
    "kl": "KL, nats",
    "state_error": "state error, worst layer",
    "conv_error": "window error, worst layer",
}
"""Measures that can be drawn, with titles; verdicts use the first one."""
_SPARSE = ("state_error", "conv_error")
"""Known only after the last token of each round; the line connects these."""


class DeltaPlot(RoundPlot):
    """One line per lane. Equal logits are on the line "exact", below the lowest decade."""

    def __init__(self, theme: Theme) -> None:
        self._metric = next(iter(METRICS))
        self._lanes: ComparedLanes | None = None
        self._run_id = -1
        self._curves: dict[int, pg.PlotDataItem] = {}
        self.axis = LogAxis.over(np.zeros(0))
        self._everything = np.zeros(0)
        super().__init__(theme, "", unit="position")
        self._band = pg.LinearRegionItem(orientation="horizontal", movable=False)
        self._band.setZValue(-10)
        for edge in self._band.lines:
            edge.setPen(pg.mkPen(None))
        self._signs: dict[int, pg.ScatterPlotItem] = {}
        """Rollback marks of each lane that rolls back, one row per lane."""
        plot = self.getPlotItem()
        plot.setDownsampling(auto=True, mode="peak")
        plot.setClipToView(True)
        plot.addItem(self._band, ignoreBounds=True)
        bound, first = (pg.InfiniteLine(angle=angle, movable=False) for angle in (0, 90))
        self._bound = self.put(bound, "plot.limit", style=Qt.PenStyle.DashLine)
        self._first_line = self.put(first, "status.error", style=Qt.PenStyle.DotLine)
        self.setAccessibleName("Error over positions")
        self.tip = self._tip
        theme.apply(self._recolour)

    @property
    def has_refusals(self) -> bool:
        """Whether memory refused a rollback in any lane."""
        return any("x" in signs.data["symbol"] for signs in self._signs.values())

    def set_metric(self, metric: str) -> None:
        """Draw another measure."""
        self._metric = metric
        self.draw()

    def set_lanes(self, lanes: ComparedLanes | None, run_id: int) -> None:
        """Draw these lanes, with one of them chosen."""
        if lanes is not self._lanes:
            for item in (*self._curves.values(), *self._signs.values()):
                self.getPlotItem().removeItem(item)
            self._curves, self._signs = {}, {}
            for follower in lanes.followers if lanes is not None else ():
                curve = pg.PlotDataItem()
                self.getPlotItem().addItem(curve, ignoreBounds=True)
                self._curves[follower] = curve
                if lanes is not None and lane_kind(lanes.store.runs[follower]) == POLICY:
                    self._signs[follower] = pg.ScatterPlotItem(size=_SIGN_PIXELS)
                    self.getPlotItem().addItem(self._signs[follower], ignoreBounds=True)
        self._lanes, self._run_id = lanes, run_id
        self._recolour()
        self.draw()

    def _label_axis(self) -> None:
        """Label as many decades of the y-axis as fit."""
        bottom, top = self.axis.y_range
        gap = (top - bottom) * self.fontMetrics().height() / max(1.0, self.box.height())
        self.set_ticks("left", self.axis.ticks(self._everything, gap))

    def resizeEvent(self, event: QResizeEvent | None) -> None:
        super().resizeEvent(event)
        if self._lanes is not None:
            self._label_axis()

    def draw(self) -> None:
        """Draw the current data of the lanes."""
        lanes = self._lanes
        if lanes is None:
            return
        name = self._metric
        places = {run_id: lanes.values(run_id, "pos") for run_id in lanes.followers}
        values = {run_id: lanes.values(run_id, name) for run_id in lanes.followers}
        if self._metric in _SPARSE:
            known = {run_id: ~np.isnan(own) for run_id, own in values.items()}
            places = {run_id: pos[known[run_id]] for run_id, pos in places.items()}
            values = {run_id: own[known[run_id]] for run_id, own in values.items()}
        noise = [values[run_id] for run_id in lanes.noise_of(self._run_id)]
        envelope = max((float(np.nanmax(v, initial=0.0)) for v in noise), default=0.0)
        bound = lanes.bounds.get(self._run_id, 0.0)
        limits = [envelope, bound if self._metric == "nmse" else 0.0]
        everything = np.concatenate([*values.values(), limits])
        self.axis = LogAxis.over(everything, len(self._signs))
        for run_id, curve in self._curves.items():
            alone = "o" if len(places[run_id]) == 1 else None  # a single point needs a mark
            x, y = places[run_id].astype(float), self.axis.y(values[run_id])
            curve.setData(x, y, symbol=alone, symbolPen=None)
        self.box.setYRange(*self.axis.y_range, padding=0)
        self._everything = everything
        self._label_axis()
        bottom, top = self.axis.exact, self.axis.y(np.array(limits))
        self._band.setRegion((bottom, top[0]))
        self._band.setVisible(envelope > 0)
        self._bound.setValue(top[1])
        self._bound.setVisible(self._metric == "nmse")
        self._draw_signs(lanes)
        self._tell(lanes)

    def _recolour(self) -> None:
        theme, lanes = self._theme, self._lanes
        if lanes is not None:
            for run_id, curve in self._curves.items():
                chosen = run_id == self._run_id
                pen = lane_pen(theme, lanes, run_id, 2.0 if chosen else 1.0)
                if chosen:  # wide dashes would take most of the painting time
                    pen.setStyle(Qt.PenStyle.SolidLine)
                curve.setPen(pen)
                curve.setSymbolBrush(pen.color())
                curve.setZValue(2 if chosen else 1)
            for run_id, signs in self._signs.items():
                colour = lane_pen(theme, lanes, run_id).color()
                signs.setPen(plot_pen(colour))
                signs.setBrush(colour)
        self._band.setBrush(theme.color("plot.band"))

    def _draw_signs(self, lanes: ComparedLanes) -> None:
        """Rollback marks of every lane, at the last position of each round."""
        for row, (run_id, signs) in enumerate(self._signs.items()):
            last = lanes.rounds(run_id, "pos0") + lanes.rounds(run_id, "num_emitted")
            paths = lanes.paths(run_id)
            found = [
                (x, sign)
                for x, p in zip(last.tolist(), paths, strict=True)
                if (sign := _SIGN_OF_PATH.get(p))
            ]
            places, symbols = [x for x, _ in found], [sign for _, sign in found]
            signs.setData(places, [self.axis.marks_of(row)] * len(places), symbol=symbols)
        verdict = lanes.verdicts.get(self._run_id)
        first = None if verdict is None else verdict.first_pos
        self._first_line.setVisible(first is not None)
        if first is not None:
            self._first_line.setValue(first)

    def _tell(self, lanes: ComparedLanes) -> None:
        worst = ", ".join(
            f"{lanes.names[run_id]}: {error_text(verdict.worst_nmse)}"
            for run_id, verdict in lanes.verdicts.items()
            if run_id in lanes.followers
        )
        self.setAccessibleDescription(
            f"{len(lanes.positions())} positions, worst NMSE of each lane: {worst}, "
            f"bound: {error_text(lanes.bounds.get(self._run_id, 0.0))}"
        )

    def _tip(self, x: float, _y: float) -> str:
        lanes, pos = self._lanes, round(x)
        token = None if lanes is None else lanes.token_at(pos)
        if lanes is None or token is None:
            return ""
        lines = [f"position {pos} · {lanes.text(token)}"]
        for run_id in lanes.followers:
            value = lanes.measure(run_id, self._metric, pos)
            if value is not None:
                lines.append(f"{lanes.names[run_id]}: {error_text(value)}")
        return "\n".join(lines)
