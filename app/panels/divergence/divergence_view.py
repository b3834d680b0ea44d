"""The Divergence panel: the lanes of a comparison side by side: how far each differs from the
reference lane, from which position on, and why."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QCoreApplication, QEvent, Signal
from PySide6.QtGui import QResizeEvent, QShowEvent
from PySide6.QtWidgets import QSizePolicy, QStackedWidget, QWidget

from app.actions import Actions
from app.engine_thread.feed import timer
from app.looks import Theme
from app.panels.divergence.comparison_header import ComparisonHeader, PositionBar
from app.panels.divergence.lane_plots import LanePlots
from app.panels.divergence.lane_tables import LaneTables
from app.trace_models.compared_lanes import ComparedLanes, lanes_of, run_to_show
from app.trace_models.run_notes import run_name
from app.trace_models.run_rows import Position, RunRange
from app.widgets.build import split, vbox
from app.widgets.empty_state import EmptyState
from app.widgets.fields import WheelGuard
from app.widgets.fitted_labels import ScrollPage
from engine.compare.lane_spec import LaneSpec
from engine.trace.run_ref import RunRef

_EMPTY, _LANES = range(2)
_NONE = "No comparison yet"
_ABOUT = (
    "Runs the prompt once without drafting and once in every lane, and shows where their logits "
    "and states diverge."
)
_LOW_HEAD_LINES, _LOW_LINES = 46, 36
"""Heights in lines below which the header, and then plots and tables, use less room, so that the
lanes' logits are visible with little scrolling."""
FindPosition = Callable[[int, list[int]], int | None]
"""(cursor position or -1, positions beyond the bound) -> the position to go to."""


