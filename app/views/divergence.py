"""Lanes side by side: how far each is from never having drafted, where it began, and why."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QAction, QShowEvent
from PySide6.QtWidgets import (
    QComboBox,
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QSizePolicy,
    QSplitter,
    QStackedWidget,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.actions import Actions
from app.models.compared_lanes import ComparedLanes, lanes_of, latest_lanes, run_to_show
from app.models.error_text import error_text
from app.models.position import Position
from app.theme import Theme
from app.widgets.empty_state import EmptyState
from app.widgets.lane_cards import LaneCards
from app.widgets.lane_editor import LaneEditor
from app.widgets.lane_plots import LanePlots
from app.widgets.lane_tables import LaneTables
from engine.compare.lane_spec import LaneSpec
from engine.compare.verdict import SUSPECT, LaneVerdict
from engine.trace.store import TraceStore

_EMPTY, _LANES = range(2)
_BAR_CHARACTERS = 16
Finder = Callable[[int, list[int]], int | None]
"""(position of the cursor or -1, positions beyond the bound) -> the one to go to."""


def verdict_sentence(verdict: LaneVerdict, bound: float) -> str:
    """What there is to say about a lane in one line."""
    if verdict.verdict == "failed":
        return f"The lane had to stop: {verdict.error}"
    if not verdict.n_positions:
        return "Nothing is compared yet."
    if verdict.verdict == SUSPECT:
        where = f"position {verdict.first_pos}, round {verdict.first_round}"
        after = verdict.after_round
        why = "no rollback before it" if after is None else f"after the rollback of round {after}"
        return f"Diverges first at {where}, {why}."
    if f := verdict.fork:
        return (
            f"Free-running; chose another token first at position {f.pos}, round {f.round}, where "
            f"the reference's two best logits lie {error_text(f.top2_gap)} apart."
        )
    if verdict.verdict == "mode":
        return (
            f"Distance of {verdict.compute} from the reference: worst NMSE "
            f"{error_text(verdict.worst_nmse)} at position {verdict.worst_pos}; no bound applies."
        )
    if verdict.verdict == "exact":
        return f"The logits of all {verdict.n_positions} positions are exact."
    return (
        f"Within the bound {error_text(bound)}: worst NMSE {error_text(verdict.worst_nmse)} "
        f"at position {verdict.worst_pos}."
    )


class DivergenceView(QWidget):
    """Cards of the lanes over plots and tables. actions: compare, first, previous, next.

    Everything on show comes from the trace; only the lanes of the next comparison are kept here.
    The comparison on show is that of the run that the window shows, or the latest one.
    """

    position_selected = Signal(object)  # Position
    lane_selected = Signal(int)  # run_id
    divergences_changed = Signal(bool)

    def __init__(self, theme: Theme, actions: Actions, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._store: TraceStore | None = None
        self._lanes: ComparedLanes | None = None
        self._run_id = -1
        self._pos: int | None = None
        self._has_divergences = False
        self._is_stale = False
        self.cards = LaneCards(theme)
        self.editor = LaneEditor(theme)
        self.plots = LanePlots(theme)
        self.tables = LaneTables(theme)
        self.sentence = QLabel()
        self.sentence.setTextFormat(Qt.TextFormat.PlainText)
        self.sentence.setWordWrap(True)
        self.sentence.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.sentence.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName("Progress of the comparison")
        self.progress.setFixedWidth(_BAR_CHARACTERS * self.fontMetrics().averageCharWidth())
        self.progress.setMaximumHeight(self.fontMetrics().height())
        self.seq = QComboBox()
        self.seq.setAccessibleName("Sequence that is compared")
        self.seq.activated.connect(lambda i: self._show_seq(int(self.seq.itemData(i))))
        self.edit_button = QToolButton()
        self.edit_button.setText("&Lanes")
        self.edit_button.setToolTip("Choose the lanes of the next comparison")
        self.edit_button.setCheckable(True)
        self.edit_button.toggled.connect(self.editor.setVisible)
        self._stack = QStackedWidget()
        self._stack.addWidget(
            EmptyState(
                "No comparison yet",
                "Runs the prompt once without drafting and once in every lane, and shows where "
                "their logits and states come apart.",
                [actions["run.compare"]],
            )
        )
        self._stack.addWidget(self._make_page())
        self._lay_out(actions)
        self.edit_button.setChecked(True)
        self.cards.lane_chosen.connect(self._on_lane_chosen)
        self.plots.pos_clicked.connect(self.select)
        self.plots.pos_stepped.connect(self._step)
        self.tables.pos_chosen.connect(self.select)
        self.setAccessibleName("Divergence")

    # -- what the window reads -------------------------------------------------------------

    def chosen_lanes(self) -> tuple[LaneSpec, ...] | None:
        """The lanes of the next comparison; None, and the text in sight, if one is wrong."""
        lanes = self.editor.lanes()
        self.edit_button.setChecked(lanes is None)
        if lanes is None:
            self.editor.text.setFocus()
        return lanes

    @property
    def has_divergences(self) -> bool:
        """Whether any lane is beyond the bound anywhere."""
        return self._has_divergences

    # -- the trace -------------------------------------------------------------------------

    def set_trace(self, store: TraceStore | None, run_id: int | None) -> None:
        """Show the comparison that a run belongs to, else the latest, else none."""
        run_ids: tuple[int, ...] = ()
        if store is not None:
            run_ids = lanes_of(store, run_id) if run_id is not None else ()
            run_ids = run_ids or latest_lanes(store)
        same = self._lanes is not None and store is self._store and run_ids == self._lanes.run_ids
        self._store = store
        if not same:
            self._lanes = ComparedLanes(store, run_ids) if store is not None and run_ids else None
            self._run_id, self._pos = -1, None
            self.cards.set_lanes(self._lanes)
            self._stack.setCurrentIndex(_EMPTY if self._lanes is None else _LANES)
            if self._lanes is None:
                self.edit_button.setChecked(True)
        if self._lanes is not None and store is not None:
            wanted = run_id if run_id in self._lanes.followers else self._run_id
            if wanted not in self._lanes.followers:
                wanted = run_to_show(store, self._lanes.reference)
            assert wanted is not None
            self._choose(wanted)
        elif not same:
            self._choose(-1)

    def refresh(self) -> None:
        """Draw what has joined the trace since the last call."""
        if not self.isVisible():
            self._is_stale = True
        elif self._lanes is not None:
            if self._lanes.poll():
                self.plots.draw()
                self.tables.draw()
            self._tell()

    def set_cursor(self, position: Position | None) -> None:
        """Show the position that all views share."""
        lanes = self._lanes
        if position is None or lanes is None or position.run_id not in lanes.run_ids:
            self._pos = None
        else:
            if position.seq_id != lanes.seq_id and position.seq_id in lanes.seq_ids:
                self._show_seq(position.seq_id)
            known = position.pos is not None
            self._pos = (
                position.pos if known else lanes.first_pos_of_round(position.run_id, position.round)
            )
        self._place_cursor()

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        for part in (self.cards, self.editor, self.plots, self.tables):
            part.retheme(theme)

    # -- positions -------------------------------------------------------------------------

    def select(self, pos: int) -> None:
        """Move the shared cursor to a position of the chosen lane, if it has it."""
        lanes = self._lanes
        round_ = None if lanes is None else lanes.round_at(self._run_id, pos)
        if lanes is not None and round_ is not None:
            self._pos = pos
            self._place_cursor()
            self.position_selected.emit(Position(self._run_id, lanes.seq_id, round_, pos))

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

    def _make_page(self) -> QWidget:
        both = QSplitter(Qt.Orientation.Vertical)
        both.addWidget(self.plots)
        both.addWidget(self.tables)
        both.setChildrenCollapsible(False)
        both.setSizes([580, 420])
        return both

    def _lay_out(self, actions: Actions) -> None:
        cards = QHBoxLayout()
        cards.setContentsMargins(6, 4, 6, 0)
        cards.addWidget(self.cards, 1)
        line = QHBoxLayout()
        line.setContentsMargins(8, 0, 6, 0)
        line.setSpacing(4)
        line.addWidget(self.sentence, 1)
        line.addWidget(self.progress)
        line.addWidget(self.edit_button)
        head = self.plots.head
        head.addWidget(self.seq)
        for name in ("go.first_divergence", "go.previous_divergence", "go.next_divergence"):
            head.addWidget(_button(actions[name]))
        editor = QVBoxLayout()
        editor.setContentsMargins(6, 0, 6, 0)
        editor.addWidget(self.editor)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(4)
        column.addLayout(cards)
        column.addLayout(line)
        column.addLayout(editor)
        column.addWidget(self._stack, 1)

    def _choose(self, run_id: int) -> None:
        """Make a lane the chosen one in all parts."""
        self._run_id = run_id
        self.cards.choose(run_id)
        if self._lanes is not None:
            self._lanes.poll()
        self.plots.set_lane(self._lanes, run_id)
        self.tables.set_lane(self._lanes, run_id)
        self._place_cursor()
        self._tell()

    def _show_seq(self, seq_id: int) -> None:
        lanes = self._lanes
        if lanes is not None:
            self._lanes = ComparedLanes(lanes.store, lanes.run_ids, seq_id)
            self._pos = None
            self._choose(self._run_id)

    def _on_lane_chosen(self, run_id: int) -> None:
        self._choose(run_id)
        self.lane_selected.emit(run_id)

    def _step(self, step: int) -> None:
        if self._lanes is not None:
            shown = self._shown_pos()
            if shown is not None:
                self.select(shown if self._pos is None else shown + step)

    def _shown_pos(self) -> int | None:
        """The cursor's position; without one the chosen lane's first divergence or position."""
        if self._pos is not None or self._lanes is None:
            return self._pos
        beyond = self._lanes.beyond(self._run_id)
        positions = beyond if len(beyond) else self._lanes.positions()
        return int(positions[0]) if len(positions) else None

    def _place_cursor(self) -> None:
        self.plots.set_cursor(self._pos)
        self.tables.show_position(self._shown_pos(), self._pos)

    def _go(self, find: Finder) -> None:
        lanes = self._lanes
        if lanes is None or not self._has_divergences:
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
        """Chips, sentence, progress, and whether there is anything to go to."""
        lanes = self._lanes
        found = False
        self.sentence.setVisible(lanes is not None)
        self.progress.setVisible(lanes is not None and not lanes.is_over)
        self.seq.setVisible(lanes is not None and len(lanes.seq_ids) > 1)
        if lanes is not None:
            self.cards.set_verdicts(lanes.verdicts)
            found = any(len(lanes.beyond(run)) for run in lanes.followers)
            text = verdict_sentence(lanes.verdicts[self._run_id], lanes.bounds[self._run_id])
            self.sentence.setText(text)
            self.sentence.setToolTip(text)
            self._show_progress(lanes)
            self._list_sequences(lanes)
            if self._pos is None and self.tables.shown != self._shown_pos():
                self.tables.show_position(self._shown_pos(), None)
        if found != self._has_divergences:
            self._has_divergences = found
            self.divergences_changed.emit(found)

    def _show_progress(self, lanes: ComparedLanes) -> None:
        done, total = len(lanes.positions()), lanes.n_predict
        self.progress.setRange(0, max(total, 0))
        self.progress.setValue(min(done, max(total, 0)))
        of = f" of {total:,}" if total > 0 else ""
        self.progress.setToolTip(f"{done:,}{of} tokens in {len(lanes.run_ids)} lanes")

    def _list_sequences(self, lanes: ComparedLanes) -> None:
        if self.seq.count() != len(lanes.seq_ids):
            self.seq.clear()
            for seq_id in lanes.seq_ids:
                self.seq.addItem(f"sequence {seq_id}", seq_id)
        self.seq.setCurrentIndex(self.seq.findData(lanes.seq_id))

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        if self._is_stale:
            self._is_stale = False
            self.refresh()


def _button(action: QAction) -> QToolButton:
    button = QToolButton()
    button.setDefaultAction(action)
    button.setAutoRaise(True)
    button.setIconSize(QSize(16, 16))
    button.setAccessibleName(action.text().replace("&", ""))
    return button
