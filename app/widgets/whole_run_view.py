"""The base of views about a whole run: an empty state, and no reading while hidden."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from PySide6.QtGui import QPaintEvent
from PySide6.QtWidgets import QStackedWidget, QWidget

from app.engine_thread.feed import Pacer
from app.trace_models.run_facts import is_ours, untold_by
from app.trace_models.run_rows import Position
from app.widgets.empty_state import EmptyState
from engine.trace.run_ref import RunRef

_EMPTY, _PAGE = range(2)


class WholeRunView(QStackedWidget):
    """Neither reads nor draws while hidden. Subclasses fill `page`, which pictures show. about:
    what it shows, below a title while there is nothing. untold: what another engine's run then
    lacks, in words after "does not report"."""

    name: ClassVar[str]
    empty_title: ClassVar[str]
    about: ClassVar[str]
    untold: ClassVar[str]
    period_ms: ClassVar[int] = 400

    def __init__(self) -> None:
        super().__init__()
        self.run: RunRef | None = None
        self._is_behind = False
        self._pacer = Pacer(self._read_and_show, self.period_ms, self)
        self.page = QWidget()
        self.empty = EmptyState(self.empty_title, self.about, waits_for_run=True)
        self.addWidget(self.empty)
        self.addWidget(self.page)
        self.setAccessibleName(self.name)

    @property
    def has_rounds(self) -> bool:
        return self.currentIndex() == _PAGE

    @property
    def in_sight(self) -> bool:
        """Whether any of it is visible, not hidden or in a covered tab."""
        return not self.visibleRegion().isEmpty()

    def show_run(self, run: RunRef | None) -> None:
        self.run = run
        self._pacer.stop()
        self._begin(run)
        self.setCurrentIndex(_EMPTY)
        self.empty.say()
        self.refresh()

    def refresh(self) -> None:
        """Read new rows of the trace, now or a little later; while hidden, once it is visible."""
        self._is_behind = self.run is not None
        if self._is_behind and self.in_sight:
            self._pacer.ask()

    def set_cursor(self, position: Position | None) -> None:
        """Does nothing: this is about the whole run."""

    @abstractmethod
    def table(self) -> tuple[list[str], list[list[object]]]:
        """The figures shown: column names and rows; None = not observed."""

    @abstractmethod
    def _begin(self, run: RunRef | None) -> None:
        """Drop everything read, and read this run from now on."""

    @abstractmethod
    def _read(self) -> bool:
        """Read new rows; returns whether there is anything to show."""

    @abstractmethod
    def _show(self) -> None:
        """Show what has been read."""

    def _read_and_show(self) -> None:
        if self.run is None or not self.in_sight:
            return
        self._is_behind = False
        if self._read():
            self.setCurrentIndex(_PAGE)
            self._show()
        else:
            self._say_what_is_untold(self.run)

    def _say_what_is_untold(self, run: RunRef) -> None:
        if not run.ended:
            self.empty.say_what()
        elif is_ours(run.facts):
            self.empty.say()
        else:
            self.empty.say("Not observed", untold_by(run.facts, self.untold))

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if self._is_behind:  # it has come into sight
            self._pacer.ask()
