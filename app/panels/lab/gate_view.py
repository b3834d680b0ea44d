"""The Gate view: the settings of a check, its verdicts on a llama.cpp build as a grid, and how far
a bisect is."""

from __future__ import annotations

import re

import numpy as np
from PySide6.QtCore import QTimer, Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.panels.lab.gate_form import GateForm
from app.trace_models.tune_surface import HeatMap
from app.widgets.build import made, vbox, words
from app.widgets.fitted_labels import ElidedLabel
from app.widgets.heat_grid import HeatGrid
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
from engine.experiments.bisect import progress_file
from engine.files import file_head
from engine.report.text import visible
from engine.trace.facts import GateFacts
from engine.trace.run_ref import RunRef

_LOOK_MS = 2000
_LONGEST = 4000
"""Bytes of what is said of a bisect."""
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
"""A check with the run that is its lane; of a script, with the first of all."""


class GateView(WholeRunView):
    """Rows are scenarios by the length of their drafts, columns the ways of rolling back, or where
    a build was checked at several settings, those, each with its worst way. All of it is facts of
    the runs, so that an opened trace of `check-rollback --trace` shows it too."""

    untold = "checks of rollback"
    period_ms = 500

    run_selected = Signal(object)  # RunRef

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(
            "Gate",
            "No build checked yet",
            "Shows which ways of rolling back a build of llama.cpp gets right: Run → Check "
            "llama.cpp Rollback, or open a trace of draftscope check-rollback.",
            parent,
        )
        self.empty.waits_for_run = False  # a run checks nothing
        self._cells: dict[tuple[int, int], list[Check]] = {}
        """Checks of a cell, the worst first."""
        self._found: list[Check] = []
        self.form = GateForm()
        self.headline = words(wraps=False, bold=True)
        self.grid = HeatGrid(theme, "Verdicts by scenario and way of rolling back")
        self.grid.pointed.connect(self._tell)
        self.grid.tip = lambda row, column: self._words_of((row, column))
        self.grid.chosen.connect(self._choose)
        self.bisect = words(shrinks=True, accessibleName="Bisect")
        self.bisect.hide()
        self._timer = QTimer(self)
        self._timer.timeout.connect(self.look)
        self.readout = made(ElidedLabel, muted=True)
        first = QWidget()
        self.removeWidget(self.empty)
        self.insertWidget(0, first)
        above = vbox(self.form, (self.empty, 1), of=first, margins=(8, 4, 8, 4))
        self.empty.show()  # a stack hides what it gives away
        self.setCurrentIndex(0)
        parts = self.headline, (self.grid, 1), self.readout, self.bisect, 0
        column = vbox(*parts, of=self.page, margins=(8, 4, 8, 4), spacing=4)
        self.currentChanged.connect(lambda at: (above, column)[at].insertWidget(0, self.form))

    def table(self) -> tuple[list[str], list[list[object]]]:
        """Every check."""
        names = ["settings", "scenario", "n_draft", "policy", "outcome", "before", "about"]
        return names, [[getattr(facts, name) for name in names] for _, facts in self._found]

    def look(self) -> None:
        """See how far the latest `draftscope bisect` is."""
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
        assert self._run is not None
        runs = [self._run.sibling(run_id) for run_id in list(self._run.store.runs)]
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
        for run, facts in self._found:  # of several checks of a build, the last one
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
        axis = "settings" if by_settings else "way of rolling back"
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