class DivergenceView(QWidget):
    """The lanes above plots and tables. actions: compare, first, previous, next.

    Everything shown comes from the trace; only the lanes of the next comparison are kept here. The
    comparison is that of the window's run. `plots`, `tables` and `bar` are made once the view is
    visible, at the latest with the first comparison.
    """

    plots: LanePlots
    tables: LaneTables
    bar: PositionBar

    position_selected = Signal(object)  # Position
    range_selected = Signal(object)  # RunRange or None
    lane_selected = Signal(object)  # RunRef
    divergences_changed = Signal(bool)

    def __init__(self, theme: Theme, actions: Actions) -> None:
        super().__init__()
        self._lanes: ComparedLanes | None = None
        self._run_id = -1
        self._pos: int | None = None
        self.has_divergences = False
        """Whether any lane is beyond the bound anywhere."""
        self._is_stale = False
        self._theme, self._actions = theme, actions
        self._parts: tuple[LanePlots, LaneTables] | tuple[()] = ()
        # not together with the first comparison, which blocks the window long enough
        self._making = timer(self, self._make_lanes, once=True)
        self.header = ComparisonHeader(theme)
        self._stack = QStackedWidget()
        self._empty = EmptyState(_NONE, _ABOUT, [actions["run.compare"]])
        self._stack.addWidget(self._empty)
        self._lay_out()
        self.header.lane_chosen.connect(self._on_lane_chosen)
        self.setAccessibleName("Divergence")

    # -- what the window reads -------------------------------------------------------------

    def chosen_lanes(self) -> tuple[LaneSpec, ...] | None:
        """The lanes of the next comparison; None if one is invalid, and then the text is shown."""
        return self.header.chosen_lanes()

    @property
    def outcome(self) -> str:
        """The sentence about the chosen lane, with its name; empty without one."""
        lanes = self._lanes
        if lanes is None or self._run_id not in lanes.verdicts:
            return ""
        return f"Lane {lanes.sentence(self._run_id)}"

    def show_triage(self, verdict: str, reason: str) -> None:
        """In place of lanes, show the verdict on two overlaid runs' texts; empty: none yet."""
        self._empty.say(f"Two runs: {verdict}" if verdict else "", reason)

    # -- the trace -------------------------------------------------------------------------

    def show_run(self, run: RunRef | None) -> None:
        """Show the comparison that a run belongs to, else none."""
        lanes = () if run is None else lanes_of(run)
        self._empty.change(_NONE if run is None else f"No comparison with {run_name(run)}", _ABOUT)
        same = lanes == (() if self._lanes is None else self._lanes.runs)
        if not same:
            run_ids = tuple(lane.run_id for lane in lanes)
            self._lanes = ComparedLanes(lanes[0].store, run_ids) if lanes else None
            self._run_id, self._pos = -1, None
            self.header.set_lanes(self._lanes)
            if self._lanes is not None:
                self._make_lanes()
            self._show_page(_EMPTY if self._lanes is None else _LANES)
        if self._lanes is not None and run is not None:
            wanted = run.run_id if run.run_id in self._lanes.followers else self._run_id
            if wanted not in self._lanes.followers:
                wanted = run_to_show(lanes[0]).run_id
            self._choose_where_compared(wanted)
        elif not same:
            self._choose(-1)

    def refresh(self) -> None:
        """Draw new rows of the trace."""
        if not self.isVisible():
            self._is_stale = True
        elif self._lanes is not None:
            if self._lanes.poll():
                self.plots.draw()
                self.tables.draw()
            self.plots.fit()
            self._tell()

    def set_cursor(self, position: Position | None) -> None:
        """Show the position that all views share."""
        lanes = self._lanes
        if position is None or lanes is None or position.run not in lanes.runs:
            self._pos = None
        else:
            if position.seq_id != lanes.seq_id and position.seq_id in lanes.seq_ids:
                self._show_seq(position.seq_id)
            known = position.pos is not None
            self._pos = (
                position.pos
                if known
                else lanes.first_pos_of_round(position.run.run_id, position.round)
            )
        self._place_cursor()

    def set_range(self, chosen: RunRange | None) -> None:
        """Shade the positions of the range of rounds that all views share."""
        lanes = self._lanes
        if not self._parts:
            return
        mine = lanes is not None and chosen is not None and chosen.run in lanes.runs
        found = None
        if mine and lanes is not None and chosen is not None and chosen.last is not None:
            run_id = chosen.run.run_id
            run_id = run_id if run_id in lanes.followers else lanes.longest or run_id
            rounds, pos = lanes.values(run_id, "round"), lanes.values(run_id, "pos")
            inside = pos[(rounds >= chosen.first) & (rounds <= chosen.last)]
            found = (int(inside[0]), int(inside[-1])) if len(inside) else None
        self.plots.set_range(found)

    # -- positions -------------------------------------------------------------------------

    def select(self, pos: int) -> None:
        """Move the shared cursor to a position of the chosen lane, if it exists."""
        lanes = self._lanes
        round_ = None if lanes is None else lanes.round_at(self._run_id, pos)
        if lanes is not None and round_ is not None:
            self._pos = pos
            self._place_cursor()
            run = RunRef(lanes.store, self._run_id)
            self.position_selected.emit(Position(run, lanes.seq_id, round_, pos))

    def go_first(self) -> None:
        """Select the first divergence of the chosen lane, else of the lane that has the first."""
        self._go(lambda _pos, beyond: beyond[0])

    def go_next(self) -> None:
        """Select the next position beyond the bound."""
        self._go(lambda pos, beyond: next((p for p in beyond if p > pos), None))

    def go_previous(self) -> None:
        """Select the position beyond the bound before this one."""
        self._go(lambda pos, beyond: next((p for p in reversed(beyond) if p < pos), None))

    # -- internals -------------------------------------------------------------------------

    def _make_lanes(self) -> None:
        if self._parts:
            return
        self._parts = self.plots, self.tables = LanePlots(self._theme), LaneTables(self._theme)
        self.bar = PositionBar(self._actions)
        self.plots.head.addWidget(self.bar)
        both = self._both = split(*self._parts, down=True, sizes=(580, 420))
        WheelGuard(both)  # the window guarded this view before these fields existed
        self._stack.addWidget(both)
        self._show_page(self._stack.currentIndex())
        self._set_low()
        self.bar.seq_chosen.connect(self._show_seq)
        self.plots.pos_clicked.connect(self.select)
        self.plots.pos_stepped.connect(self._step)
        self.tables.pos_chosen.connect(self.select)
        self.plots.range_chosen.connect(self._choose_range)
        self.plots.range_left.connect(lambda: self.range_selected.emit(None))

    def _lay_out(self) -> None:
        column = vbox(self.header, (self._stack, 1), margins=(0, 0, 0, 0), spacing=2)
        self._page = ScrollPage(column)
        vbox(self._page, of=self, margins=(0, 0, 0, 0))

    def _show_page(self, page: int) -> None:
        """Without lanes the page takes no room: it would scroll while empty."""
        kept = QSizePolicy.Policy.Ignored if page == _EMPTY else QSizePolicy.Policy.Expanding
        if self._parts:
            self._both.setSizePolicy(kept, kept)
        self._stack.setCurrentIndex(page)

    def _choose(self, run_id: int) -> None:
        """Choose a lane in cards, plots and tables."""
        self._run_id = run_id
        self.header.cards.choose(run_id)
        if self._lanes is not None:
            self._lanes.poll()
        for part in self._parts:
            part.set_lane(self._lanes, run_id)
        self._place_cursor()
        self._tell()

    def _show_seq(self, seq_id: int) -> None:
        if (lanes := self._lanes) is not None:
            self._lanes = ComparedLanes(lanes.store, lanes.run_ids, seq_id)
            self._pos = None
            self._choose(self._run_id)

    def _choose_where_compared(self, run_id: int) -> None:
        """Choose a lane, and a sequence that it compares."""
        if (lanes := self._lanes) is not None:
            lanes.poll()
            if (seq_id := lanes.seq_with(run_id)) != lanes.seq_id:
                self._lanes = ComparedLanes(lanes.store, lanes.run_ids, seq_id)
                self._pos = None
        self._choose(run_id)

    def _on_lane_chosen(self, run_id: int) -> None:
        self._choose_where_compared(run_id)
        if self._lanes is not None:
            self.lane_selected.emit(RunRef(self._lanes.store, run_id))

    def _choose_range(self, first: int, last: int) -> None:
        """From the round of one position of the chosen lane to that of another."""
        if (lanes := self._lanes) is not None:
            rounds, pos = lanes.values(self._run_id, "round"), lanes.values(self._run_id, "pos")
            inside = rounds[(pos >= first) & (pos <= last)]
            if len(inside):
                run = RunRef(lanes.store, self._run_id)
                self.range_selected.emit(RunRange(run, int(inside[0]), int(inside[-1])))

    def _step(self, step: int) -> None:
        if self._lanes is not None and (shown := self._shown_pos()) is not None:
            self.select(shown if self._pos is None else shown + step)

    def _shown_pos(self) -> int | None:
        """The cursor's position; without one the chosen lane's first divergence or position."""
        if self._pos is not None or self._lanes is None:
            return self._pos
        beyond = self._lanes.beyond(self._run_id)
        positions = beyond if len(beyond) else self._lanes.positions()
        return int(positions[0]) if len(positions) else None

    def _place_cursor(self) -> None:
        if self._parts:
            self.plots.set_cursor(self._pos)
            self.tables.show_position(self._shown_pos(), self._pos)

    def _go(self, find: FindPosition) -> None:
        lanes = self._lanes
        if lanes is None or not self.has_divergences:
            return
        if not len(lanes.beyond(self._run_id)):
            run_id = min(
                (run for run in lanes.followers if len(lanes.beyond(run))),
                key=lambda run: int(lanes.beyond(run)[0]),
            )
            self._on_lane_chosen(run_id)
        beyond = lanes.beyond(self._run_id).tolist()
        pos = find(self._pos if self._pos is not None else -1, beyond)
        if pos is not None:
            self.select(pos)

    def _tell(self) -> None:
        """Update the header, the choice of sequences, and whether there is a divergence."""
        lanes = self._lanes
        self.header.tell(lanes, self._run_id)
        if self._parts:
            self.bar.show_sequences(lanes)
        found = lanes is not None and any(len(lanes.beyond(run)) for run in lanes.followers)
        if lanes is not None and self._pos is None and self.tables.shown != self._shown_pos():
            self.tables.show_position(self._shown_pos(), None)
        if found != self.has_divergences:
            self.has_divergences = found
            self.divergences_changed.emit(found)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._set_low()
        request, call = QEvent.Type.LayoutRequest.value, QEvent.Type.MetaCall.value
        # otherwise painted at an intermediate height, and again when a scroll bar changes
        for receiver, kind in ((None, request), (self._page, call), (None, request)):
            QCoreApplication.sendPostedEvents(receiver, kind)
        for plot in (self.plots.delta, self.plots.states) if self._parts else ():
            plot.place_items()

    def _set_low(self) -> None:
        lines = self.height() / self.fontMetrics().height()
        self.header.set_low(lines < _LOW_HEAD_LINES)
        for part in self._parts:
            part.set_low(lines < _LOW_LINES)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        if not self._parts:
            self._making.start()
        if self._is_stale:
            self._is_stale = False
            self.refresh()
