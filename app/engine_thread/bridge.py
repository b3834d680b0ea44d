"""The window's only interface to the engine's thread.

Requests go to the engine's thread, its events come back as signals on the window's thread.
Tokens do not pass through here: the views read them from the trace store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QObject, Qt, QTimer, Signal

from app.engine_thread import events
from app.engine_thread.events import OpenedFiles, State
from app.engine_thread.jobs import (
    ChatWrap,
    CompareRequest,
    Engine,
    OpenRequest,
    RescoreRequest,
    RunFlags,
    RunRequest,
    ScriptRequest,
    ServerRunRequest,
    Servers,
    TurnRequest,
)
from app.engine_thread.opening import LocalEngine
from app.engine_thread.serving import ServerEngine
from app.engine_thread.trace_jobs import (
    ReadingEnded,
    ResultsRead,
    RowsRead,
    SpeedsEstimated,
    TraceJob,
    TraceRead,
    start_estimate,
    start_export,
    start_reading,
    start_reading_results,
    start_report,
    start_triage,
)
from app.engine_thread.worker import EngineWorker
from app.trace_models.run_facts import ModelRuns
from app.trace_models.run_notes import SOURCE
from app.trace_models.server_facts import server_name
from app.trace_models.tune_surface import SurfaceRequest
from engine.analysis.breaks import BreakRule
from engine.options import RunOptions
from engine.trace.run_ref import RunRef
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
    loaded = Signal(object)  # events.ModelLoaded
    progress = Signal(object)  # events.ProgressMade
    failed = Signal(object)  # events.CommandFailed
    run_started = Signal(object)  # RunRef
    run_ended = Signal(object)  # RunRef
    broke = Signal(object)  # BreakHit; the run then pauses, or has just ended
    measured = Signal(object)  # Fidelity
    exported = Signal(object)  # events.TraceExported, with a folder
    export_ended = Signal()
    listed_changed = Signal()  # other traces are listed, or their rows are somewhere else
    rows_read = Signal(object)  # TraceStore, whose rows are in memory again
    trace_shown = Signal(object)  # Path of the trace on show, None when it was closed
    trace_read = Signal(object)  # TraceRead, which may be shown: something else came on show
    reading_ended = Signal()
    connected = Signal(object)  # events.ServerConnected
    server_seen = Signal(object)  # events.ServerSeen
    server_waited_for = Signal(str)  # a sentence that counts, empty at its end
    disconnected = Signal()
    rescored = Signal(object)  # events.RunRescored
    rescore_unsure = Signal(object)  # events.RescoreUnsure
    reported = Signal(object)  # the Path of a report
    triaged = Signal(object)  # events.RunsTriaged
    estimated = Signal(object)  # SpeedsEstimated
    results_read = Signal(object)  # Results | None

    _posted = Signal(object)

    def __init__(
        self,
        engine: Engine | None = None,
        parent: QObject | None = None,
        servers: Servers | None = None,
    ) -> None:
        super().__init__(parent)
        self.state = State.EMPTY
        self.recorded: list[ModelRuns] = []
        """The runs of every model that was opened, the first one first."""
        self.session_store = TraceStore()
        """Where the runs of the model in use are recorded."""
        self.live: RunRef | None = None
        """The run begun last with the model in use; of a comparison, its reference lane."""
        self.trace: TraceRead | None = None
        """The trace on show that was opened from disk, None for the model's own runs."""
        self.opened: list[TraceRead] = []
        """All traces that were opened and not closed, the one on show among them."""
        self.earlier: list[ModelRuns] = []
        """The runs that earlier sessions left."""
        self._on_disk: dict[TraceStore, Path] = {}
        """Traces whose rows are not in memory, and what they are read from."""
        self.files: OpenedFiles | None = None
        """The files shown: loaded, being loaded, or only inspected."""
        self.server: events.ServerConnected | None = None
        """The server in use."""
        self.server_status = events.ServerSeen()
        """How it was when it was looked at last."""
        self.connecting = ""
        """The address that is being connected to."""
        self.is_opening = False
        """Whether a model or server was asked for that is not in use yet."""
        self.compute = ""
        """Compute mode of the session in use, empty without one."""
        self.compute_asked = "auto"
        """The mode that was asked for when it was loaded."""
        self.mmap_asked: bool | None = None
        self._closed = False
        self._cancelled = threading.Event()
        """The way out of the load, or of the measure."""
        self._flags = RunFlags()
        self._next: tuple[Callable[[RunFlags], None], State] | None = None
        """What begins when the audit that goes on has ended, and the state it brings."""
        self._asked: RunRequest | None = None
        self._requests: dict[RunRef, RunRequest] = {}
        """What runs of the trace in use were asked for."""
        self._export: TraceJob | None = None
        self._reading: TraceJob | None = None
        self._beside: list[TraceJob] = []
        """Jobs that only read traces and results."""
        self._reads_results = False
        self._n_shown = self._n_shown_before = 0
        """How often something came on show, by now and when reading began."""
        # queued even from this thread, so that handlers never run inside a request
        self._posted.connect(self._receive, Qt.ConnectionType.QueuedConnection)
        self._worker = EngineWorker(
            self._posted.emit, engine or LocalEngine(), servers or ServerEngine()
        )

    # -- models ----------------------------------------------------------------------------

    def open(
        self,
        target: Path,
        drafts: Sequence[Path] = (),
        compute: str = "auto",
        mmap: bool | None = None,
    ) -> None:
        """Show the files' metadata, then load them. A load in hand is cancelled, a run ended."""
        self._give_up()
        request = OpenRequest(target, tuple(drafts), compute, mmap)
        self._cancelled = request.cancelled
        self.is_opening = True
        self._worker.open(request)

    def connect_server(
        self, address: str, key: str = "", log: Path | None = None, timeout: float | None = None
    ) -> None:
        """Use a server from then on. A load in hand is cancelled, a run ended. timeout: of its
        replies, seconds."""
        self._give_up()
        request = ServerRunRequest(address, key, log, timeout)
        self._cancelled = request.cancelled
        self.connecting = address
        self.is_opening = True
        self._worker.connect(request)

    def disconnect_server(self) -> None:
        """Let go of the server in use; its runs stay."""
        if self.server is not None:
            self._give_up()
            self._worker.disconnect()

    def cancel(self) -> None:
        """Cancel the model's loading, and the writing or reading of a trace."""
        self._cancelled.set()
        for job in (self._export, self._reading):
            if job is not None:
                job.cancel()

    # -- runs ------------------------------------------------------------------------------

    @property
    def can_start(self) -> bool:
        """Whether a session is open and no run goes on in it, but for its audit."""
        return self.state in (State.READY, State.AUDITING)

    @property
    def has_run(self) -> bool:
        """Whether a run goes on, is paused, or is audited."""
        return self.state in (State.RUNNING, State.PAUSED, State.AUDITING)

    def start(
        self,
        texts: Sequence[str],
        options: RunOptions,
        rounds: int | None = None,
        chat: ChatWrap | None = None,
    ) -> None:
        """Begin a run, one sequence for each text; with `rounds`, pause after so many."""
        request = RunRequest(tuple(texts), options, chat)

        def begin(flags: RunFlags) -> None:
            self._asked = request
            self._worker.start(request, flags, rounds)

        self._begin(begin)

    def request_of(self, run: RunRef) -> RunRequest | None:
        """What a run of the model in use was asked for, None for any other and for lanes."""
        return self._requests.get(run) if run.store is self.session_store else None

    def converse(self, request: TurnRequest) -> None:
        """Begin a turn of a conversation; it pauses, goes on and stops like a run."""
        self._begin(lambda flags: self._worker.say(request, flags))

    def compare(self, request: CompareRequest | ScriptRequest, rounds: int | None = None) -> None:
        """Begin a comparison of lanes; it pauses, goes on and stops like a run."""
        self._begin(lambda flags: self._worker.compare(request, flags, rounds))

    def watch(self, listen: str) -> None:
        """Record what other programs ask of the server in use through host:port, until `stop`."""
        if self.server is not None:
            self._begin(lambda flags: self._worker.watch(listen, flags))

    def rescore(self, run: RunRef, target: Path, *, assume_same: bool = False) -> None:
        """Let a model judge the tokens of a run; `rescored` tells, or `rescore_unsure` asks."""
        if self.state is not State.LOADING and not self.has_run:
            request = RescoreRequest(run, target, self.compute_asked, assume_same)
            self._cancelled = request.cancelled
            self._set_state(State.LOADING)
            self._worker.rescore(request)

    def measure(self, text: str) -> None:
        """Measure the compute mode in use against f32; `measured` tells, `cancel` gives up."""

        def begin(_: RunFlags) -> None:
            self._cancelled = threading.Event()
            self._worker.measure(text, self._cancelled)

        self._begin(begin, State.LOADING)

    def resume(self, rounds: int | None = None) -> None:
        """Continue the paused run; with `rounds`, pause it again after that many rounds."""
        if self.state is State.PAUSED:
            self._flags = RunFlags()
            self._set_state(State.RUNNING)
            self._worker.advance(self._flags, rounds)

    def pause(self) -> None:
        """Pause before the next round."""
        self._flags.pause.set()

    def stop(self) -> None:
        """End the run before the next round."""
        self._next = None
        self._flags.stop.set()
        self._worker.end_questions()
        if self.state is State.PAUSED:
            self._worker.finish()

    def end_run(self, timeout: float = CLOSE_TIMEOUT) -> bool:
        """End the run and wait for its end; False if it did not come in time."""
        self._flags.stop.set()
        ending = self._worker.finish()
        return ending is None or bool(futures.wait([ending], timeout).done)

    def cancel_sequence(self, run: RunRef, seq_id: int) -> None:
        """End one sequence of the run that goes on before the next round; the others go on."""
        if self.has_run and run == self.live:
            self._worker.cancel_sequence(seq_id)

    def set_break_rules(self, rules: Sequence[BreakRule]) -> None:
        """Pause the run after any round in which one of these rules holds."""
        self._worker.set_break_rules(tuple(rules))

    # -- the trace -------------------------------------------------------------------------

    @property
    def store(self) -> TraceStore:
        """The trace opened from disk, else that of the model in use."""
        return self.session_store if self.trace is None else self.trace.store

    @property
    def run(self) -> RunRef | None:
        """The run of `store` begun last."""
        if self.trace is None:
            return self.live
        return (
            RunRef(self.trace.store, len(self.trace.store.runs) - 1)
            if self.trace.store.runs
            else None
        )

    @property
    def trace_folder(self) -> Path | None:
        """Where the trace on show was opened from, None for the model's own runs."""
        return None if self.trace is None else self.trace.folder

    @property
    def exporting(self) -> bool:
        return self._export is not None

    def export(self, store: TraceStore, folder: Path, *, excel_safe: bool = False) -> None:
        """Write the tables as CSV files into a folder, beside whatever else is going on."""
        if self._export is None:
            self._export = start_export(store, folder, excel_safe, self._posted.emit)

    def report(
        self,
        runs: Sequence[RunRef],
        path: Path,
        environment: Mapping[str, str],
        overlaid: RunRef | None = None,
    ) -> None:
        """Write the report on a run, on it and the one laid over it, or on the lanes of a
        comparison, beside whatever else is going on; `reported` tells."""
        self._do_beside(start_report(runs, overlaid, path, environment, self._posted.emit))

    @property
    def reading(self) -> bool:
        return self._reading is not None

    def open_trace(self, folder: Path) -> None:
        """Read an exported trace, or a file of another engine; it is on show until a run or model
        comes, and listed until it is closed."""
        if self._reading is None:
            self._n_shown_before = self._n_shown
            self._reading = start_reading(folder, self._posted.emit)

    def show_trace(self, read: TraceRead) -> None:
        """Show a trace that has been read, in place of an earlier one from the same folder."""
        self.opened = [one for one in self.opened if one.folder != read.folder] + [read]
        self.trace = read
        self.trace_shown.emit(read.folder)

    def hide_trace(self) -> None:
        """Show the session's runs again; the trace stays at hand."""
        self._n_shown += 1
        if self.trace is not None:
            self.trace = None
            self.trace_shown.emit(None)

    def close_trace(self) -> None:
        """Show the session's runs again, and forget the trace on show."""
        self.opened = [one for one in self.opened if one is not self.trace]
        self.hide_trace()

    @property
    def listed(self) -> list[ModelRuns]:
        """All runs at hand: those of earlier sessions, of this one, and of opened traces."""
        opened = [ModelRuns(read.folder.name, read.store) for read in self.opened]
        return [
            replace(runs, on_disk=self._on_disk.get(runs.store))
            for runs in (*self.earlier, *self.recorded, *opened)
        ]

    def add_earlier(self, runs: ModelRuns) -> None:
        """List the runs of an earlier session; their rows are on disk."""
        assert runs.on_disk is not None
        self.earlier.append(runs)
        self._on_disk[runs.store] = runs.on_disk
        self.listed_changed.emit()

    def is_in_memory(self, store: TraceStore) -> bool:
        """Whether the rows of a trace are at hand, and not on disk alone."""
        return store not in self._on_disk

    def read_rows(self, store: TraceStore) -> bool:
        """Bring the rows of a trace back into memory; `rows_read` tells. False if another trace is
        being read."""
        if self._reading is not None:
            return False
        self._reading = start_reading(self._on_disk[store], self._posted.emit, into=store)
        return True

    def let_go_of_rows(self, store: TraceStore, folder: Path) -> None:
        """Keep the rows of a trace on disk alone, where they are as a whole. The model that they
        are of begins a new trace when it runs again."""
        assert store is not self.session_store
        self._worker.drop(store)
        self._on_disk[store] = folder
        store.let_go_of_rows()
        self.listed_changed.emit()

    def opened_as(self, store: TraceStore) -> TraceRead | None:
        """What a trace was opened from, None for one of the session."""
        return next((read for read in self.opened if read.store is store), None)

    def triage(self, shown: RunRef, overlaid: RunRef) -> None:
        """Compare two runs that have ended, beside whatever else is going on; `triaged` tells."""
        self._do_beside(start_triage(shown, overlaid, self._posted.emit))

    def estimate(self, request: SurfaceRequest) -> None:
        """Estimate a run's speed under other settings, beside whatever else is going on;
        `estimated` tells."""
        self._do_beside(start_estimate(request, self._posted.emit))

    def open_results(self, path: Path) -> None:
        """Read the results of a sweep or of `draftscope tune`; `results_read` tells."""
        if not self._reads_results:
            self._reads_results = True
            self._do_beside(start_reading_results(path, self._posted.emit))

    def _do_beside(self, job: TraceJob) -> None:
        self._beside = [job for job in self._beside if not job.join(0)] + [job]

    # -- the end ---------------------------------------------------------------------------

    def close(self, timeout: float = CLOSE_TIMEOUT) -> bool:
        """End all threads; False if the engine did not stop in time. It may be called again."""
        self._closed = True
        self._give_up()
        self.cancel()
        for job in (self._export, self._reading, *self._beside):
            if job is not None:
                job.join(timeout)
        return self._worker.close(timeout)

    # -- internals -------------------------------------------------------------------------

    def _begin(self, begin: Callable[[RunFlags], None], state: State = State.RUNNING) -> None:
        """Begin something now, or as soon as the audit that goes on has ended, which is ended for
        it; nothing where none can begin."""
        if self.state is State.AUDITING:
            self._next = begin, state
            self._flags.stop.set()
        elif self.can_start:
            self._flags = RunFlags()
            self._set_state(state)
            begin(self._flags)

    def _give_up(self) -> None:
        self._next = None
        self._cancelled.set()
        self._flags.stop.set()

    def _set_state(self, state: State) -> None:
        if state is not self.state:
            self.state = state
            self.state_changed.emit(state)

    def _receive(
        self,
        event: events.Event | TraceRead | RowsRead | ReadingEnded | SpeedsEstimated | ResultsRead,
    ) -> None:
        if self._closed:
            return
        match event:
            case events.StateChanged(state):
                if state is not State.LOADING:
                    self.connecting, self.is_opening = "", False
                if state not in (State.LOADING, State.RUNNING):
                    self._asked = None  # what was asked for last could not begin
                self._set_state(state)
                if state is State.READY and self._next is not None:
                    following, self._next = self._next, None
                    self._begin(*following)
                if state is State.PAUSED and self._flags.stop.is_set():
                    self._worker.finish()  # stop was asked for while the pause was on its way
            case events.FilesInspected(files):
                self.files = files
                self.inspected.emit(files)
            case events.ModelLoaded():
                self._let_go_of_server()
                self.files = event.files
                self.compute, self.compute_asked = event.compute, event.mode
                self.mmap_asked = event.mmap
                self._use_store(event.files.target.stem, event.store)
                self.hide_trace()
                self.loaded.emit(event)
            case events.ServerConnected():
                self._let_go_of_server()
                self.files, self.compute = None, ""
                self.server = event
                self._use_store(server_name(event.facts), event.store)
                self.hide_trace()
                self.connected.emit(event)
            case events.ServerSeen():
                if self.server is not None:
                    self.server_status = event
                    self.server_seen.emit(event)
            case events.ServerWaitedFor(sentence):
                self.server_waited_for.emit(sentence)
            case events.Disconnected():
                self._let_go_of_server()
                self.recorded = [replace(runs, in_use=False) for runs in self.recorded]
            case events.RunRescored():
                self.rescored.emit(event)
            case events.RunsTriaged():
                self.triaged.emit(event)
            case ResultsRead():
                self._reads_results = False
                self.results_read.emit(event.results)
            case SpeedsEstimated():
                self.estimated.emit(event)
            case events.RescoreUnsure():
                self.rescore_unsure.emit(event)
            case events.ProgressMade():
                self.progress.emit(event)
            case events.CommandFailed():
                self.failed.emit(event)
            case events.RunStarted(run):
                if run.store is not self.session_store:  # the one before was full
                    name = next(runs.model for runs in self.recorded if runs.in_use)
                    self._use_store(name, run.store)
                    self.listed_changed.emit()
                self.live = run
                if self._asked is not None:
                    self._requests[run], self._asked = self._asked, None
                self.hide_trace()
                self.run_started.emit(run)
                QTimer.singleShot(0, self, self._flags.shown.set)  # behind the painting
            case events.RunEnded(run):
                self.run_ended.emit(run)
            case events.FidelityMeasured(fidelity):
                self.measured.emit(fidelity)
            case events.BreakRuleHeld(hit):
                self.broke.emit(hit)
            case events.ReportWritten():
                self.reported.emit(event.path)
            case events.TraceExported():
                self._export = None
                if event.folder is not None:
                    self.exported.emit(event)
                self.export_ended.emit()
            case RowsRead():
                self._on_disk.pop(event.store, None)
                event.store.take_rows(event.rows)
                self.listed_changed.emit()
                self.rows_read.emit(event.store)
            case TraceRead():
                if self._n_shown == self._n_shown_before:
                    self.show_trace(event)
                else:
                    self.trace_read.emit(event)
            case ReadingEnded():
                self._reading = None
                self.reading_ended.emit()

    def _let_go_of_server(self) -> None:
        if self.server is not None:
            self.server, self.server_status = None, events.ServerSeen()
            self.disconnected.emit()

    def _use_store(self, name: str, store: TraceStore) -> None:
        """Record into the trace of what is in use from now on, and know its newest run."""
        if all(runs.store is not store for runs in self.recorded):
            self.recorded.append(ModelRuns(name, store))
            store.more_facts |= {SOURCE: name}
        self.recorded = [replace(runs, in_use=runs.store is store) for runs in self.recorded]
        if store is not self.session_store:
            self._requests.clear()
            self.session_store = store
            self.live = RunRef(store, len(store.runs) - 1) if store.runs else None
