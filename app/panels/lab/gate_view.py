"""The Gate view: the settings of a check, its verdicts on a llama.cpp build as a grid, and the
progress of a bisect."""

from __future__ import annotations

import re

import numpy as np
from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QAction, QHideEvent, QPalette, QShowEvent
from PySide6.QtWidgets import (
    QAbstractSpinBox,
    QComboBox,
    QGridLayout,
    QLabel,
    QPushButton,
    QToolButton,
    QWidget,
)

from app.engine_thread.feed import timer
from app.looks import Theme
from app.trace_models.tune_surface import HeatMap
from app.widgets.build import hbox, made, vbox, words
from app.widgets.fitted_labels import ElidedLabel
from app.widgets.heat_grid import HeatGrid
from app.widgets.option_groups import make_field, tip, value_of
from app.widgets.whole_run_view import WholeRunView
from engine.compare.rollback_outcomes import (
    ABSENT,
    BAD,
    FAILED,
    KNOWN,
    REFUSED,
    RIGHT,
    UNREAD,
    WRONG,
    is_new,
)
from engine.errors import OptionError
from engine.experiments.bisect import progress_file
from engine.files import file_head
from engine.option_fields import build, options_in, words_of
from engine.options.llama_cpp import GateOptions
from engine.report.text import visible
from engine.trace.facts import GateFacts
from engine.trace.run_ref import RunRef

_PER_ROW = 2
_MOST = 6
"""Most settings per check."""
_CHARACTERS = 7


class GateForm(QWidget):
    """`asked` has the settings to check: the kept ones, then those in the fields."""

    asked = Signal(object)  # tuple[GateOptions, ...]

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[GateOptions] = []
        self.unfold = made(
            QToolButton,
            text="Settings",
            autoRaise=True,
            toolButtonStyle=Qt.ToolButtonStyle.ToolButtonTextBesideIcon,
            clicked=self._toggle,
        )
        self.words = ElidedLabel()
        about = "Keep these settings and check them together with those chosen next"
        self.keep = made(QPushButton, "&Keep", toolTip=about, clicked=self._keep)
        self.check = made(QPushButton, "Chec&k", clicked=self.ask)
        top = hbox(self.unfold, (self.words, 1), self.keep, self.check)
        self.body = QWidget()
        grid = QGridLayout(self.body)
        grid.setContentsMargins(12, 0, 0, 4)
        grid.setVerticalSpacing(4)
        self.fields = {one.field: (one, make_field(one)) for one in options_in(GateOptions)}
        for i, (one, field) in enumerate(self.fields.values()):
            field.setToolTip(tip(one))
            field.setAccessibleName(one.row.label)
            field.setAccessibleDescription(tip(one))
            row, column = divmod(i, _PER_ROW)
            if one.kind is bool:
                field.toggled.connect(self._tell)
            else:
                label = made(QLabel, one.row.label, toolTip=tip(one))
                label.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
                grid.addWidget(label, row, 2 * column)
                field.setMinimumWidth(_CHARACTERS * self.fontMetrics().averageCharWidth())
                if isinstance(field, QAbstractSpinBox):
                    field.setButtonSymbols(QAbstractSpinBox.ButtonSymbols.NoButtons)
                is_choice = isinstance(field, QComboBox)
                (field.currentTextChanged if is_choice else field.textChanged).connect(self._tell)
            grid.addWidget(field, row, 2 * column + 1)
        for column in range(_PER_ROW):
            grid.setColumnStretch(2 * column + 1, 1)
        self.chips = hbox(1, spacing=4)
        vbox(top, self.body, self.chips, of=self, margins=(0, 0, 0, 0), spacing=2)
        self.set_open(True)
        self._tell()

    def follow(self, action: QAction) -> None:
        """Enabled only while this action is."""
        self.check.setEnabled(action.isEnabled())
        action.enabledChanged.connect(self.check.setEnabled)

    def options(self) -> GateOptions:
        """The settings in the fields. Raises OptionError."""
        values = {one.path: value_of(one, field) for one, field in self.fields.values()}
        return build(GateOptions, values)

    def set_open(self, wanted: bool) -> None:
        """Show the fields, or only a summary."""
        self.unfold.setArrowType(Qt.ArrowType.DownArrow if wanted else Qt.ArrowType.RightArrow)
        self.body.setVisible(wanted)

    def ask(self) -> None:
        """Request the checks, unless a field is invalid."""
        try:
            wanted = dict.fromkeys((*self._kept, self.options()))
        except OptionError:
            self.set_open(True)
            return  # the error is shown
        self.set_open(False)
        self.asked.emit(tuple(wanted))

    def _toggle(self) -> None:
        self.set_open(self.body.isHidden())

    def _keep(self) -> None:
        options = self.options()
        if options in self._kept:
            return
        self._kept.append(options)
        chip = made(QPushButton, f"{_text(options)} ✕", toolTip="Remove these settings")
        chip.clicked.connect(lambda: self._drop(options, chip))
        self.chips.insertWidget(self.chips.count() - 1, chip)
        self._tell()

    def _drop(self, options: GateOptions, chip: QPushButton) -> None:
        self._kept.remove(options)
        chip.deleteLater()
        self._tell()

    def _tell(self) -> None:
        text, role, sound = "", QPalette.ColorRole.PlaceholderText, True
        try:
            text = _text(self.options())
        except OptionError as error:
            text, role, sound = str(error), QPalette.ColorRole.BrightText, False
        self.words.setText(text)
        self.words.setForegroundRole(role)
        self.keep.setEnabled(sound and len(self._kept) < _MOST)


