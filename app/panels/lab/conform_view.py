"""The Kernel Checks panel: what `draftscope conform` finds in a package's kernels, as a grid of
kernels and checks, and the error of the chosen one by row or depth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import (
    QAbstractItemView,
    QFileDialog,
    QHeaderView,
    QPushButton,
    QTableWidget,
    QTableWidgetItem,
    QWidget,
)

from app.looks import Theme, figures_font
from app.widgets.build import SAME, hbox, made, split, vbox, words
from app.widgets.fields import text
from app.widgets.fitted_labels import ElidedLabel
from app.widgets.plot_surface import PlotSurface
from engine.plain_text import counted
from engine.report.text import visible

if TYPE_CHECKING:
    from engine.conform.runner import Outcome

_HINT = "Wheel, .tar.gz or folder of vLLM, SGLang, FLA, FlashInfer and others, or FILE.py:FUNCTION"
_FILTER = "Packages and adapters (*.whl *.tar.gz *.py);;All files (*)"
_ABSENT = "–"
_CHARACTERS = 10
"""Least width of the target field."""
_FIRST = (
    "Runs rounds of draft, verify, accept and commit with rollback kernels of other engines, and "
    "compares every output and state with the recurrence in f64. Nothing is sent anywhere."
)


class ConformView(QWidget):
    """A target, the grid of its checks, and what is known about the chosen cell."""

    asked = Signal(str)  # target
    stop_asked = Signal()

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme, self._target = theme, ""
        theme.changed.connect(self._recolour)
        self._outcomes: dict[tuple[int, int], Outcome] = {}
        self._runs = False
        self.target = text(_HINT, takes_path=True)
        self.target.setMinimumWidth(_CHARACTERS * self.fontMetrics().averageCharWidth())
        self.target.setAccessibleName("Package or adapter to check")
        self.target.setToolTip(f"{_HINT}; Help (Shift+F1) explains adapters")
        self.target.textChanged.connect(self._enable)
        self.target.returnPressed.connect(self._press)
        self.browse = made(QPushButton, "Bro&wse…", clicked=self._browse)
        self.button = made(QPushButton, "Chec&k", clicked=self._press)
        self.headline = made(ElidedLabel, _FIRST, wordWrap=True)
        self.grid = made(QTableWidget, accessibleName="Checks of each kernel")
        self.grid.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.grid.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.grid.setTabKeyNavigation(False)
        for heads in (self.grid.horizontalHeader(), self.grid.verticalHeader()):
            heads.setHighlightSections(False)  # bold names would not fit
        self.grid.currentCellChanged.connect(lambda *_: self._show_chosen())
        self.words = words(selectable=True)
        self.copy = QPushButton("&Copy Command")
        self.copy.setToolTip("Command that repeats this check")
        self.copy.clicked.connect(lambda: QGuiApplication.clipboard().setText(self._command()))
        self.plot = ErrorPlot(theme)
        self._lay_out()
        self._show_chosen()
        self._enable()

    def begin(self, target: str) -> None:
        """Empty the grid for the checks of a target, which run from now on."""
        self._target, self._runs = target, True
        self._outcomes.clear()
        self.grid.setRowCount(0)
        self.headline.setText(f"{target}: checking …")
        self._show_chosen()
        self._enable()

    def add(self, outcome: Outcome) -> None:
        """Show one check that has ended."""
        from engine.conform.checks import CHECKS

        if outcome.check not in CHECKS and not outcome.needs:
            return  # a check that only measures has no column
        if self.grid.columnCount() != len(CHECKS):
            self.grid.setColumnCount(len(CHECKS))
            self.grid.setHorizontalHeaderLabels(CHECKS)
            heads = self.grid.horizontalHeader()
            heads.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        name = visible(f"{outcome.kernel} {outcome.recurrence}")
        labels = [self.grid.verticalHeaderItem(i).text() for i in range(self.grid.rowCount())]
        if name not in labels:
            self.grid.insertRow(len(labels))
            self.grid.setVerticalHeaderItem(len(labels), QTableWidgetItem(name))
            labels.append(name)
        at = labels.index(name), CHECKS.index(outcome.check) if outcome.check in CHECKS else 0
        self._outcomes[at] = outcome
        text = "n/a" if outcome.needs else "note" if outcome.faults else "ok"
        self._put(at, text if outcome.passed else "FAIL")
        self._colour(at)
        self.headline.setText(self._counts("so far"))
        if not outcome.passed and self._n_failed == 1:
            self.grid.setCurrentCell(*at)
        self._show_chosen()

    def _put(self, at: tuple[int, int], text: str, tip: str = "") -> None:
        item = QTableWidgetItem(text)
        item.setTextAlignment(Qt.AlignmentFlag.AlignCenter)
        item.setToolTip(tip)
        self.grid.setItem(*at, item)

    @property
    def _n_failed(self) -> int:
        return sum(not one.passed for one in self._outcomes.values())

    def _counts(self, when: str) -> str:
        n_checks = sum(not one.needs for one in self._outcomes.values())
        checks = f"{counted(n_checks, 'check')} {when}".rstrip()
        return f"{self._target}: {checks}, {self._n_failed} failed"

    def end(self, error: str = "", *, stopped: bool = False) -> None:
        """The checks have ended, were stopped, or could not be played because of `error`."""
        self._runs = False
        for at in product(range(self.grid.rowCount()), range(self.grid.columnCount())):
            if self.grid.item(*at) is None:
                self._put(at, _ABSENT, "Does not apply to this kernel, or was not run")
        self.headline.setText(error or self._counts("before it was stopped" if stopped else ""))
        self._enable()

    def show_all(self, target: str, outcomes: Sequence[Outcome]) -> bool:
        """Show checks of a target that were played elsewhere; False while some are being played."""
        if self._runs:
            return False
        self.target.setText(target)
        self.begin(target)
        for outcome in outcomes:
            self.add(outcome)
        self.end()
        return True

    def _recolour(self) -> None:
        for at in self._outcomes:
            self._colour(at)

    def _lay_out(self) -> None:
        top = Qt.AlignmentFlag.AlignTop
        line = hbox((self.headline, 1, top), (self.browse, 0, top), (self.button, 0, top))
        self._below = QWidget()
        said = hbox((self.words, 1), (self.copy, 0, top))
        vbox(said, (self.plot, 1), 0, of=self._below, margins=(0, 0, 0, 0))
        self._parts = split(self.grid, self._below, down=True)
        vbox(self.target, line, (self._parts, 1), 0, of=self, margins=(8, 4, 8, 4), spacing=4)

    def _press(self) -> None:
        if self._runs:
            self.stop_asked.emit()
        elif target := self.target.text().strip():
            self.asked.emit(target)

    def _browse(self) -> None:
        name, _ = QFileDialog.getOpenFileName(self, "Kernels to check", "", _FILTER)
        if name:
            self.target.setText(f"{name}:Adapter" if name.endswith(".py") else name)

    def _enable(self) -> None:
        self.button.setText("Stop" if self._runs else "Chec&k")
        self.button.setEnabled(self._runs or bool(self.target.text().strip()))

    def _chosen(self) -> Outcome | None:
        return self._outcomes.get((self.grid.currentRow(), self.grid.currentColumn()))

    def _colour(self, at: tuple[int, int]) -> None:
        outcome, item = self._outcomes[at], self.grid.item(*at)
        assert item is not None
        role = "status.error"
        if outcome.passed:
            role = "ui.text" if outcome.faults or outcome.needs else "status.ok"
        item.setForeground(self._theme.color(role))

    def _command(self) -> str:
        from engine.conform.report import again

        chosen = self._chosen()
        return again(chosen.faults[0], self._target) if chosen and chosen.faults else ""

    def _show_chosen(self) -> None:
        chosen = self._chosen()
        faults = chosen.faults if chosen is not None else ()
        self.copy.setVisible(bool(faults))
        self.words.setVisible(chosen is not None)
        self._parts.setVisible(bool(self._outcomes))
        self._below.setVisible(chosen is not None)
        drawn = any(f.row_errors or f.depth_errors for f in faults)
        if drawn == self.plot.isHidden():
            self.plot.setVisible(drawn)
            self._parts.setSizes([SAME, SAME if drawn else 0])  # hidden: as low as the words
        if chosen is None:
            return
        if chosen.needs:
            self.words.setText(f"{chosen.kernel}: not checked, {chosen.needs}.")
            return
        if not faults:
            self.words.setText(
                f"{chosen.kernel}, {chosen.check}: passed in {chosen.seconds:.1f} s."
            )
            return
        from engine.conform.report import paragraph

        self.words.setText(visible("\n".join(paragraph(faults[0])), keep_lines=True))
        self.plot.show_errors(faults[0].row_errors, faults[0].depth_errors)


class ErrorPlot(PlotSurface):
    """Bars: the relative error of each row, or the distance of a state from that at each depth."""

    def __init__(self, theme: Theme) -> None:
        super().__init__(theme, "0.00000")
        self.setAccessibleName("Relative errors")
        self.setFont(figures_font())
        self.setMinimumHeight(10 * self.fontMetrics().height())
        bars = pg.BarGraphItem(x=[], height=[], width=0.8)
        self._bars = self.put(bars, "", "status.error")
        self._errors = np.empty(0)
        self._axis = ""
        self.tip = self._words

    def show_errors(self, rows: tuple[float, ...], depths: tuple[float, ...]) -> None:
        """Draw one of the two; infinite errors are as high as the plot."""
        errors = np.array(rows or depths)
        self._errors = errors
        self._axis = "row of the pass" if rows else ("compared with the state after n rows")
        finite = errors[np.isfinite(errors)]
        top = float(finite.max()) if len(finite) and finite.max() > 0 else 1.0
        self._bars.setOpts(x=np.arange(len(errors)), height=np.minimum(errors, 1.1 * top))
        self.set_x_range(-0.5, max(len(errors), 1) - 0.5)
        self.set_y_range(0.0, 1.1 * top)
        self.set_ticks("bottom", [(i, str(i)) for i in range(len(errors))])
        self.name_axes("relative error", self._axis)

    def _words(self, x: float, y: float) -> str:
        at = round(x)
        known = 0 <= at < len(self._errors)
        return f"{self._axis} {at}: relative error {self._errors[at]:.3g}" if known else ""
