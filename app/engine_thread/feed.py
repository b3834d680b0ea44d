"""The feed of views: notifies them of new trace rows, by one timer. A pacer limits how often slow
work is done, so that painting and the engine keep their time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from PySide6.QtCore import QElapsedTimer, QObject, QTimer, Signal

from app.trace_models.run_facts import LiveNumbers
from app.trace_models.run_rows import MOST_OVERLAID, Position, RunOverlay, RunRange
from engine.trace.run_ref import RunRef

PACED_SHARE = 0.015
"""Share of the thread's time for one kind of work; the engine competes for the GIL."""
_LONGEST_MS = 1000


def timer(
    parent: QObject, does: Callable[[], object], ms: int = 0, *, once: bool = False
) -> QTimer:
    """A timer, not started. once: single shot. ms: interval, 0 for the argument of start()."""
    found = QTimer(parent)
    found.setInterval(ms)
    found.setSingleShot(once)
    found.timeout.connect(does)
    return found


class Pacer(QObject):
    """Calls a function on request, but at most every `period_ms` and within PACED_SHARE of the
    thread's time, for which it waits a second at most.

    The first call happens at once; early requests are deferred.
    """

    def __init__(self, work: Callable[[], None], period_ms: int, parent: QObject) -> None:
        super().__init__(parent)
        self._work, self._period = work, period_ms
        self._wait = period_ms
        self._since = QElapsedTimer()
        self._begun = 0.0
        self._timer = timer(self, self.now, once=True)
        self._painted = timer(self, self._count, once=True)

    def ask(self) -> None:
        if self._timer.isActive():
            return
        left = self._wait - self._since.elapsed() if self._since.isValid() else 0
        if left <= 0:
            self.now()
        else:
            self._timer.start(left)

    def now(self) -> None:
        """Call the function at once, whatever the period."""
        self._timer.stop()
        self._begun = time.thread_time()
        self._work()
        self._since.start()
        self._count()
        self._painted.start(0)  # runs after the painting of what has changed

    def _count(self) -> None:
        """Set the time of the next call from this one's duration so far."""
        cost = 1e3 * (time.thread_time() - self._begun)
        self._wait = max(self._period, round(min(cost / PACED_SHARE, _LONGEST_MS)))

    def stop(self) -> None:
        """Drop pending requests; the next call happens at once."""
        self._timer.stop()
        self._painted.stop()
        self._since.invalidate()


FRAME_MS = 33
SLOWEST_FRAME_MS = 400
SHARE = 0.02
"""Share of its time that the window's thread may compute before frames become rarer; the engine
competes for the GIL."""
NUMBERS_S = 0.4
"""Seconds between two updates of figures; faster ones are unreadable."""


class TraceView(Protocol):
    """A view that shows a run of the trace, complete up to now, and can be refreshed."""

    def show_run(self, run: RunRef | None) -> None: ...

    def refresh(self) -> None: ...

    def set_cursor(self, position: Position | None) -> None: ...


def _parent(run: RunRef) -> RunRef | None:
    """The run that a fork continues."""
    return run.sibling(run.facts.fork.parent) if run.facts.fork else None


