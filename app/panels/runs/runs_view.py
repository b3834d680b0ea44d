"""The Runs panel: every run of the session and of earlier ones, the one on show in detail, and
a second one to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from PySide6.QtCore import QEvent, QModelIndex, QObject, QPoint, Qt, Signal
from PySide6.QtGui import (
    QFontMetrics,
    QGuiApplication,
    QKeyEvent,
    QKeySequence,
    QMouseEvent,
    QResizeEvent,
    QShowEvent,
)
from PySide6.QtWidgets import (
    QHeaderView,
    QLabel,
    QLineEdit,
    QMenu,
    QPushButton,
    QStackedWidget,
    QStyle,
    QToolButton,
    QWidget,
)

from app.actions import Actions
from app.looks import Theme
from app.panels.runs.run_table import RunPairTable, RunTable
from app.trace_models.results import short_text
from app.trace_models.run_comparison import compare_runs, setting_difference, text_difference
from app.trace_models.run_facts import ModelRuns, effective, run_names
from app.trace_models.run_notes import count_runs, notes_of
from app.trace_models.run_rows import RunOverlay
from app.widgets.build import Fitting, hbox, key_in, made, vbox, words
from app.widgets.empty_state import EmptyState
from app.widgets.fitted_labels import ElidedLabel
from app.widgets.plain_table import plain_table
from engine.plain_text import counted
from engine.trace.run_ref import RunRef

_CHARACTERS = {
    "run": 11,
    "drafter": 22,
    "acceptance": 6,
    "speed": 6,
    "seconds": 0,
    "star": 3,
    "started": 0,
    "prompt": 20,
    "policy": 10,
    "n_max": 7,
    "tokens": 7,
    "stop": 12,
}
_SAMPLES = {"policy": "checkpoint", "started": "Mmm 00", "seconds": "00.0 s", "speed": "0,000"}
_PAD = 12
_GROWS = {"prompt": (0.6, 50), "drafter": (0.4, 36)}
"""Columns with possibly long texts: their share of the remaining width, and their most
characters."""
_MARKS_CHARACTERS = 24
_NAME_PAD, _MOST_NAME = 6, 36
"""Characters of the name column: padding, and the maximum including it."""
_HINT_FROM, _DETAIL_FROM = 12, 18
"""Lines of height from which there is room below the table."""
_FOLDS = (Qt.Key.Key_Left, Qt.Key.Key_Right)
_ENTERS = (Qt.Key.Key_Return, Qt.Key.Key_Enter)


class RunsView(QStackedWidget):
    """Enter or a click shows a run in all views, F2 renames it, Delete removes it, which can be
    undone. Left and Right, or a click on a line's triangle, fold and open. Ctrl and a click
    overlays a second run, here and in the plots."""

    run_selected = Signal(object)  # RunRef
    overlay_asked = Signal(object)  # RunRef, or None
    rename_asked = Signal(object, str)  # RunRef, name
    star_asked = Signal(object, bool)  # RunRef, whether it is to have one
    delete_asked = Signal(object)  # list of RunRef
    undo_asked = Signal()
    again_asked = Signal(object)  # RunRef
    export_asked = Signal(object)  # RunRef

    def __init__(self, theme: Theme, actions: Actions) -> None:
        super().__init__()
        self.model = RunTable(theme)
        self.model.renamed.connect(self.rename_asked)
        self.can_repeat: Callable[[RunRef], bool] = lambda _: False
        """Whether a run could be repeated now."""
        self.table = plain_table(self.model, "Runs")
        self.table.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.table.customContextMenuRequested.connect(self._ask)
        self.table.clicked.connect(self._on_click)
        self.table.activated.connect(self._show)
        for watched in (self.table, self.table.viewport()):
            watched.installEventFilter(self)
        self._kept: Hashable = None
        """The current line before the lines changed."""
        self.model.modelAboutToBeReset.connect(self._keep_current)
        self.model.modelReset.connect(self._show_lines)
        for key, does in (
            (Qt.Key.Key_Delete, self._delete),
            (Qt.Key.Key_F2, self._rename),
            (QKeySequence.StandardKey.Undo, self.undo_asked.emit),
        ):
            key_in(self.table, key, does)
        self._lay_over, self._lay_off = actions["plot.overlay"], actions["plot.no_overlay"]
        other = self.model.other
        self._lay_over.triggered.connect(lambda: self.overlay_asked.emit(other(self._chosen())))
        self._lay_off.triggered.connect(lambda: self.overlay_asked.emit(None))
        self.search = RunSearch()
        self.search.changed.connect(self._search)
        self.pair = RunPair()
        hint = "Ctrl+click another run, or press O on it, to compare up to four."
        self.hint = made(ElidedLabel, hint, wordWrap=True, muted=True)
        self.hint.setContentsMargins(8, 4, 8, 0)
        self.detail = words(selectable=True, accessibleName="Parameters in effect")
        self.detail.setContentsMargins(8, 4, 8, 4)
        self.undo = made(QPushButton, "Undo", clicked=self.undo_asked)
        self.undo.hide()
        page, low = QWidget(), (self.undo, 0, Qt.AlignmentFlag.AlignLeft)
        parts = self.search, (self.table, 1), low, (self.pair, 2), self.hint, self.detail
        vbox(*parts, of=page, margins=(0, 0, 0, 0), spacing=0)
        self.addWidget(
            EmptyState(
                "No run yet", "Runs are kept and listed here. Press Run (F5).", waits_for_run=True
            )
        )
        self.addWidget(page)
        self.setFocusProxy(self.table)
        self.setAccessibleName("Runs")
        self._fit_columns()
        self._show_what_is_offered()

    def set_recorded(self, recorded: Sequence[ModelRuns]) -> None:
        self.model.set_recorded(recorded)
        self._mark_current()
        self._show_what_is_offered()

    def show_run(self, run: RunRef | None) -> None:
        """Mark the run on show; the runs of an opened trace are listed alone."""
        self.model.show_run(run)
        self._mark_current()
        self.detail.setText("" if run is None else effective(run.facts, run))
        self._show_what_is_offered()

    def offer_undo(self, what: str) -> None:
        """Offer to undo the last deletion; empty: nothing to undo."""
        self.undo.setText(f"Deleted {short_text(what, _MOST_NAME)}. Undo" if what else "Undo")
        self.undo.setVisible(bool(what))
        self._show_what_is_offered()

    def set_overlay(self, overlay: RunOverlay | None) -> None:
        """Mark overlaid runs and compare the first with the one on show, or none."""
        self.model.set_overlaid([] if overlay is None else [one.run for one in overlay.every])
        self.pair.set_overlay(overlay)
        self._show_what_is_offered()

    def refresh_numbers(self) -> None:
        """Update figures and new runs, if the panel is visible."""
        if self.isVisible():
            self.model.refresh()
            self.pair.refresh()
            self._show_what_is_offered()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.model.refresh()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """If no line is chosen, an arrow key chooses the first run: Qt would try the first line.
        Left and Right, and a click on a triangle, fold and open."""
        if watched is self.table and isinstance(event, QKeyEvent):
            return event.type() is QEvent.Type.KeyPress and self._take_key(event.key())
        if isinstance(event, QMouseEvent) and watched is self.table.viewport():
            index = self.table.indexAt(event.position().toPoint())
            if index.isValid() and self._is_triangle(index, round(event.position().x())):
                if event.type() is QEvent.Type.MouseButtonPress:
                    self._toggle(index.row())
                return True
        return super().eventFilter(watched, event)

    def _take_key(self, key: int) -> bool:
        index, model = self.table.currentIndex(), self.model
        if key in (Qt.Key.Key_Down, Qt.Key.Key_Up):
            if index.isValid() or not model.rows:
                return False
            line = model.line_of(model.rows[0].run)
            self.table.setCurrentIndex(model.index(line or 0, 0))
            return True
        if not index.isValid() or key not in (*_FOLDS, *_ENTERS):
            return False
        row, is_open = index.row(), model.lines[index.row()].is_open
        if key in _ENTERS:
            if model.run_at(row) is not None:
                return False
            self._toggle(row)
        elif is_open is not None and is_open is (key == Qt.Key.Key_Left):
            self._toggle(row)
        elif key == Qt.Key.Key_Left and (parent := model.parent_of(row)) is not None:
            self.table.setCurrentIndex(model.index(parent, 0))
        return True

    def _is_triangle(self, index: QModelIndex, x: int) -> bool:
        line = self.model.lines[index.row()]
        if line.is_open is None or index.column() != 0:
            return False
        if line.row is None:
            return True
        small = QStyle.PixelMetric.PM_SmallIconSize
        has_icon = index.data(Qt.ItemDataRole.DecorationRole) is not None
        before = self.table.style().pixelMetric(small) if has_icon else 0
        text = str(index.data()).removesuffix(line.title)
        right = self.table.fontMetrics().horizontalAdvance(text) + before + _PAD
        return x <= self.table.columnViewportPosition(0) + right

    def _toggle(self, line: int) -> None:
        self.table.setCurrentIndex(self.model.index(line, 0))
        self.model.toggle(line)

    def _mark_current(self) -> None:
        line = self.model.line_of(self.model.shown)
        self.table.setCurrentIndex(QModelIndex() if line is None else self.model.index(line, 0))

    def _keep_current(self) -> None:
        index = self.table.currentIndex()
        self._kept = self.model.lines[index.row()].key if index.isValid() else None

    def _show_lines(self) -> None:
        lines = enumerate(self.model.lines)
        if (at := next((i for i, one in lines if one.key == self._kept), None)) is not None:
            self.table.setCurrentIndex(self.model.index(at, 0))
        self.table.clearSpans()
        for line in range(len(self.model.lines)):
            if self.model.run_at(line) is None:  # a folder
                self.table.setSpan(line, 0, 1, self.model.columnCount())

    def _on_click(self, index: QModelIndex) -> None:
        run = self.model.run_at(index.row())
        with_ctrl = QGuiApplication.keyboardModifiers() & Qt.KeyboardModifier.ControlModifier
        if run is not None and index.column() == self.model.column_of("star"):
            self.star_asked.emit(run, not notes_of(run.facts).starred)
        elif run is not None and with_ctrl and self.model.can_overlay(run):
            self.overlay_asked.emit(run)
        else:
            self._show(index)

    def _show(self, index: QModelIndex) -> None:
        if (run := self.model.run_at(index.row())) is not None:
            self.run_selected.emit(run)

    def _rename(self) -> None:
        index = self.table.currentIndex()
        if index.isValid() and self.model.run_at(index.row()) is not None:
            self.table.edit(index.siblingAtColumn(0))

    def _delete(self) -> None:
        if (run := self._chosen()) is not None:
            self.delete_asked.emit([run])

    def _search(self) -> None:
        self.model.search(self.search.words, starred_only=self.search.starred_only)
        self._mark_current()
        self._show_what_is_offered()

    def _chosen(self) -> RunRef | None:
        index = self.table.currentIndex()
        return self.model.run_at(index.row()) if index.isValid() else None

    def _show_what_is_offered(self) -> None:
        self.setCurrentIndex(1 if self.model.n_known or not self.undo.isHidden() else 0)
        n_found = count_runs(row.run for row in self.model.rows)
        self.search.show_count(n_found, self.model.n_known)
        self._lay_over.setEnabled(self.model.other(None) is not None)
        self._widen_columns()
        self._fit_words()
        self._lay_off.setEnabled(self.model.overlaid is not None)

    def _fit_words(self) -> None:
        """Show the words below the table that there is room for."""
        lines = self.height() / self.fontMetrics().height()
        self.detail.setVisible(bool(self.detail.text()) and lines >= _DETAIL_FROM)
        can_add = self.model.other(None) is not None and self.model.overlaid is None
        self.hint.setVisible(can_add and lines >= _HINT_FROM)

    def _ask(self, where: QPoint) -> None:
        index = self.table.indexAt(where)
        run = self.model.run_at(index.row()) if index.isValid() else None
        if run is None:
            return
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.addAction("Show in All Views", lambda: self._show(index))
        again = menu.addAction("Run Again with These Settings", lambda: self.again_asked.emit(run))
        again.setEnabled(self.can_repeat(run))
        menu.addAction("Export Run…", lambda: self.export_asked.emit(run))
        menu.addSeparator()
        over = menu.addAction(
            self._lay_over.icon(), "Overlay with This Run", lambda: self.overlay_asked.emit(run)
        )
        over.setEnabled(self.model.can_overlay(run) and run != self.model.overlaid)
        menu.addAction(self._lay_off)
        menu.addSeparator()
        starred = notes_of(run.facts).starred
        menu.addAction("Rename…", lambda: self.table.edit(index.siblingAtColumn(0)))
        word = "Remove the Star" if starred else "Star"
        menu.addAction(word, lambda: self.star_asked.emit(run, not starred))
        menu.addSeparator()
        menu.addAction("Delete", lambda: self.delete_asked.emit([run]))
        group = next(row.model for row in self.model.rows if row.run == run)
        listed = [row.run for row in self.model.rows if row.model == group]
        if len(listed) > 1:
            menu.addAction(
                f"Delete All {len(listed):,} Runs of {group}".replace("&", "&&"),
                lambda: self.delete_asked.emit(listed),
            )
        menu.popup(self.table.viewport().mapToGlobal(where))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._widen_columns()
        self._fit_words()

    def _fit_columns(self) -> None:
        character, header = self.fontMetrics().averageCharWidth(), self.table.horizontalHeader()
        bold = self.table.font()
        bold.setBold(True)  # the run on show
        figures = QFontMetrics(bold)
        self._widths: dict[str, int] = {}
        for name, n_characters in _CHARACTERS.items():
            column = self.model.column_of(name)
            sample = figures.horizontalAdvance(_SAMPLES.get(name, "")) + _PAD
            width = max(n_characters * character, header.sectionSizeHint(column), sample)
            self._widths[name] = width
            self.table.setColumnWidth(column, width)
        header.setStretchLastSection(True)
        self._given = {name: self._widths[name] for name in ("run", *_GROWS)}

    def _widen_columns(self) -> None:
        """Fit the name column, and give long texts the rest of the width; a width set by the user
        stays."""
        character = self.fontMetrics().averageCharWidth()
        longest = max((len(row.name) for row in self.model.rows), default=0) + _NAME_PAD
        width = max(self._widths["run"], min(longest, _MOST_NAME) * character)
        if self.table.columnWidth(0) == self._given["run"] != width:
            self.table.setColumnWidth(0, width)
            self._given["run"] = width
        taken = sum((self._widths | {"run": width}).values()) + _MARKS_CHARACTERS * character
        left = self.width() - self.table.verticalScrollBar().sizeHint().width() - taken
        for name, (share, most) in _GROWS.items():
            column, least = self.model.column_of(name), self._widths[name]
            if self.table.columnWidth(column) == self._given[name]:
                width = max(least, min(least + round(share * left), most * character))
                self.table.setColumnWidth(column, width)
                self._given[name] = width


class RunSearch(QWidget):
    """`changed`: another query."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.field = made(
            QLineEdit,
            placeholderText="Name, prompt, model or drafter",
            accessibleName="Search runs",
            clearButtonEnabled=True,
            textChanged=self.changed,
        )
        tip = "List only starred runs"
        self.stars = made(QToolButton, text="★", checkable=True, toolTip=tip, toggled=self.changed)
        self.stars.setAccessibleName("Only starred runs")
        self._count = made(QLabel, muted=True)
        parts = (self.field, 1), self.stars, self._count
        hbox(*parts, of=self, margins=(6, 4, 8, 4), spacing=6)

    @property
    def words(self) -> str:
        return self.field.text()

    @property
    def starred_only(self) -> bool:
        return self.stars.isChecked()

    def show_count(self, n_found: int, n_known: int) -> None:
        """Show how many runs and comparisons of how many are listed."""
        of = f"{n_found:,} of " if n_found != n_known else ""
        self._count.setText(f"{of}{counted(n_known, 'run')}")


