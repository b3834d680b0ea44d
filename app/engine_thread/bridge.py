"""The bridge: the window's only interface to the engine thread.

Jobs go to the engine thread or get a thread of their own; their changes are applied on the window's
thread. Tokens do not pass through here: views read them from the trace store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from PySide6.QtCore import QObject, Qt, Signal

from app.engine_thread.events import State
from app.engine_thread.opening import LocalEngine
from app.engine_thread.serving import ServerEngine
from app.engine_thread.status import EngineStatus
from app.engine_thread.worker import Change, DecodingJob, EngineJob, EngineWorker, SideJob
from engine.analysis.breaks import BreakRule
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.machine.device import DeviceMemory

CLOSE_TIMEOUT = 5.0
"""Longest wait of closing for the current round or tensor, seconds."""

AnyJob = TypeVar("AnyJob", bound=EngineJob | SideJob)


class Bridge(EngineStatus):
    """Accepts jobs and has them done. Used on the window's thread only."""

    _posted = Signal(object)  # Change

    def __init__(
        self,
        engine: LocalEngine | None = None,
        parent: QObject | None = None,
        servers: ServerEngine | None = None,
    ) -> None:
        super().__init__(parent)
        self._closed = False
        self._job: EngineJob | None = None
        """The latest job."""
        self._next: EngineJob | None = None
        """The job that starts when the current audit has ended."""
        self._run: DecodingJob | None = None
        self._side: list[SideJob] = []
        # queued even from this thread, so that handlers never run inside a request
        self._posted.connect(self._receive, Qt.ConnectionType.QueuedConnection)
        self._worker = EngineWorker(self._post, engine or LocalEngine(), servers or ServerEngine())

    def ask(self, job: AnyJob, then: Callable[[AnyJob], object] | None = None) -> bool:
        """Start a job; `then` is called with it when it has ended, unless it decodes. Returns
        False if the job is impossible in the present state; the corresponding actions are disabled
        then."""
        if not job.may_start(self):
            return False
        job.then = then
        if isinstance(job, EngineJob) and job.replaces:
            self._give_up()
        elif isinstance(job, EngineJob) and job.needs_rest and self.state is State.AUDITING:
            self._end_decoding()
            self._next = job
            return True
        job.on_ask(self)
        if isinstance(job, SideJob):
            self._side = [one for one in self._side if not one.join(0)] + [job]
            job.start(lambda ended: self._post(ended.finish), job.progress(self._post))
            return True
        self._job = job
        if isinstance(job, DecodingJob):
            self._run = job
        self._worker.ask(job)
        return True

    def cancel(self) -> None:
        """Cancel the job shown in the status line: loading, writing or reading a trace."""
        if self._job is not None:
            self._job.cancelled.set()
        for job in self._side:
            if job.has_progress:
                job.cancelled.set()

    # -- the run in hand -------------------------------------------------------------------

    def resume(self, rounds: int | None = None) -> None:
        """Continue the paused run; with `rounds`, pause it again after that many rounds."""
        if self.state is State.PAUSED and self._run is not None:
            self._run.rounds = rounds
            self._run.pause.clear()
            self.set_state(State.RUNNING)
            self._worker.advance()

    def pause(self) -> None:
        if self._run is not None:
            self._run.pause.set()
            self.pause_asked.emit()

    @property
    def pausing(self) -> bool:
        """Whether the run pauses after the current round."""
        return self.state is State.RUNNING and self._run is not None and self._run.pause.is_set()

    def stop(self) -> None:
        self._end_decoding()
        self._worker.end_questions()
        if self.state is State.PAUSED:
            self._worker.finish()

    def end_run(self, timeout: float = CLOSE_TIMEOUT) -> bool:
        """End the run and wait for its end; False on timeout."""
        if self._run is not None:
            self._run.stop.set()
        ending = self._worker.finish()
        return ending is None or bool(futures.wait([ending], timeout).done)

    def cancel_sequence(self, run: RunRef, seq_id: int) -> None:
        """End one sequence of the current run before the next round; the others continue."""
        if self.has_run and run == self.live:
            self._worker.cancel_sequence(seq_id)

    def set_break_rules(self, rules: Sequence[BreakRule]) -> None:
        """Pause the run after any round in which one of these rules matches."""
        self._worker.set_break_rules(tuple(rules))

    def settle(self, state: State, memory: DeviceMemory | None = None) -> None:
        super().settle(state, memory)
        if state is State.READY and self._next is not None:
            job, self._next = self._next, None
            self.ask(job, job.then)
        if state is State.PAUSED and self._run is not None and self._run.stop.is_set():
            self._worker.finish()  # a stop was requested while the pause was pending

    # -- the end ---------------------------------------------------------------------------

    def let_go_of_rows(self, store: TraceStore, folder: Path) -> None:
        """Keep the rows of a trace on disk only; its model starts a new trace when it runs
        again."""
        self._worker.drop(store)
        super().let_go_of_rows(store, folder)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> bool:
        """End all threads, an export only on timeout; False if the engine did not stop in time. It
        may be called again."""
        self._closed = True
        self._give_up()
        for job in self._side:
            if job.has_progress and not job.is_awaited:
                job.cancelled.set()
        for job in self._side:
            if not job.join(timeout):
                job.cancelled.set()
                job.join(timeout)
        return self._worker.close(timeout)

    def _give_up(self) -> None:
        if self._job is not None:
            self._job.cancelled.set()
        self._end_decoding()

    def _end_decoding(self) -> None:
        self._next = None
        if self._run is not None:
            self._run.stop.set()

    def _post(self, change: Change) -> None:
        """Called from any thread, which may outlive the window."""
        if not self._closed:
            self._posted.emit(change)

    def _receive(self, change: Change) -> None:
        if not self._closed:
            change(self)