class Feed(QObject):
    """Refreshes views while it is running, and shares the cursor among them."""

    numbers_changed = Signal(object)  # LiveNumbers
    overlay_changed = Signal(object)  # RunOverlay or None
    range_changed = Signal(object)  # RunRange or None
    run_shown = Signal(object)  # RunRef or None

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._views: list[TraceView] = []
        self.run: RunRef | None = None
        self.cursor: Position | None = None
        """The position that all views share."""
        self.overlay: RunOverlay | None = None
        """The second run, drawn over the one on show; None without one."""
        self._range: RunRange | None = None
        self._size_shown = -1
        self._told = 0.0
        self._begun = 0.0
        self._timer = timer(self, self._tick)
        self._painted = timer(self, self._pace, once=True)

    def add(self, views: Sequence[TraceView]) -> None:
        """Add views, and show them the current run and position."""
        self._views.extend(views)
        for view in views if self.run is not None else ():
            view.show_run(self.run)
            view.set_cursor(self.cursor)

    def show_run(self, run: RunRef | None) -> None:
        """Show this run in the views, or nothing. Overlaid runs of the same trace stay; if it is
        one of them, the two change places, whatever their traces. A fork without overlays gets its
        parent as one, which is removed with it."""
        shown, runs = self.run, self.overlaid
        kept = [shown if one == run else one for one in runs]
        if run not in runs:
            parent = None if shown is None else _parent(shown)
            kept = [one for one in runs if run and one.store is run.store and one != parent]
        if run is not None:
            kept = kept or [_parent(run)]
        self._send_overlay(None)
        self.set_range(None)
        self.run, self.cursor = run, None
        self._size_shown = -1 if run is None else run.store.size()  # later rows belong to a tick
        for view in self._views:
            view.show_run(run)
        self._lay_over([one for one in kept if one is not None])
        self.tell_numbers()
        self.run_shown.emit(run)

    @property
    def overlaid(self) -> list[RunRef]:
        """The overlaid runs, the compared one first."""
        return [] if self.overlay is None else [one.run for one in self.overlay.every]

    def set_overlay(self, run: RunRef | None) -> None:
        """Overlay only this run; None or the run on show removes all overlays."""
        self._lay_over([] if run is None else [run])

    def add_overlay(self, run: RunRef) -> None:
        """Overlay one more run, which is then the compared one; the oldest of too many is
        removed."""
        others = [one for one in self.overlaid if one != run]
        self._lay_over([run, *others][:MOST_OVERLAID])

    def _lay_over(self, runs: list[RunRef]) -> None:
        shown = self.run
        can = [one for one in runs if one != shown and one.run_id in one.store.runs]
        if shown is None or not can:
            self._send_overlay(None)
        elif can != self.overlaid:
            self._send_overlay(RunOverlay(can[0], shown, can[1:]))

    def start(self) -> None:
        self._timer.start(FRAME_MS)

    def stop(self) -> None:
        """Refresh a last time, then stop."""
        self._timer.stop()
        self.refresh()

    def clear(self) -> None:
        self._timer.stop()
        self.show_run(None)

    def refresh(self) -> None:
        if self.run is not None:
            self._size_shown = self.run.store.size()
            for view in self._views:
                view.refresh()
        self.tell_numbers()

    def select_run(self, run: RunRef) -> None:
        """Show another lane of the same comparison, with the cursor at the same place."""
        cursor = self.cursor
        if run != self.run:
            self.show_run(run)
            if cursor is not None:
                self.move_cursor(replace(cursor, run=run))

    def move_cursor(self, position: Position | None) -> None:
        """Show a position in every view, switching to its run; None clears it."""
        if position is not None and position.run != self.run:
            self.show_run(position.run)
        self.cursor = position
        self.set_range(None)
        for view in self._views:
            view.set_cursor(position)

    def set_range(self, chosen: RunRange | None) -> None:
        """Select a range of rounds of any run; None: back to the position."""
        if chosen is not None and chosen.run != self.run:
            self.show_run(chosen.run)
        if chosen != self._range:
            self._range = chosen
            self.range_changed.emit(chosen)

    def _tick(self) -> None:
        self._timer.setInterval(FRAME_MS)
        if self.run is None or self.run.store.size() == self._size_shown:
            return
        self._begun = time.thread_time()
        self._painted.start(0)  # runs after the painting of what has changed
        self._size_shown = self.run.store.size()
        for view in self._views:
            view.refresh()
        if time.monotonic() - self._told >= NUMBERS_S:
            self.tell_numbers()

    def _send_overlay(self, overlay: RunOverlay | None) -> None:
        if overlay is not self.overlay:
            self.overlay = overlay
            self.overlay_changed.emit(overlay)

    def _pace(self) -> None:
        """Set the time of the next frame from this one's CPU time, painting included."""
        wanted = 1e3 * (time.thread_time() - self._begun) / SHARE
        self._timer.setInterval(round(min(max(wanted, FRAME_MS), SLOWEST_FRAME_MS)))

    def tell_numbers(self) -> None:
        self._told = time.monotonic()
        numbers = LiveNumbers()
        if self.run is not None:
            numbers = LiveNumbers.read(self.run.store, self.run.run_id)
        self.numbers_changed.emit(numbers)
