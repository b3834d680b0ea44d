"""The Inspector panel: the round at the cursor with its judged tokens, both models' candidates and
all facts; or the chosen range of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import QModelIndex, Qt, Signal
from PySide6.QtGui import QGuiApplication, QShowEvent
from PySide6.QtWidgets import (
    QFrame,
    QHeaderView,
    QLabel,
    QScrollArea,
    QSizePolicy,
    QStackedWidget,
    QWidget,
)

from app.actions import Actions
from app.engine_thread.feed import Pacer
from app.looks import Theme
from app.panels.inspector.step_facts import (
    FactTable,
    Step,
    TraceRow,
    neighbour,
    newest_round,
    outcome,
    read_step,
    step_facts,
)
from app.panels.inspector.step_table import COLUMNS, StepTable, TopTable, cell_text, figure
from app.trace_models.run_rows import Position, RunRange, range_figures
from app.trace_models.shown_text import NOT_OBSERVED, plain_tip
from app.widgets.build import action_button, flat_button, hbox, made, scrolling, vbox, words
from app.widgets.empty_state import EmptyState
from app.widgets.fitted_labels import ScrollPage
from app.widgets.plain_table import (
    ColumnTable,
    FittedColumns,
    ProbabilityDelegate,
    TableColumn,
    fit_height,
    plain_table,
)
from engine.report.parts import ReportTable
from engine.report.text import table_lines
from engine.trace.run_ref import RunRef

_EMPTY, _STEP, _RANGE = range(3)
_PERIOD_MS = 200
_MOST_ROWS = 9
_SAMPLES = {
    "pos": "12,345",
    "token": " continue",
    "decision": "↻ replacement",
    "target": " continue",
}
_FIGURE = "9.9e-9"
_FACT_CHARACTERS = 56
"""Greatest width of the facts: values stay near their labels in a wide panel."""
_TOOLS = ("go.previous_round", "go.next_round", "file.copy_step")


class InspectorView(QStackedWidget):
    """One round as tables. Without a cursor it follows the newest round. With a range, its
    figures."""

    position_selected = Signal(object)  # Position

    def __init__(self, theme: Theme, actions: Actions) -> None:
        super().__init__()
        self._run: RunRef | None = None
        self._cursor: Position | None = None
        self._n_seen = -1
        self._placing = False
        self.step: Step | None = None
        self._pacer = Pacer(self._show, _PERIOD_MS, self)
        self.tokens_model = StepTable(theme)
        self.tops_model = TopTable(theme)
        self.facts_model = FactTable()
        self.tokens = plain_table(self.tokens_model, "Verified tokens of the round")
        self.tops = plain_table(
            self.tops_model, "Most probable tokens at the chosen position", selects=False
        )
        self.facts = plain_table(self.facts_model, "Facts about the round", selects=False)
        self._delegate = ProbabilityDelegate(self)
        self.title, self._tops_title = (
            words(wraps=False, shrinks=True, bold=True) for _ in range(2)
        )
        self.sentence = words(shrinks=True, selectable=True)
        self.range = RangeView()
        self.rest = words(shrinks=True, selectable=True)
        """The columns that do not fit into the table, for the chosen row."""
        self._build(actions)
        self.tokens.selectionModel().selectionChanged.connect(self._on_selected)
        self._theme = theme
        theme.apply(self._recolour)
        self.setAccessibleName("Step inspector")

    # -- the trace -------------------------------------------------------------------------

    def show_run(self, run: RunRef | None) -> None:
        self._pacer.stop()
        self._run = run
        self._cursor, self._n_seen = None, -1
        self._show_step(None)
        self.refresh()

    def refresh(self) -> None:
        """Show a new round of the trace, unless the cursor is on another one."""
        run = self._run
        if run is None or len(run.store.rounds) == self._n_seen:
            return
        if self._cursor is None or self.step is None:
            self._ask()

    def set_cursor(self, position: Position | None) -> None:
        """Show the round of the shared position; None: follow the newest."""
        if position is not None and position.run != self._run:
            position = None
        self._cursor = position
        shown = self.step
        if position is not None and shown is not None and shown.is_at(position):
            self._show_title()
            if not self.tokens_model.stands_at(self.tokens.currentIndex().row(), position):
                self._select_row(self.tokens_model.row_of(position))
            return
        self._n_seen = -1
        self._pacer.stop()
        self._ask()

    def set_range(self, chosen: RunRange | None) -> None:
        """Show the figures of a range of rounds; None: the round at the cursor again."""
        self.range.show_range(chosen)
        if chosen is not None:
            self.setCurrentIndex(_RANGE)
        elif self.currentIndex() == _RANGE:
            self.setCurrentIndex(_EMPTY if self.step is None else _STEP)

    def step_round(self, step: int) -> None:
        """Move the cursor to the next (+1) or previous (-1) round of the sequence on show."""
        self._pacer.now()
        if self._run is None or self.step is None:
            return
        seq_id = self.step.seq_id
        round_ = neighbour(self._run, seq_id, self.step.round, step)
        if round_ is not None:
            self.position_selected.emit(Position(self._run, seq_id, round_, None))

    def markdown(self) -> str:
        """The round under the cursor, else the newest, as Markdown; empty without a run."""
        step = self._read()
        return "" if step is None else step_markdown(step)

    def _recolour(self) -> None:
        self.facts_model.muted_colour = self._theme.color("ui.muted")
        for table in (self.tokens, self.tops, self.facts):
            table.viewport().update()

    # -- building --------------------------------------------------------------------------

    def _build(self, actions: Actions) -> None:
        head = hbox((self.title, 1), spacing=0)
        for action_id in _TOOLS:
            head.addWidget(action_button(actions[action_id]))
        self.tops.setItemDelegate(self._delegate)
        self.tops.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        self.facts.setAlternatingRowColors(False)
        self.facts.viewport().setAutoFillBackground(False)
        self.facts.horizontalHeader().hide()
        self.facts.horizontalHeader().setStretchLastSection(True)
        for table in (self.tokens, self.tops, self.facts):
            table.setFrameShape(QFrame.Shape.NoFrame)
            table.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        for table in (self.tops, self.facts):
            table.setFocusPolicy(Qt.FocusPolicy.NoFocus)
            table.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._columns = FittedColumns(self.tokens, [_SAMPLES.get(c.name, _FIGURE) for c in COLUMNS])
        self._columns.changed.connect(self._show_rest)
        most = _FACT_CHARACTERS * self.facts.fontMetrics().averageCharWidth()
        self.facts.setMaximumWidth(most)
        facts = hbox((self.facts, 1), 0)
        parts = head, self.sentence, self.tokens, self._tops_title, self.rest, self.tops, facts
        vbox(*parts, 1, of=(page := QWidget()), margins=(8, 4, 8, 8), spacing=6)
        self.addWidget(
            EmptyState(
                "No round yet",
                "Shows one round in full: tokens, probabilities, rollback, bytes and times. "
                "Press Run (F5), then choose a token.",
                waits_for_run=True,
            )
        )
        self.addWidget(scrolling(QScrollArea(), page, "Round in full"))
        ranges = vbox(self.range, margins=(0, 0, 0, 0))
        self.addWidget(ScrollPage(ranges))

    # -- showing ---------------------------------------------------------------------------

    def _ask(self) -> None:
        if self.isVisible():
            self._pacer.ask()

    def _read(self) -> Step | None:
        run = self._run
        if run is None:
            return None
        place = newest_round(run)
        if self._cursor is not None:
            place = (self._cursor.seq_id, self._cursor.round)
        return None if place is None else read_step(run, *place)

    def _show(self) -> None:
        if self._run is not None:
            self._n_seen = len(self._run.store.rounds)
        self._show_step(self._read())

    def _show_step(self, step: Step | None) -> None:
        self.step = step
        if self.range.shown is None:
            self.setCurrentIndex(_EMPTY if step is None else _STEP)
        self._placing = True
        self.tokens_model.show_step(step)
        self._placing = False
        self._columns.hide_empty(self.tokens_model.empty_columns())
        self.facts_model.show_rows([] if step is None else step_facts(step))
        self.facts.clearSpans()
        for row, (_, value, _) in enumerate(self.facts_model.rows):
            if not value:
                self.facts.setSpan(row, 0, 1, 2)
        self.facts.resizeColumnToContents(0)
        self.sentence.setText("" if step is None else outcome(step))
        self._show_title()
        self.tokens.setVisible(self.tokens_model.rowCount() > 0)
        fit_height(self.tokens, _MOST_ROWS)
        fit_height(self.facts)
        self._select_row(self.tokens_model.row_of(self._cursor))

    def _show_title(self) -> None:
        if self.step is not None:
            newest = " · newest" if self._cursor is None else ""
            self.title.setText(f"{self.step.title}{newest}")

    def _select_row(self, row: int) -> None:
        self._placing = True
        index = self.tokens_model.index(row, 0) if row >= 0 else QModelIndex()
        self.tokens.setCurrentIndex(index)
        self._placing = False
        self._show_tops(row)

    def _show_tops(self, row: int) -> None:
        step = self.step
        self.tops_model.show_token(step, row)
        shown = self.tops_model.rowCount() > 0
        self.tops.setVisible(shown)
        self._tops_title.setVisible(shown)
        if shown and step is not None:
            token = step.tokens[row]
            self._tops_title.setText(f"Position {token['pos']:,}: {token['kind']}")
        fit_height(self.tops)
        self._show_rest(row)

    def _show_rest(self, row: int | None = None) -> None:
        row = self.tokens.currentIndex().row() if row is None else row
        line = tip = ""
        if self.step is not None and 0 <= row < len(self.step.tokens):
            names = [COLUMNS[column].name for column in self._columns.left_out]
            token = self.step.tokens[row]
            line = step_line(self.step, token, names)
            tip = step_line_tip(self.step, token, names)
        self.rest.setText(line)
        self.rest.setToolTip(plain_tip(tip))
        self.rest.setVisible(bool(line))

    def _on_selected(self) -> None:
        rows = self.tokens.selectionModel().selectedRows()
        step = self.step
        if not rows or self._placing or step is None or self._run is None:
            return
        row = rows[0].row()
        self._show_tops(row)
        place = step.tokens[row]["pos"], step.token_rows[row]
        self._cursor = Position(self._run, step.seq_id, step.round, *place)
        self._show_title()
        self.position_selected.emit(self._cursor)

    # -- Qt --------------------------------------------------------------------------------

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._pacer.ask()


_HOLD = "\N{NO-BREAK SPACE}"
_WORDS = {
    "draft_p": "draft q",
    "target_p": "target p",
    "target_best": "argmax p",
    "target_entropy": "entropy",
}
"""Words for columns whose title is not clear by itself."""
_UNITS = {"target_entropy": "nats"}
_QUOTED = ("token", "target")


def step_line(step: Step, token: TraceRow, names: Sequence[str]) -> str:
    """These columns of `StepTable` in one line, without those that the token has no value for.

    A figure stays with its word at a line break; the argmax and its p are one unit.
    """
    parts: list[str] = []
    for name, title, _ in _told(step, token, names):
        text = cell_text(step, token, name)
        if name in _QUOTED:
            text = f"“{text}”"
        if name == "target_best" and "target" in names:
            parts[-1] += f" p{_HOLD}{text}"
            continue
        parts.append(_HOLD.join((title.replace(" ", _HOLD), _with_unit(name, text))))
    return " · ".join(parts)


def step_line_tip(step: Step, token: TraceRow, names: Sequence[str]) -> str:
    """The meaning of the parts of `step_line`, one per line, with full precision of
    probabilities."""
    lines = []
    for name, title, tip in _told(step, token, names):
        value = figure(token, name)
        digits = f" {_with_unit(name, f'{value:.9g}')}" if isinstance(value, float) else ""
        lines.append(f"{title}{digits}: {tip}")
    return "\n".join(lines)


def _told(step: Step, token: TraceRow, names: Sequence[str]) -> list[tuple[str, str, str]]:
    return [
        (name, _WORDS.get(name, title), tip)
        for name, title, tip, _ in COLUMNS
        if name in names and cell_text(step, token, name) not in ("", NOT_OBSERVED)
    ]


def _with_unit(name: str, text: str) -> str:
    return f"{text}{_HOLD}{_UNITS[name]}" if name in _UNITS else text


_ESCAPED = str.maketrans({"|": "\\|", "`": "\\`", "\\": "\\\\", "*": "\\*", "<": "&lt;"})


def step_markdown(step: Step) -> str:
    """Title, outcome, the judged tokens as a table, and the facts as a list per section."""
    lines = [f"### {step.title}", "", outcome(step).translate(_ESCAPED), ""]
    if step.tokens:
        lines.append(_row([column.title for column in COLUMNS]))
        lines.append(_row([":--" if column.is_text else "--:" for column in COLUMNS]))
        for token in step.tokens:
            cells = [cell_text(step, token, column.name) for column in COLUMNS]
            lines.append(_row([cell.translate(_ESCAPED) for cell in cells]))
        lines.append("")
    for label, value, _ in step_facts(step):
        if value:
            lines.append(f"- {label}: {value}".translate(_ESCAPED))
        else:
            if lines[-1]:
                lines.append("")
            lines += [f"**{label}**", ""]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


_HINT = (
    "Drag over rounds in any plot, or over text, to choose a range. Keep it, and the next one is "
    "compared with it. Esc: back to the round under the cursor."
)


class RangeTable(ColumnTable):
    """Rows are figures, columns are ranges. Figures without any value are left out."""

    def show_ranges(self, ranges: list[RunRange]) -> None:
        figures = [range_figures(one) for one in ranges]
        self.heads = ["", *(one.title for one in ranges)]
        columns = [TableColumn(str(i), head, head, not i) for i, head in enumerate(self.heads)]
        cells = [(label, *(one.get(label, "") for one in figures)) for label in figures[-1]]
        self.show_rows([one for one in cells if set(one[1:]) - {NOT_OBSERVED, ""}], columns)

    def cell(self, row: int, name: str, role: int) -> Any:
        return self.rows[row][int(name)] if role == Qt.ItemDataRole.DisplayRole else None

    def markdown(self) -> str:
        """The table for a comment."""
        table = ReportTable(self.heads, [tuple(map(str.strip, line)) for line in self.rows])
        return "\n".join(table_lines(table)) + "\n"


class RangeView(QWidget):
    """The figures of a range. closed: back to the round at the cursor. zoom_asked: zoom the plots
    to the range."""

    closed = Signal()
    zoom_asked = Signal(object)  # RunRange

    def __init__(self) -> None:
        super().__init__()
        self.shown: RunRange | None = None
        self._kept: RunRange | None = None
        self.title = made(QLabel, bold=True)
        self.model = RangeTable()
        self.table = plain_table(
            self.model, "Figures of the range and of the whole run", selects=False
        )
        header = self.table.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        header.setStretchLastSection(True)
        again, back = "Keep this range, to compare the next one with it", "Close the range"
        self.keep = flat_button("&Keep", again, checkable=True, toggled=self._keep)
        self.zoom = flat_button("&Zoom", "Scroll the plots to the range (F)")
        self.zoom.clicked.connect(lambda: self.zoom_asked.emit(self.shown))
        self.copy = flat_button("Co&py", "Copy the table as Markdown", clicked=self._copy)
        self.close_button = flat_button(
            "✕",
            "Back to the round under the cursor (Esc)",
            accessibleName=back,
            clicked=self.closed,
        )
        hint = made(QLabel, _HINT, wordWrap=True, muted=True)
        head = hbox((self.title, 1), self.keep, self.zoom, self.copy, self.close_button)
        vbox(head, self.table, hint, 1, of=self, margins=(8, 4, 8, 8), spacing=6)

    def show_range(self, chosen: RunRange | None) -> None:
        """Show a range next to the kept one, if any, and the whole run."""
        self.shown = chosen
        if chosen is None:
            self._kept = None
            self.keep.setChecked(False)
            return
        kept = [] if self._kept in (None, chosen) else [self._kept]
        self.title.setText(chosen.title)
        self.model.show_ranges([chosen, *kept, RunRange(chosen.run)])
        fit_height(self.table)

    def _keep(self, kept: bool) -> None:
        self._kept = self.shown if kept else None

    def _copy(self) -> None:
        QGuiApplication.clipboard().setText(self.model.markdown())
