"""An engine that stops between two rounds, for a picture of a run that is going on."""

from __future__ import annotations

import threading

from app.engine_thread.jobs import Job, OpenRequest, ReportProgress, RunRequest
from app.engine_thread.opening import LocalEngine, LocalSession
from engine.trace.store import TraceStore


class HeldEngine(LocalEngine):
    """The local engine, whose runs wait behind `n_rounds` rounds for `go_on`; None = never."""

    def __init__(self, n_rounds: int | None) -> None:
        self._n_rounds = n_rounds
        self._free = threading.Event()

    def go_on(self) -> None:
        """Let the rounds come again."""
        self._free.set()

    def open(self, request: OpenRequest, progress: ReportProgress) -> LocalSession:
        """A session whose runs wait."""
        session = super().open(request, progress)
        start = session.start

        def start_held(request: RunRequest, trace: TraceStore) -> Job:
            return _HeldRun(start(request, trace), self._n_rounds, self._free)

        setattr(session, "start", start_held)  # noqa: B010
        return session


class _HeldRun:
    """A run that waits behind so many rounds until it is free."""

    def __init__(self, run: Job, n_rounds: int | None, free: threading.Event) -> None:
        self._run, self._left, self._free = run, n_rounds, free
        self.run_id, self.cancel, self.stop = run.run_id, run.cancel, run.stop

    def step(self) -> bool:
        """One round."""
        if self._left == 0:
            self._free.wait()
        elif self._left is not None:
            self._left -= 1
        return self._run.step()

    advance = step  # a wait between two rounds of `advance` would hide the first
