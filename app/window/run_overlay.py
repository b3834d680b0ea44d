"""Two runs that lie over each other: where their texts part, and how to get there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal

from app.engine_thread.bridge import Bridge
from app.engine_thread.feed import Feed
from app.engine_thread.jobs.triage_runs import TriageRuns
from app.trace_models.position import Position
from app.trace_models.run_axis import RunOverlay
from app.window.panels import Panels

if TYPE_CHECKING:
    from engine.observe.rescoring.triage import TextPair


class RunPairs(QObject):
    """Has the texts of both compared as soon as both have ended, and tells the panels."""

    changed = Signal()
    """There is a place to go to, or none any more."""

    def __init__(self, bridge: Bridge, panels: Panels, feed: Feed, parent: QObject) -> None:
        super().__init__(parent)
        self._bridge, self._panels, self._feed = bridge, panels, feed
        self._overlay: RunOverlay | None = None
        self._asked = False
        self._parting: TextPair | None = None
        feed.overlay_changed.connect(self._begin)
        bridge.run_ended.connect(self._ask)

    @property
    def part(self) -> bool:
        """Whether there is a token at which the two differ."""
        return self._parting is not None

    def go_first(self) -> None:
        """Move the cursor to the first token that differs."""
        pair = self._parting
        if self._overlay is not None and pair is not None and pair.a is not None:
            run, round_ = self._overlay.over, pair.a.round
            if round_ is not None:
                self._feed.move_cursor(Position(run, pair.seq_a, round_, pair.pos))

    def _begin(self, overlay: RunOverlay | None) -> None:
        self._overlay, self._asked, self._parting = overlay, False, None
        self._panels.show_triage("", "")
        self._ask()
        self.changed.emit()

    def _ask(self, *_: object) -> None:
        overlay = self._overlay
        if overlay is not None and overlay.run.ended and overlay.over.ended and not self._asked:
            self._asked = True
            self._bridge.ask(TriageRuns(overlay.over, overlay.run), self._show)

    def _show(self, job: TriageRuns) -> None:
        overlay, found = self._overlay, job.found
        if overlay is None or (job.shown, job.overlaid) != (overlay.over, overlay.run):
            return
        if found is None:
            return
        worst = next((pair for pair in found.pairs if pair.verdict == found.verdict), None)
        parting = [pair for pair in found.pairs if pair.pos is not None]
        self._parting = worst if worst in parting else next(iter(parting), None)
        reason = "They have no prompt in common." if worst is None else worst.reason
        self._panels.show_triage(found.verdict if found.pairs else "other prompts", reason)
        self.changed.emit()
