"""The Runs panel: every run of the session, the one on show in detail, and another beside it."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QModelIndex, QPoint, Qt, Signal
from PySide6.QtGui import QKeySequence, QShortcut, QShowEvent
from PySide6.QtWidgets import QLabel, QMenu, QPushButton, QStackedWidget, QVBoxLayout, QWidget

from app.actions.actions import Actions
from app.looks.theme import Theme
from app.models.position import Position
from app.models.run_axis import RunOverlay
from app.models.run_facts import ModelRuns, effective
from app.models.run_table import RunTable
from app.widgets.empty_state import EmptyState
from app.widgets.plain_table import plain_table
from app.widgets.run_pair import RunPair
from engine.trace.run_ref import RunRef

_CHARACTERS = {
    "run": 6,
    "model": 20,
    "title": 28,
    "tokens": 8,
    "acceptance": 13,
    "speed": 8,
    "stop": 12,
}


class RunsView(QStackedWidget):
    """Enter or a click shows a run in all views; Delete takes it off the list. A second run can be
    laid over it, here and in the plots."""

    position_selected = Signal(object)  # never: a run is no position
    run_selected = Signal(object)  # RunRef
    overlay_asked = Signal(object)  # RunRef, or None
    drop_asked = Signal(object)  # ModelRuns

    def __init__(self, theme: Theme, actions: Actions, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.model = RunTable(theme, self)
        self.table = plain_table(self.model, "Runs")
        self.table.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.table.customContextMenuRequested.connect(self._ask)
        self.table.clicked.connect(self._show)
        self.table.activated.connect(self._show)
        delete = QShortcut(QKeySequence(Qt.Key.Key_Delete), self.table)
        delete.setContext(Qt.ShortcutContext.WidgetShortcut)
        delete.activated.connect(self._hide)
        self._lay_over, self._lay_off = actions["plot.overlay"], actions["plot.no_overlay"]
        self._lay_over.triggered.connect(self._overlay_one)
        self._lay_off.triggered.connect(lambda: self.overlay_asked.emit(None))
        self.pair = RunPair()
        self.detail = QLabel()
        self.detail.setAccessibleName("Parameters in effect")
        self.detail.setWordWrap(True)
        self.detail.setTextFormat(Qt.TextFormat.PlainText)
        self.detail.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.detail.setContentsMargins(8, 4, 8, 4)
        self.show_all = QPushButton()
        self.show_all.setFlat(True)
        self.show_all.clicked.connect(self._show_all)
        column = QVBoxLayout(page := QWidget())
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.table, 1)
        column.addWidget(self.show_all, 0, Qt.AlignmentFlag.AlignLeft)
        column.addWidget(self.pair, 2)
        column.addWidget(self.detail)
        self.addWidget(
            EmptyState(
                "No run yet", "Runs are kept and listed here. Press Run (F5).", waits_for_run=True
            )
        )
        self.addWidget(page)
        self.setAccessibleName("Runs")
        self._fit_columns()
        self._show_what_is_offered()

    def set_recorded(self, recorded: Sequence[ModelRuns]) -> None:
        """List the runs of these models."""
        self.model.set_recorded(recorded)
        self._show_what_is_offered()

    def show_run(self, run: RunRef | None) -> None:
        """Mark the run on show; the runs of a trace opened from disk are listed by themselves."""
        self.model.show_run(run)
        row = self.model.row_of(run)
        self.table.setCurrentIndex(QModelIndex() if row is None else self.model.index(row, 0))
        self.detail.setText("" if run is None else effective(run.facts))
        self.detail.setVisible(bool(self.detail.text()))
        self._show_what_is_offered()

    def set_overlay(self, overlay: RunOverlay | None) -> None:
        """Mark a second run and compare it with the one on show, or none."""
        self.model.set_overlaid(None if overlay is None else overlay.run)
        self.pair.set_overlay(overlay)
        self._show_what_is_offered()

    def refresh(self) -> None:
        """Does nothing: `refresh_numbers` updates the figures, less often than every frame."""

    def refresh_numbers(self) -> None:
        """Bring figures and new runs up to date, unless nobody looks."""
        if self.isVisible():
            self.model.refresh()
            self.pair.refresh()
            self._show_what_is_offered()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.model.refresh()

    def set_cursor(self, position: Position | None) -> None:
        """A position does not change the list."""

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self.model.retheme(theme)

    def _show(self, index: QModelIndex) -> None:
        self.run_selected.emit(self.model.rows[index.row()].run)

    def _hide(self) -> None:
        run = self._chosen()
        if run is None:
            return
        if run == self.model.overlaid:
            self.overlay_asked.emit(None)
        self.model.hide_run(run)
        self._show_what_is_offered()

    def _show_all(self) -> None:
        self.model.show_all()
        self._show_what_is_offered()

    def _chosen(self) -> RunRef | None:
        index = self.table.currentIndex()
        return self.model.rows[index.row()].run if index.isValid() else None

    def _overlay_one(self) -> None:
        self.overlay_asked.emit(self.model.other(self._chosen()))

    def _show_what_is_offered(self) -> None:
        self.setCurrentIndex(1 if self.model.rows or self.model.n_hidden else 0)
        self.table.setColumnHidden(self.model.column_of("model"), self.model.n_models < 2)
        self._lay_over.setEnabled(self.model.other(None) is not None)
        self._lay_off.setEnabled(self.model.overlaid is not None)
        self.show_all.setText(f"Show {self.model.n_hidden} hidden")
        self.show_all.setVisible(self.model.n_hidden > 0)

    def _ask(self, where: QPoint) -> None:
        index = self.table.indexAt(where)
        if not index.isValid():
            return
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        run = self.model.rows[index.row()].run
        menu.addAction("Show in all views", lambda: self._show(index))
        over = menu.addAction(
            self._lay_over.icon(), "Overlay with this run", lambda: self.overlay_asked.emit(run)
        )
        over.setEnabled(self.model.can_overlay(run) and run != self.model.overlaid)
        menu.addAction(self._lay_off)
        menu.addSeparator()
        hide = menu.addAction("Take off the list", self._hide)
        hide.setEnabled(run != self.model.shown)
        runs = self.model.recorded_in(run.store)
        if runs is not None:
            drop = menu.addAction(
                f"Drop all runs of {runs.model}", lambda: self.drop_asked.emit(runs)
            )
            drop.setEnabled(not runs.in_use)
        menu.popup(self.table.viewport().mapToGlobal(where))

    def _fit_columns(self) -> None:
        character = self.fontMetrics().averageCharWidth()
        for name, n_characters in _CHARACTERS.items():
            self.table.setColumnWidth(self.model.column_of(name), n_characters * character)
        self.table.horizontalHeader().setStretchLastSection(True)
