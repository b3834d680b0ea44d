"""Status of the engine for the window: what is in use, the available runs, and the signals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, QTimer, Signal

from app.engine_thread.events import (
    OpenedFiles,
    OpenRequest,
    RunRequest,
    ServerConnected,
    ServerSeen,
    State,
)
from app.trace_models.run_facts import ModelRuns
from app.trace_models.run_notes import SOURCE
from app.trace_models.server_facts import server_name
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.machine.device import DeviceMemory


class EngineStatus(QObject):
    """Used on the window's thread; jobs change it in `on_ask` and `on_finish`."""

    state_changed = Signal(object)  # State
    inspected = Signal(object)  # OpenedFiles | None
    loaded = Signal(object)  # OpenedFiles
    progress = Signal(object, object, str)  # bytes or rows done, of a total, what is being done
    failed = Signal(object)  # DraftscopeError
    finished = Signal(object)  # Job, however it ended; one that decodes ends with `run_ended`
    run_started = Signal(object)  # RunRef
    run_ended = Signal(object)  # RunRef
    pause_asked = Signal()  # the run pauses after the current round
    broke = Signal(object)  # BreakHit; the run then pauses, or has just ended
    exported = Signal(object)  # ExportTrace, whose folder is complete
    listed_changed = Signal()  # other traces are listed, or rows moved between memory and disk
    rows_read = Signal(object)  # TraceStore, whose rows are in memory again
    trace_shown = Signal(object)  # Path of the trace on show, None when it was closed
    trace_read = Signal(object, object)  # for show_trace: something else came on show
    connected = Signal(object)  # events.ServerConnected
    server_seen = Signal(object)  # events.ServerSeen
    server_waited_for = Signal(str)  # text with counts, empty at its end
    disconnected = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.state = State.EMPTY
        self.recorded: list[ModelRuns] = []
        """The runs of every opened model, the first one first."""
        self.session_store = TraceStore()
        """The trace of the current model."""
        self.live: RunRef | None = None
        """The newest run of the current model; for a comparison, its reference lane."""
        self.trace: TraceStore | None = None
        """The trace on show if it was opened from disk, None for the model's own runs."""
        self.opened: dict[TraceStore, Path] = {}
        """All opened traces that are not closed, including the one on show."""
        self.n_texts = 0
        """Number of pasted texts, which names them."""
        self.closed: tuple[Path, TraceStore] | None = None
        """The trace closed last."""
        self.earlier: list[ModelRuns] = []
        """Runs of earlier sessions."""
        self.files: OpenedFiles | None = None
        """The files shown: loaded, being loaded, or only inspected."""
        self.server: ServerConnected | None = None
        """The server in use."""
        self.server_status = ServerSeen()
        """Its latest status."""
        self.connecting = ""
        """The address being connected to."""
        self.is_opening = False
        """Whether a requested model or server is not in use yet."""
        self.compute = ""
        """Compute mode of the current session, empty without one."""
        self.loaded_as: OpenRequest | None = None
        """The request that the current model was loaded with."""
        self.devices: dict[str, str] = {}
        """CUDA devices, by the values of --device, once torch is imported."""
        self.memory: DeviceMemory | None = None
        """Memory of its device at the last change of state."""
        self.exporting = False
        """Whether a trace is being exported to a folder of the user's choice."""
        self.reading = False
        """Whether a trace, or its rows, are being read."""
        self.reading_results = False
        self.n_shown = 0
        """How often something was brought on show."""
        self._requests: dict[RunRef, RunRequest] = {}
        """Requests of the runs in the current trace."""
        self._again: dict[RunRef, Any] = {}
        """Jobs that repeat runs; for a comparison, under its reference lane."""

    # -- the engine ------------------------------------------------------------------------

    @property
    def can_start(self) -> bool:
        """Whether a session is open and no run, other than an audited one, is active."""
        return self.state in (State.READY, State.AUDITING)

    @property
    def has_run(self) -> bool:
        """Whether a run is active, paused, or audited."""
        return self.state in (State.RUNNING, State.PAUSED, State.AUDITING)

    def set_state(self, state: State) -> None:
        if state is not self.state:
            self.state = state
            self.state_changed.emit(state)

    def settle(self, state: State, memory: DeviceMemory | None = None) -> None:
        self.memory = memory
        if state is not State.LOADING:
            self.connecting, self.is_opening = "", False
        self.set_state(state)

    def show_files(self, files: OpenedFiles | None) -> None:
        """Show metadata of files; None removes the model map."""
        self.files = files
        self.inspected.emit(files)

    def use_model(self, files: OpenedFiles, compute: str, store: TraceStore) -> None:
        """Use a model, in a compute mode, with `store` for its runs."""
        self.let_go_of_server()
        self.files, self.compute = files, compute
        self.use_store(files.target.stem, store)
        self.hide_trace()
        self.loaded.emit(files)

    def use_server(self, server: ServerConnected) -> None:
        self.let_go_of_server()
        self.files, self.compute = None, ""
        self.server = server
        self.use_store(server_name(server.facts), server.store)
        self.hide_trace()
        self.connected.emit(server)

    def see_server(self, seen: ServerSeen) -> None:
        if self.server is not None:
            self.server_status = seen
            self.server_seen.emit(seen)

    def let_go_of_server(self) -> None:
        if self.server is not None:
            self.server, self.server_status = None, ServerSeen()
            self.recorded = [replace(runs, in_use=False) for runs in self.recorded]
            self.disconnected.emit()

    def use_store(self, name: str, store: TraceStore) -> None:
        """Record into this trace from now on; its newest run becomes the live one."""
        if all(runs.store is not store for runs in self.recorded):
            self.recorded.append(ModelRuns(name, store))
            store.more_facts |= {SOURCE: name}
        self.recorded = [replace(runs, in_use=runs.store is store) for runs in self.recorded]
        if store is not self.session_store:
            self._requests.clear()
            self._again.clear()
            self.session_store = store
            self.live = RunRef(store, len(store.runs) - 1) if store.runs else None

    def begin_run(
        self, run: RunRef, request: RunRequest | None, again: Any, shown: Callable[[], object]
    ) -> None:
        """A run has started. request: None for turns and lanes. again: a job that repeats it, None
        if impossible; the run itself holds everything it decoded with. shown: called once the
        window has painted it."""
        if run.store is not self.session_store:  # the previous one was full
            name = next(runs.model for runs in self.recorded if runs.in_use)
            self.use_store(name, run.store)
            self.listed_changed.emit()
        self.live = run
        if request is not None:
            self._requests[run] = request
        if again is not None:
            self._again[run] = again
        self.hide_trace()
        self.run_started.emit(run)
        QTimer.singleShot(0, self, shown)  # after the painting

    def request_of(self, run: RunRef) -> RunRequest | None:
        """The request of a run of the current model, None for any other and for lanes."""
        return self._requests.get(run) if run.store is self.session_store else None

    def again(self, run: RunRef) -> Any:
        """A job that repeats a run or comparison of the current session, else None."""
        found = self._again.get(run) if run.store is self.session_store else None
        return None if found is None else found.again()

    # -- traces ----------------------------------------------------------------------------

    @property
    def store(self) -> TraceStore:
        """The trace opened from disk, else the current model's."""
        return self.session_store if self.trace is None else self.trace

    @property
    def run(self) -> RunRef | None:
        """The newest run of `store`."""
        if self.trace is None:
            return self.live
        runs = self.trace.runs
        return RunRef(self.trace, len(runs) - 1) if runs else None

    @property
    def trace_folder(self) -> Path | None:
        """The folder of the trace on show, None for the model's own runs."""
        return None if self.trace is None else self.opened[self.trace]

    def show_trace(self, folder: Path, store: TraceStore) -> None:
        """Show a trace read from a folder, or made from another engine's file, replacing an earlier
        one from there."""
        self.opened = {one: at for one, at in self.opened.items() if at != folder or one is store}
        self.opened[store], self.trace = folder, store
        self.trace_shown.emit(folder)

    def hide_trace(self) -> None:
        """Show the session's runs again; the trace stays available."""
        self.n_shown += 1
        if self.trace is not None:
            self.trace = None
            self.trace_shown.emit(None)

    def close_trace(self) -> None:
        """Show the session's runs again, and drop the trace on show."""
        if self.trace is not None:
            self.closed = self.opened.pop(self.trace), self.trace
        self.hide_trace()

    def reopen_trace(self) -> None:
        """Show the trace closed last."""
        if self.closed is not None:
            closed, self.closed = self.closed, None
            self.n_shown += 1
            self.show_trace(*closed)

    def opened_from(self, store: TraceStore) -> Path | None:
        """The source of an opened trace, None for one of the session."""
        return self.opened.get(store)

    @property
    def listed(self) -> list[ModelRuns]:
        """All available runs: of earlier sessions, of this one, and of opened traces."""
        opened = [ModelRuns(folder.name, store) for store, folder in self.opened.items()]
        return [*self.earlier, *self.recorded, *opened]

    def add_earlier(self, runs: ModelRuns) -> None:
        """Add the runs of an earlier session, whose rows are on disk."""
        self.earlier.append(runs)
        self.listed_changed.emit()

    def take_rows(self, store: TraceStore, rows: TraceStore) -> None:
        """Bring the rows of a trace back into memory."""
        store.take_rows(rows)
        self.listed_changed.emit()
        self.rows_read.emit(store)

    def let_go_of_rows(self, store: TraceStore, folder: Path) -> None:
        """Keep the rows of a trace only in the folder that holds all of them."""
        assert store is not self.session_store
        store.let_go_of_rows(folder)
        self.listed_changed.emit()