def _text(options: GateOptions) -> str:
    return " ".join(words_of(options)) or "defaults"


_LOOK_MS = 2000
_LONGEST = 4000
"""Longest message about a bisect, bytes."""
_MOST_LINES, _MOST_COLUMNS = 24, 160
_GROUNDS = {
    RIGHT: "accepted.tint",
    REFUSED: "accepted.tint",
    KNOWN: "status.warning_tint",
    WRONG: "status.error_tint",
    FAILED: "status.error_tint",
}
_WORST = (FAILED, WRONG, KNOWN, UNREAD, ABSENT, REFUSED, RIGHT)
_HINT = "click: the lane in Divergence"

Check = tuple[RunRef, GateFacts]
"""A check with the run of its lane; for a script, the first run."""


class GateView(WholeRunView):
    """Rows are scenarios by draft length; columns the rollback methods or, if a build was checked
    at several settings, the settings, each with its worst method. All of it is in the runs' facts,
    so an opened trace of `check-rollback --trace` shows it, too."""

    name = "Gate"
    empty_title = "No build checked yet"
    about = (
        "Shows which kinds of rollback work in a build of llama.cpp: Run → Check llama.cpp "
        "Rollback, or open a trace of draftscope check-rollback."
    )
    untold = "checks of rollback"
    period_ms = 500

    run_selected = Signal(object)  # RunRef

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.empty.waits_for_run = False  # a run checks nothing
        self._cells: dict[tuple[int, int], list[Check]] = {}
        """Checks of a cell, worst first."""
        self._found: list[Check] = []
        self.form = GateForm()
        self.headline = words(wraps=False, bold=True)
        self.grid = HeatGrid(theme, "Verdicts by scenario and kind of rollback")
        self.grid.pointed.connect(self._tell)
        self.grid.tip = lambda row, column: self._words_of((row, column))
        self.grid.chosen.connect(self._choose)
        self.bisect = words(shrinks=True, accessibleName="Bisect")
        self.bisect.hide()
        self._timer = timer(self, self.look)
        self.readout = made(ElidedLabel, muted=True)
        first = QWidget()
        self.removeWidget(self.empty)
        self.insertWidget(0, first)
        above = vbox(self.form, (self.empty, 1), of=first, margins=(8, 4, 8, 4))
        self.empty.show()  # a stack hides widgets that leave it
        self.setCurrentIndex(0)
        parts = self.headline, (self.grid, 1), self.readout, self.bisect, 0
        column = vbox(*parts, of=self.page, margins=(8, 4, 8, 4), spacing=4)
        self.currentChanged.connect(lambda at: (above, column)[at].insertWidget(0, self.form))

    def table(self) -> tuple[list[str], list[list[object]]]:
        names = ["settings", "scenario", "n_draft", "policy", "outcome", "before", "about"]
        return names, [[getattr(facts, name) for name in names] for _, facts in self._found]

    def look(self) -> None:
        """Read the progress of the latest `draftscope bisect`."""
        said = file_head(progress_file(), _LONGEST).decode("utf-8", "replace")
        lines = said.splitlines()[:_MOST_LINES]
        text = "\n".join(visible(line[:_MOST_COLUMNS]) for line in lines)
        if text != self.bisect.text():
            self.bisect.setText(text)
            self.bisect.setVisible(bool(text))
        if text and not self.has_rounds:
            title, _, rest = text.partition("\n")
            self.empty.say(title, rest)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.look()
        self._timer.start(_LOOK_MS)

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._timer.stop()

    def _begin(self, run: RunRef | None) -> None:
        self._found, self._cells = [], {}
        self.grid.set_map(None)

    def _read(self) -> bool:
        assert self.run is not None
        runs = [self.run.sibling(run_id) for run_id in list(self.run.store.runs)]
        self._found = [(run, facts) for run in runs if (facts := run.facts.gate) is not None]
        for run in runs[:1]:
            self._found += [(run, facts) for facts in run.facts.gate_scripts or ()]
        return bool(self._found)

    def _show(self) -> None:
        settings = [_options(facts.settings) for _, facts in self._found]
        common = [one for one in settings[0] if all(one in every for every in settings)]
        by_settings = any(len(every) > len(common) for every in settings)

        def column_of(facts: GateFacts) -> str:
            if not by_settings:
                return facts.policy
            own = [one for one in _options(facts.settings) if one not in common]
            return " ".join(own) or "defaults"

        has_baseline = any(facts.before for _, facts in self._found)
        rows = list(dict.fromkeys(_row(facts) for _, facts in self._found))[::-1]
        columns = list(dict.fromkeys(column_of(facts) for _, facts in self._found))
        lanes: dict[tuple[int, int], dict[str, Check]] = {}
        for run, facts in self._found:  # the last of several checks of a build
            cell = rows.index(_row(facts)), columns.index(column_of(facts))
            lanes.setdefault(cell, {})[facts.policy] = run, facts
        self._cells = {
            cell: sorted(every.values(), key=lambda one: _WORST.index(one[1].outcome))
            for cell, every in lanes.items()
        }
        texts = [[""] * len(columns) for _ in rows]
        grounds = [["ui.base"] * len(columns) for _ in rows]
        values = np.full((len(rows), len(columns)), np.nan)
        for (row, column), checks in self._cells.items():
            worst = checks[0][1]
            n_same = sum(facts.outcome == worst.outcome for _, facts in checks)
            share = f" {n_same}/{len(checks)}" if n_same < len(checks) else ""
            news = has_baseline and any(is_new(one.outcome, one.before) for _, one in checks)
            texts[row][column] = f"{'new: ' if news else ''}{worst.outcome}{share}"
            ground = _GROUNDS.get(worst.outcome, "ui.base")
            if has_baseline and not news and worst.outcome in BAD:
                ground = _GROUNDS[KNOWN]
            grounds[row][column], values[row, column] = ground, 0.0
        axis = "settings" if by_settings else "kind of rollback"
        if common:
            axis += f", with {' '.join(common)}"
        self.grid.set_map(
            HeatMap(
                axis,
                "scenario, drafted tokens",
                tuple(columns),
                tuple(rows),
                values,
                tuple(map(tuple, texts)),
                grounds=tuple(map(tuple, grounds)),
            )
        )
        outcomes = [facts.outcome for _, facts in self._found]
        counts = ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
        if has_baseline:
            counts += f"; {sum(is_new(one.outcome, one.before) for _, one in self._found)} new"
        builds = [run.facts.compute for run, _ in self._found if run.facts.gate is not None]
        self.headline.setText(f"{next(filter(None, builds), 'llama.cpp')}: {counts}")
        self._tell(None)

    def _tell(self, cell: tuple[int, int] | None) -> None:
        self.readout.setText(self._words_of(cell).partition("\n")[0] or _HINT)

    def _words_of(self, cell: tuple[int, int] | None) -> str:
        checks = self._cells.get(cell, []) if cell else []
        return "\n".join(_words(facts) for _, facts in checks)

    def _choose(self, row: int, column: int) -> None:
        for run, facts in self._cells.get((row, column), [])[:1]:
            if run.facts.gate == facts:  # a script has no lane
                self.run_selected.emit(run)


def _words(facts: GateFacts) -> str:
    about = f": {facts.about}" if facts.about else ""
    before = f" (baseline: {facts.before})" if facts.before else ""
    return f"{_row(facts)}, {facts.policy}: {facts.outcome}{before}{about}"


def _options(settings: str) -> list[str]:
    """Options with their values."""
    return [one for one in re.split(r" (?=--?[a-z])", settings) if one]


def _row(facts: GateFacts) -> str:
    return f"{facts.scenario}, {facts.n_draft}" if facts.n_draft else facts.scenario
