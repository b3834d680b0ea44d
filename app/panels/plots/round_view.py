"""The base of plots over rounds: empty state, legend, cursor, links, and reading the trace
together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from PySide6.QtCore import QObject, QSize, Signal
from PySide6.QtGui import QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QStackedWidget, QWidget

from app.engine_thread.feed import Pacer
from app.looks import Theme
from app.trace_models.run_facts import LiveNumbers, has_no_client, is_ours, untold_by
from app.trace_models.run_rows import Position, RunRange, RunRows
from app.widgets.build import UNLIMITED, hbox, turn
from app.widgets.empty_state import EmptyState
from app.widgets.legend import Swatch, SwatchLegend
from app.widgets.round_plot import RoundPlot
from engine.report.run import why_it_ended
from engine.trace.run_ref import RunRef

PERIOD_MS = 500
"""Interval of plot updates: often enough for the eye, and it leaves time for the engine."""


class RoundGroup:
    """Reads the trace for all linked views before any of them is drawn: it grows meanwhile, and
    each view that knew more rounds than the previous one would move the shared axis."""

    def __init__(self, first: RoundView, parent: QObject) -> None:
        self._views = [first]
        self._pacer = Pacer(self._refresh, PERIOD_MS, parent)
        self.ask, self.now, self.stop = self._pacer.ask, self._pacer.now, self._pacer.stop

    def add(self, view: RoundView) -> None:
        """Add a view over the same axis."""
        self._views.append(view)

    def _refresh(self) -> None:
        for view in [view for view in self._views if view.take_in()]:
            view.show_new()


_EMPTY, _PLOT = range(2)
_LEGEND_BESIDE = 400
_LEGEND_SHARE = 0.45
"""Most of the width for a legend next to the plot."""
_LEAST_WIDTH = 160
_MARGIN = 4


class RoundView(QStackedWidget):
    """A RoundPlot with its legend, fed from one table of the trace. Once it has data, it neither
    reads nor draws while it is hidden."""

    position_selected = Signal(object)  # Position
    range_selected = Signal(object)  # RunRange or None
    name: ClassVar[str]
    y_label: ClassVar[str]
    about: ClassVar[str]
    """Its description, shown while there is no run."""
    widest_label: ClassVar[str] = "n_rs_seq = 64"
    """The label that the legend has room for."""
    untold: ClassVar[str] = ""
    """What a run lacks if there is nothing to draw, in words that follow "does not report"."""

    def __init__(self, theme: Theme, swatches: Sequence[Swatch]) -> None:
        super().__init__()
        self._theme = theme
        self.run: RunRef | None = None
        self._rows: RunRows
        """The rounds that `_read` has read; exists while a run is shown."""
        self._cursor: Position | None = None
        self._stale = self._is_behind = self._has_ended = False
        self.has_rounds = False
        self._legend_least = 0
        self._group = RoundGroup(self, self)
        self.plot = RoundPlot(theme, self.y_label)
        self.plot.setAccessibleName(self.name)
        self.plot.tip = self.readout
        self.plot.clicked.connect(self._on_clicked)
        self.plot.round_stepped.connect(self._on_stepped)
        self.plot.range_chosen.connect(self._on_range)
        self.plot.range_left.connect(lambda: self.range_selected.emit(None))
        self.plot.unit_changed.connect(self._redraw)
        self.plot.box.sigXRangeChanged.connect(self._redraw)
        self.plot.box.sigResized.connect(self._on_resized)
        self.legend = SwatchLegend(f"{self.name}: colours", swatches, theme)
        self.page = QWidget()
        """The plot and its neighbours, as in exported pictures."""
        margins = 6, _MARGIN, 8, _MARGIN
        self._row = hbox((self.plot, 1), self.legend, of=self.page, margins=margins, spacing=8)
        self.empty = EmptyState("No run yet", self.about, waits_for_run=True)
        self.addWidget(self.empty)
        self.addWidget(self.page)
        self.setAccessibleName(self.name)

    def show_run(self, run: RunRef | None) -> None:
        self.run = run
        self._group.stop()
        self._reset()
        if run is not None:
            self._rows = RunRows(run, "rounds")
        self.set_cursor(None)
        self.plot.begin_run()
        self._stale = self.has_rounds = self._has_ended = False
        if self.take_in():
            self.show_new()
        elif run is None or run.ended:  # else rounds follow: switching pages costs layouts
            self.setCurrentIndex(_EMPTY)
            if run is None:
                self.empty.say()

    def refresh(self) -> None:
        """Draw new rows of the trace, now or soon, together with the linked views."""
        self._group.ask()

    def take_in(self) -> bool:
        """Read new rows of the trace, unless postponed; returns whether there is anything to
        draw."""
        if self.run is None:
            return False
        self._is_behind = self.has_rounds and not self.in_sight
        if self._is_behind:
            return False
        self.plot.run_axis.read(self.run)
        n_rounds = self._read(self.run)
        if self.run.ended and not self._has_ended:
            self._has_ended = self._stale = True  # fills the width from now on
        if n_rounds is not None:
            self._stale = True
            self.plot.n_rounds = n_rounds
        elif not self.has_rounds:
            self._say_what_is_untold(self.run)
        return n_rounds is not None or (self._stale and self.has_rounds)

    def show_new(self) -> None:
        """Draw the rows read, if visible."""
        self.has_rounds = True
        self.setCurrentIndex(_PLOT)
        if self.hasFocus():  # the focus was on an empty view's button
            self.plot.setFocus()
        self.plot.setAccessibleDescription(self._words())
        if not self.in_sight:
            return
        self.plot.show_rounds(self.plot.n_rounds)
        if self._stale:  # the same range is in sight, so no signal has drawn it
            self._redraw()

    def readout(self, x: float, y: float) -> str:
        """The text about the round at (x, y) of the plot, empty without one."""
        return "" if self.run is None else self._tip(x, y)

    def set_cursor(self, position: Position | None) -> None:
        """Move the cursor line to the shared position."""
        if position is not None and position.run != self.run:
            position = None
        self._cursor = position
        self.plot.set_cursor(None if position is None else position.round)

    def set_range(self, chosen: RunRange | None) -> None:
        """Shade the shared range of rounds."""
        mine = chosen is not None and chosen.run == self.run and chosen.last is not None
        self.plot.set_range((chosen.first, chosen.last) if mine else None)  # type: ignore[union-attr,arg-type]

    def link_x(self, other: RoundView) -> None:
        """Show the same rounds as another view, from now on."""
        self.plot.link_x(other.plot)
        self._group = other._group
        self._group.add(self)

    def set_stacked(self, stacked: bool) -> None:
        """Switch to the layout of stacked plots, or back."""

    def take_place(self, legend_width: int, *, has_axis: bool) -> None:
        """Set the least width of the legend, and whether the x-axis has labels."""
        if legend_width != self._legend_least:
            self._legend_least = legend_width
            self._fit_legend()
        self.plot.show_axis(has_axis)

    @property
    def legend_width(self) -> int:
        """The legend's width next to a plot of this height; 0 if it is below."""
        if self._row.direction() is not QBoxLayout.Direction.LeftToRight:
            return 0
        return self.legend.width_in(self.height() - 2 * _MARGIN, self.widest_label)

    @property
    def is_plot_alone(self) -> bool:
        """Whether only the legend is next to the plot."""
        return True

    @property
    def in_sight(self) -> bool:
        """Whether any of it is visible, and not in a hidden tab."""
        return not self.visibleRegion().isEmpty()

    @abstractmethod
    def table(self) -> tuple[list[str], list[list[object]]]:
        """The rounds in sight as numbers: column names as in the trace, and rows; None: not
        observed."""

    @abstractmethod
    def _reset(self) -> None:
        """Drop all data, and clear the plot."""

    @abstractmethod
    def _read(self, run: RunRef) -> int | None:
        """Read new rows; returns the number of known rounds, None if nothing is new."""

    @abstractmethod
    def _draw(self) -> None:
        """Draw the rounds in sight."""

    def _tip(self, x: float, _y: float) -> str:
        """The run's values at (x, y) of the plot as text, empty without any."""
        round_ = self.plot.run_axis.round_at(x)
        lines = self._lines_of(round_)
        return "\n".join([self.plot.run_axis.text(round_), *lines]) if lines else ""

    def _lines_of(self, _round: int) -> list[str]:
        """The run's values in a round, for views whose tooltips do not depend on y."""
        return []

    @abstractmethod
    def _summary(self) -> str:
        """The plot in words."""

    def _seq_at(self, x: float, _y: float) -> int | None:
        """The sequence of a click at (x, y): the first one of the round there."""
        rows = self.plot.run_axis.rows
        return None if rows is None else rows.seq_in(self.plot.run_axis.round_at(x))

    def _first_seq(self) -> int | None:
        """The sequence that the keyboard starts with."""
        rows = self.plot.run_axis.rows
        return None if rows is None else rows.seq_in(None)

    def _say_what_is_untold(self, run: RunRef) -> None:
        """Say what is missing: a run may have rounds without data for this view, or only sums."""
        axis = self.plot.run_axis.rows
        has_rounds = axis is not None and len(axis)
        if has_rounds or run.ended:
            self.setCurrentIndex(_EMPTY)
        ours_to_tell = run.facts.error or has_no_client(run.facts)
        if ours_to_tell and run.ended and not has_rounds:
            self.empty.say("No rounds", why_it_ended(run))
        elif not (has_rounds or run.ended):
            self.empty.say_what()
        elif is_ours(run.facts):
            self.empty.say()
        else:
            said = untold_by(run.facts, self.untold if has_rounds else "its rounds")
            if not has_rounds:
                numbers = LiveNumbers.told(run.facts.summary)
                is_known = numbers.tokens or numbers.acceptance is not None
                said = f"{'Only' if is_known else 'No'} totals are known for this run. {said}"
            self.empty.say("Not observed", said)

    def _words(self) -> str:
        return self._summary()

    def _redraw(self) -> None:
        if self.run is None or not (self.has_rounds or self.plot.overlay):
            return
        self._stale = not self.in_sight
        if not self._stale:
            self._draw()
            self.plot.place_items()  # drawing while painting would request another painting

    def _on_resized(self) -> None:
        """Drawn when painted: resizing or laying out the window resizes its plots several times
        before."""
        if self.has_rounds or self.plot.overlay:
            self._stale = True
            self.update()

    def _on_clicked(self, x: float, y: float) -> None:
        self._select(self.plot.run_axis.round_at(x), self._seq_at(x, y))

    def _on_range(self, first: int, last: int) -> None:
        if self.run is not None:
            self.range_selected.emit(RunRange(self.run, first, last))

    def _on_stepped(self, step: int) -> None:
        if self._cursor is None:
            self._select(self.plot.rounds_in_sight[1] - 1, self._first_seq())
        else:
            self._select(self._cursor.round + step, self._cursor.seq_id)

    def _select(self, round_: int, seq_id: int | None) -> None:
        if self.run is None or seq_id is None or not 0 <= round_ < self.plot.n_rounds:
            return
        position = Position(self.run, seq_id, round_, None)
        self.set_cursor(position)
        self.position_selected.emit(position)

    def minimumSizeHint(self) -> QSize:
        """Narrower than with the legend at the side: it moves below then."""
        return QSize(_LEAST_WIDTH, super().minimumSizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        self.catch_up()  # it has become visible

    def catch_up(self) -> None:
        """Draw what is outstanding since the last change of the trace or of the size."""
        if (self._is_behind or self._stale) and self.has_rounds:
            self._group.now()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        beside = event.size().width() >= _LEGEND_BESIDE
        turn(self._row, down=not beside)
        self._fit_legend()
        self._row.activate()  # otherwise painted twice, at two widths

    def _show_behind(self, swatches: Sequence[Swatch]) -> None:
        """Append legend entries that only some runs need."""
        if [swatch.label for swatch in swatches] != self.legend.trailing_labels:
            self.legend.set_trailing(swatches)
            self._fit_legend()

    def _fit_legend(self) -> None:
        wanted = self.legend_width
        self.legend.set_beside(bool(wanted))
        self.legend.set_column(0 < wanted == self.legend.column_width(self.widest_label))
        if wanted:
            most = round(_LEGEND_SHARE * self.width())
            self.legend.setFixedWidth(min(max(wanted, self._legend_least), most))
        else:
            self.legend.setMinimumWidth(0)
            self.legend.setMaximumWidth(UNLIMITED)
        below = 0 if wanted else self.legend.heightForWidth(self.width() - 2 * _MARGIN)
        shown = 2 * (below + _MARGIN) <= self.height()
        if shown is self.legend.isHidden():
            self.legend.setVisible(shown)
            self.updateGeometry()  # Qt does not notify of a page that is under another
        self._row.activate()  # otherwise painted at its old width first
