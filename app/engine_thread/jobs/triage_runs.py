"""Triage: where the texts of two runs part, and whether that is explained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.engine_thread.job import SideJob
from engine.progress import ReportProgress
from engine.trace.run_ref import RunRef

if TYPE_CHECKING:
    from engine.observe.rescoring.triage import Triage


class TriageRuns(SideJob):
    """Compare two runs that have ended, the one on show and the one laid over it."""

    found: Triage | None = None

    def __init__(self, shown: RunRef, overlaid: RunRef) -> None:
        super().__init__()
        self.shown, self.overlaid = shown, overlaid

    def run(self, progress: ReportProgress) -> None:
        from engine.observe.rescoring.triage import triage

        self.found = triage(self.shown, self.overlaid)
