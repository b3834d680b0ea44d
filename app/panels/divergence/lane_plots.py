"""The two plots of a comparison, one over the other on one x-axis, with their legends."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QLabel, QSplitter, QVBoxLayout, QWidget

from app.looks.theme import Theme
from app.panels.divergence.delta_plot import METRICS, SWATCHES, DeltaPlot
from app.panels.divergence.log_scale import LogScale
from app.panels.divergence.state_map import PARTS, StateMap
from app.trace_models.compared_lanes import ComparedLanes
from app.widgets.legend import SwatchLegend

_LINES, _LOW_LINES = (8, 6), (5, 5)
"""Least heights of the plots in lines of text, the x-axis included, and those in a low view."""
_SPANS = (16, 128, 512)
"""Positions in sight at first: at least, where their number is not known, at most."""
_NO_STATES = "No states are recorded for this lane: choose one that rolls back."
_NO_PART = "The layers of this model have no such part: choose the other one."


class LanePlots(QSplitter):
    """Error over positions, and state error by layer; both share positions and cursor."""

    pos_clicked = Signal(int)
    pos_stepped = Signal(int)  # -1 or +1

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(Qt.Orientation.Vertical, parent)
        self._lanes: ComparedLanes | None = None
        self._run_id = -1
        self._span = 0
        self.delta = DeltaPlot(theme)
        self.states = StateMap(theme)
        self.states.link_x(self.delta)
        self.measure = QComboBox()
        self.measure.setAccessibleName("Measure that is drawn")
        self.measure.addItems([metric.title for metric in METRICS])
        self.measure.currentIndexChanged.connect(lambda i: self.delta.set_metric(METRICS[i]))
        self.part = QComboBox()
        self.part.setAccessibleName("Part of the state that is compared")
        self.part.addItems(list(PARTS.values()))
        self.part.currentIndexChanged.connect(self._show_part)
        self.legend = SwatchLegend("Error over positions: signs", SWATCHES, theme)
        self.scale = LogScale(theme)
        self.head = QHBoxLayout()
        """The row over the first plot, for what else belongs there."""
        self._lane_name = QLabel()
        self._note = QLabel(_NO_STATES)
        self._lane_name.setTextFormat(Qt.TextFormat.PlainText)
        for label in (self._lane_name, self._note):
            label.setForegroundRole(label.palette().ColorRole.PlaceholderText)
        self._note.setWordWrap(True)
        self._note.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._note.setMinimumWidth(1)
        self.legend.set_column(True)
        side = max(
            *(self.legend.column_width(label) for label in self.legend.labels),
            self.scale.sizeHint().width(),
        )
        for widget in (self.legend, self.scale):
            widget.setFixedWidth(side)  # the same, so that equal positions stand in line
        self.head.addWidget(self.measure)
        self.head.addStretch(1)
        below = QHBoxLayout()
        below.addWidget(self.part)
        below.addWidget(self._lane_name, 1)
        self.addWidget(_section(self.head, self.delta, self.legend))
        self.addWidget(_section(below, self.states, self.scale, self._note))
        self.setChildrenCollapsible(False)
        self.set_low(False)
        self.setSizes([600, 400])
        for plot in (self.delta, self.states):
            plot.clicked.connect(lambda x, _y: self.pos_clicked.emit(round(x)))
            plot.round_stepped.connect(self.pos_stepped)

    def set_low(self, low: bool) -> None:
        """Get by with less height, or not."""
        least = _LOW_LINES if low else _LINES
        for plot, lines in zip((self.delta, self.states), least, strict=True):
            plot.setMinimumHeight(lines * self.fontMetrics().height())

    def set_lane(self, lanes: ComparedLanes | None, run_id: int) -> None:
        """Show these lanes, one of them as the chosen one."""
        if lanes is not self._lanes:
            self._span = 0
            self.delta.set_follow(True)
        self._lanes, self._run_id = lanes, run_id
        self.delta.set_lanes(lanes, run_id)
        self.states.set_lane(lanes, run_id)
        self._lane_name.setText("" if lanes is None else f"of {lanes.names[run_id]}")
        self._show_extent()

    def draw(self) -> None:
        """Draw what the lanes hold now."""
        self.delta.draw()
        self.states.draw()
        self._show_extent()

    def set_cursor(self, pos: int | None) -> None:
        """Put the cursor line on a position."""
        self.delta.set_cursor(pos)
        self.states.set_cursor(pos)

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        for part in (self.delta, self.states, self.legend, self.scale):
            part.retheme(theme)

    def _show_part(self, index: int) -> None:
        self.states.set_part(list(PARTS)[index])
        self._show_extent()

    def _show_extent(self) -> None:
        positions = self._lanes.positions().tolist() if self._lanes is not None else []
        if self._lanes is not None:
            self._set_span(self._lanes, len(positions))
        if positions:
            for plot in (self.delta, self.states):
                plot.show_rounds(positions[-1] + 1, positions[0] - 1)
        empty = self.states.is_empty
        self._note.setText(_NO_PART if self.states.lacks_part else _NO_STATES)
        self.states.setHidden(empty)
        self.scale.setHidden(empty)
        self._note.setVisible(empty)
        self.delta.getPlotItem().showAxis("bottom", empty)  # the plot below has the same

    def _set_span(self, lanes: ComparedLanes, n_known: int) -> None:
        """Room for the positions that are expected, and in the end for those that came."""
        least, unknown, most = _SPANS
        wanted = lanes.n_predict if lanes.n_predict > 0 else unknown
        span = min(max((n_known if lanes.is_over else wanted) + 2, least), most)
        if span != self._span:
            self._span = span
            for plot in (self.delta, self.states):
                plot.set_span(span)


def _section(head: QHBoxLayout, *body: QWidget) -> QWidget:
    head.setContentsMargins(6, 0, 6, 0)
    row = QHBoxLayout()
    row.setContentsMargins(6, 0, 6, 0)
    row.setSpacing(8)
    for widget in body:
        row.addWidget(widget, 0 if isinstance(widget, SwatchLegend | LogScale) else 1)
    column = QVBoxLayout(page := QWidget())
    column.setContentsMargins(0, 2, 0, 2)
    column.setSpacing(2)
    column.addLayout(head)
    column.addLayout(row, 1)
    return page
