"""The only door between the window and the engine.

Requests go to the engine's thread, its events come back as signals on the window's thread.
Tokens do not pass through here: the views read them from the trace store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QObject, Qt, Signal

from app.engine_thread import events, opening
from app.engine_thread.events import ModelFiles, State
from app.engine_thread.jobs import (
    ChatWrap,
    CompareRequest,
    OpenComparison,
    OpenRequest,
    OpenSession,
    RunControl,
    RunRequest,
    ScriptRequest,
)
from app.engine_thread.trace_jobs import TraceJob, TraceRead, start_export, start_reading
from app.engine_thread.worker import EngineWorker
from engine.options import RunOptions
from engine.trace.breaks import BreakRule
from engine.trace.store import TraceStore

CLOSE_TIMEOUT = 5.0
"""How long closing waits for the round or the tensor in hand, seconds."""


class Bridge(QObject):
    """Commands as methods, outcomes as signals. All of it belongs to the window's thread.

    A request that makes no sense in the present state is ignored: the actions that lead here
    are disabled then.
    """

    state_changed = Signal(object)  # State
    inspected = Signal(object)  # ModelFiles | None
    loaded = Signal(object)  # events.Loaded
    progress = Signal(object)  # events.Progress
    failed = Signal(object)  # events.Failed
    run_started = Signal(int)
    run_ended = Signal(int)
    broke = Signal(object)  # BreakHit; the run then pauses, or has just ended
    measured = Signal(object)  # Fidelity
    exported = Signal(object)  # Path
    export_ended = Signal()
    trace_shown = Signal(object)  # Path of the trace on show, None when it was closed
    reading_ended = Signal()

    _posted = Signal(object)

    def __init__(
        self,
        parent: QObject | None = None,
        *,
        open_session: OpenSession = opening.open_engine,
        inspect: Callable[[OpenRequest], ModelFiles] = opening.inspect_files,
        compare: OpenComparison = opening.open_comparison,
    ) -> None:
        super().__init__(parent)
        self.state = State.EMPTY
        self.store = TraceStore()
        """The trace on show: the session's, or one that was opened."""
        self.session_store = self.store
        """Where runs are recorded."""
        self.trace_folder: Path | None = None
        """Where the trace on show was opened from, None for the session's."""
        self.files: ModelFiles | None = None
        """The files shown: loaded, being loaded, or only inspected."""
        self.compute = ""
        """Compute mode of the session in use, empty without one."""
        self.compute_asked = "auto"
        """The mode that was asked for when it was loaded."""
        self.run_id: int | None = None
        """The run begun last, in `store`; of a comparison, its reference lane."""
        self._session_run: int | None = None
        self._closed = False
        self._request: OpenRequest | None = None
        self._control = RunControl()
        self._export: TraceJob | None = None
        self._reading: TraceJob | None = None
        # queued even from this thread, so that handlers never run inside a request
        self._posted.connect(self._receive, Qt.ConnectionType.QueuedConnection)
        self._worker = EngineWorker(self._posted.emit, open_session, inspect, compare)

    # -- models ----------------------------------------------------------------------------

    def open(self, target: Path, draft: Path | None = None, compute: str = "auto") -> None:
        """Show the files' metadata, then load them. A load in hand is cancelled, a run ended."""
        self._give_up()
        self._request = OpenRequest(target, draft, compute)
        self._worker.open(self._request)

    def cancel(self) -> None:
        """Give up the load, and the trace that is being written or read."""
        if self._request is not None:
            self._request.cancelled.set()
        for job in (self._export, self._reading):
            if job is not None:
                job.cancel()

    # -- runs ------------------------------------------------------------------------------

    @property
    def can_start(self) -> bool:
        """Whether a session waits for a run."""
        return self.state in (State.READY, State.FAILED) and bool(self.compute)

    def start(
        self,
        texts: Sequence[str],
        options: RunOptions,
        rounds: int | None = None,
        chat: ChatWrap | None = None,
    ) -> None:
        """Begin a run, one sequence for each text; with `rounds`, pause after so many."""
        if self.can_start:
            self._control = RunControl()
            self._set_state(State.RUNNING)
            request = RunRequest(tuple(texts), options, chat)
            self._worker.start(request, self._control, rounds)

    def compare(self, request: CompareRequest | ScriptRequest, rounds: int | None = None) -> None:
        """Begin a comparison of lanes; it pauses, goes on and stops like a run."""
        if self.can_start:
            self._control = RunControl()
            self._set_state(State.RUNNING)
            self._worker.compare(request, self._control, rounds)

    def measure(self, text: str) -> None:
        """Measure the compute mode in use against f32; `measured` tells, `cancel` gives up."""
        if self.can_start and self.files is not None:
            self._request = OpenRequest(self.files.target, None, "f32")
            self._set_state(State.LOADING)
            self._worker.measure(self._request, text)

    def resume(self, rounds: int | None = None) -> None:
        """Go on with the paused run; with `rounds`, pause again after so many."""
        if self.state is State.PAUSED:
            self._control = RunControl()
            self._set_state(State.RUNNING)
            self._worker.advance(self._control, rounds)

    def pause(self) -> None:
        """Pause before the next round."""
        self._control.pause.set()

    def stop(self) -> None:
        """End the run before the next round."""
        self._control.stop.set()
        if self.state is State.PAUSED:
            self._worker.finish()

    def cancel_sequence(self, seq_id: int) -> None:
        """End one sequence of the run before the next round; the others go on."""
        if self.state in (State.RUNNING, State.PAUSED):
            self._worker.cancel_sequence(seq_id)

    def set_break_rules(self, rules: Sequence[BreakRule]) -> None:
        """Pause before the round after one of these holds."""
        self._worker.set_break_rules(tuple(rules))

    # -- the trace -------------------------------------------------------------------------

    @property
    def exporting(self) -> bool:
        return self._export is not None

    def export(self, store: TraceStore, folder: Path, *, excel_safe: bool = False) -> None:
        """Write the tables as CSV files into a folder, beside whatever else is going on."""
        if self._export is None:
            self._export = start_export(store, folder, excel_safe, self._posted.emit)

    @property
    def reading(self) -> bool:
        return self._reading is not None

    def open_trace(self, folder: Path) -> None:
        """Read an exported trace; it is on show until it is closed, or a run or model comes."""
        if self._reading is None:
            self._reading = start_reading(folder, self._posted.emit)

    def close_trace(self) -> None:
        """Show the session's runs again."""
        if self.trace_folder is not None:
            self._show_session()
            self.trace_shown.emit(None)

    # -- the end ---------------------------------------------------------------------------

    def close(self, timeout: float = CLOSE_TIMEOUT) -> bool:
        """End all threads; False if the engine did not stop in time. It may be called again."""
        self._closed = True
        self._give_up()
        self.cancel()
        for job in (self._export, self._reading):
            if job is not None:
                job.join(timeout)
        return self._worker.close(timeout)

    # -- internals -------------------------------------------------------------------------

    def _give_up(self) -> None:
        if self._request is not None:
            self._request.cancelled.set()
        self._control.stop.set()

    def _set_state(self, state: State) -> None:
        if state is not self.state:
            self.state = state
            self.state_changed.emit(state)

    def _receive(self, event: events.Event | TraceRead) -> None:
        if self._closed:
            return
        match event:
            case events.StateChanged(state):
                self._set_state(state)
                if state is State.PAUSED and self._control.stop.is_set():
                    self._worker.finish()  # stop was asked for while the pause was on its way
            case events.Inspected(files):
                self.files = files
                self.inspected.emit(files)
            case events.Loaded():
                self.files = event.files
                self.compute, self.compute_asked = event.compute, event.mode
                if event.store is not self.session_store:
                    self.session_store, self._session_run = event.store, None
                self.close_trace()
                self._show_session()
                self.loaded.emit(event)
            case events.Progress():
                self.progress.emit(event)
            case events.Failed():
                self.failed.emit(event)
            case events.RunStarted(run_id):
                self._session_run = run_id
                self.close_trace()
                self._show_session()
                self.run_started.emit(run_id)
            case events.RunEnded(run_id):
                self.run_ended.emit(run_id)
            case events.Measured(fidelity):
                self.measured.emit(fidelity)
            case events.Broke(hit):
                self.broke.emit(hit)
            case events.Exported(folder):
                self._export = None
                if folder is not None:
                    self.exported.emit(folder)
                self.export_ended.emit()
            case TraceRead(folder, store):
                self._reading = None
                if store is not None:
                    self.store, self.trace_folder = store, folder
                    self.run_id = max(store.runs, default=None)
                    self.trace_shown.emit(folder)
                self.reading_ended.emit()

    def _show_session(self) -> None:
        self.store, self.run_id, self.trace_folder = self.session_store, self._session_run, None