class RunPair(Fitting, QWidget):
    """The table that compares the run on show with a second run.

    Hidden without one; figures are computed only while the table is visible.
    """

    def __init__(self) -> None:
        super().__init__()
        self._overlay: RunOverlay | None = None
        self._size_shown: int | None = None
        self._verdict = ""
        self.model = RunPairTable()
        self.table = plain_table(self.model, "Shown run and overlaid run")
        header = self.table.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        # names of figures begin alike, so they are not elided
        header.setSectionResizeMode(0, QHeaderView.ResizeMode.ResizeToContents)
        header.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.text = ElidedLabel(wordWrap=True)
        self.text.setContentsMargins(8, 4, 8, 4)
        vbox(self.text, (self.table, 1), of=self, margins=(0, 0, 0, 0), spacing=0)
        self.hide()

    def set_overlay(self, overlay: RunOverlay | None) -> None:
        """Compare the run on show with this one, or hide."""
        self._overlay, self._size_shown, self._verdict = overlay, None, ""
        self.setVisible(overlay is not None)
        self.refresh()

    def say(self, sentence: str) -> None:
        """The result of comparing both texts, once they have ended."""
        self._verdict = sentence
        if sentence and self._overlay is not None:
            self._say(self._overlay.over, self._overlay.run)

    def refresh(self) -> None:
        """Update the figures, if visible and something is new."""
        overlay = self._overlay
        if overlay is None or not self.isVisible():
            return
        runs = overlay.over, overlay.run
        ended = overlay.over.ended and overlay.run.ended  # before the figures, which are final then
        size = -1 if ended else sum(run.store.size() for run in runs)
        if size == self._size_shown:
            return
        self._size_shown = size
        self.model.show_pairs(run_names(*runs), compare_runs(*runs))
        self._say(*runs)

    def _say(self, shown: RunRef, overlaid: RunRef) -> None:
        texts = self._verdict or text_difference(shown, overlaid)
        settings = setting_difference(shown, overlaid)
        self.text.setText("\n".join(filter(None, (texts, settings))))
        self.fit()

    def fit(self) -> None:
        """No taller than its rows, so that the list gets the remaining room."""
        rows = self.table.verticalHeader().length() + self.table.horizontalHeader().height()
        height = rows + 2 * self.table.frameWidth()
        self.table.setMaximumHeight(height)
        self.text.setFixedHeight(max(0, self.text.heightForWidth(self.width())))
        self.setMaximumHeight(height + self.text.height())

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.refresh()
