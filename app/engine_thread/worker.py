"""Jobs, and the engine thread that does them: it owns session and run, and nothing in it uses Qt.

Jobs run one after another on a single thread. Tokens go out through the trace store; everything
else as changes to the window's status, through one `post` function. Exceptions of a job end in one
place: the current run is closed with its error, the window shows it, and the next job is served.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from app.engine_thread.events import Decoding, OpenedFiles, RunRequest, State, failure, throttled
from app.trace_models.run_notes import STARTED
from engine.analysis.breaks import BreakHit, BreakRule, BreakWatch
from engine.analysis.findings.audit import audit_goes_on
from engine.errors import Cancelled, DraftscopeError
from engine.long_work import ReportProgress
from engine.trace.run_ref import RunRef, same_model
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter

if TYPE_CHECKING:
    from app.engine_thread.opening import LocalEngine, LocalSession
    from app.engine_thread.serving import ServedSession, ServerEngine
    from app.engine_thread.status import EngineStatus

    EngineSession = LocalSession | ServedSession


Change = Callable[["EngineStatus"], object]
Post = Callable[[Change], None]
"""Schedules a change of the status on the window's thread."""


class Job:
    """A request, used once. `run` executes on another thread and stores its results in the job;
    everything else is called on the window's thread."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.then: Callable[[Any], object] | None = None
        """Called with the job after `on_finish`."""

    def may_start(self, status: EngineStatus) -> bool:
        """Whether it is possible in the present state; otherwise it is ignored."""
        return True

    def on_ask(self, status: EngineStatus) -> None:
        """Apply immediate changes when it is requested."""

    def on_finish(self, status: EngineStatus) -> None:
        """Apply its results. Called however it ended: they are None if it failed."""

    def finish(self, status: EngineStatus) -> None:
        """Finish it: `on_finish`, then the caller's `then`."""
        self.on_finish(status)
        if self.then is not None:
            self.then(self)
        status.finished.emit(self)

    def progress(self, post: Post) -> ReportProgress:
        """The progress function for `run`."""
        return throttled(lambda *made: post(lambda status: status.progress.emit(*made)))


class SideJob(Job):
    """A job on its own thread, independent of the engine, such as reading or writing a trace."""

    has_progress = False
    """Whether the window shows its progress, with a way to cancel it."""
    busy = ""
    """The flag of the status that is on meanwhile: only one such job at a time."""
    is_awaited = False
    """Whether closing waits for it, because the user asked for a file."""
    failed: DraftscopeError | None = None
    """The error, if any."""

    def run(self, progress: ReportProgress) -> None:
        """Do it. May raise anything; Cancelled once `cancelled` is set."""
        raise NotImplementedError

    def may_start(self, status: EngineStatus) -> bool:
        return not getattr(status, self.busy, False)

    def on_ask(self, status: EngineStatus) -> None:
        if self.busy:
            setattr(status, self.busy, True)

    def start(
        self, ended: Callable[[SideJob], None], progress: ReportProgress = lambda *_: None
    ) -> None:
        """Start; `ended` is called on the job's thread, however it ends."""
        self._thread = threading.Thread(
            target=self._work, args=(ended, progress), name=type(self).__name__, daemon=True
        )
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the end; False on timeout (seconds)."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self, ended: Callable[[SideJob], None], progress: ReportProgress) -> None:
        try:
            self.run(progress)
        except Cancelled:
            pass
        except BaseException as error:  # a thread's exceptions reach no caller
            self.failed = failure(error)
        ended(self)

    def finish(self, status: EngineStatus) -> None:
        """Report an error first."""
        if self.failed is not None:
            status.failed.emit(self.failed)
        if self.busy:
            setattr(status, self.busy, False)
        super().finish(status)


FULL_TRACE_BYTES = 64 << 20
"""A trace that takes this much memory gets no further run."""

# A forward pass overlaps with the window's Python, and this thread needs the GIL at the end of
# each: Python's default of 5 ms is several rounds of a small model, and half a millisecond still a
# part of one.
_SWITCH_S = 0.00002

_SHOWN_S = 0.1
"""Longest wait of a run until the window has brought it on show; otherwise the window's work would
count in the times of the prompt and the first rounds."""


class EngineJob(Job):
    """A job on the engine thread."""

    replaces = False
    """Whether it cancels the current job and ends the run."""
    needs_rest = False
    """Whether it needs a session without a run; an audit is ended for it."""

    def run(self, worker: EngineWorker) -> State | None:
        """Do it; returns the engine's new state, None if unchanged. May raise anything, which ends
        the current run."""
        raise NotImplementedError


class DecodingJob(EngineJob):
    """A run, a turn or a comparison: it decodes in rounds, and pauses, continues and stops between
    them. rounds: pause after this many, None = never."""

    needs_rest = True
    request: RunRequest | None = None
    """The request of a plain run."""

    def __init__(self, rounds: int | None = None) -> None:
        super().__init__()
        self.rounds = rounds
        self.pause, self.stop = threading.Event(), threading.Event()
        self.shown = threading.Event()
        """Set once the run is on show; the first round waits for it briefly."""
        self.decoding: Decoding | None = None
        self._store: TraceStore | None = None
        self._first = 0
        """If it fails at the start, runs may exist already: all from here on are its own."""
        self.ref: RunRef | None = None
        """Its run; for a comparison, the reference lane."""

    def may_start(self, status: EngineStatus) -> bool:
        return status.can_start

    def on_ask(self, status: EngineStatus) -> None:
        status.set_state(State.RUNNING)

    def run(self, worker: EngineWorker) -> State | None:
        return worker.decode(self)

    def again(self) -> DecodingJob | None:
        """A job that repeats it, None if impossible."""
        return None

    def begin(self, worker: EngineWorker, session: EngineSession) -> Decoding:
        """Start it as one or more runs in the worker's trace."""
        raise NotImplementedError

    def begin_in(self, store: TraceStore, worker: EngineWorker, session: EngineSession) -> RunRef:
        """`begin`, noting the time in all its runs."""
        self._store, self._first = store, len(store.runs)
        try:
            self.decoding = self.begin(worker, session)
        finally:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            for run_id in range(self._first, len(store.runs)):
                TraceWriter(store, run_id).set_facts(**{STARTED: now})
        self.ref = RunRef(store, self.decoding.run_id)
        return self.ref

    def on_start(self, status: EngineStatus) -> None:
        """Bring its run on show."""
        assert self.ref is not None
        status.begin_run(self.ref, self.request, self.again(), self.shown.set)

    def on_finish(self, status: EngineStatus) -> None:
        if self.ref is not None:
            status.run_ended.emit(self.ref)

    def close(self, error: str) -> None:
        """End its runs if the engine has not; `error`: what ended them, if anything."""
        if self._store is None:
            return
        for run_id in range(self._first, len(self._store.runs)):
            run = TraceWriter(self._store, run_id)
            if error:
                run.fail(error)
            else:
                run.end(["stopped"])


class EngineWorker:
    """One thread for an engine. Public methods down to `close` are called on the window's thread
    and, except `close`, return at once; the others are called by jobs, on the engine thread."""

    def __init__(self, post: Post, engine: LocalEngine, servers: ServerEngine) -> None:
        sys.setswitchinterval(_SWITCH_S)
        self._post_out, self.engine, self.servers = post, engine, servers
        self._closed = threading.Event()
        self.session: EngineSession | None = None
        """The current session."""
        self.server: ServedSession | None = None
        """The current session, if it is a server."""
        self.files: OpenedFiles | None = None
        """Files of the current session."""
        self.inspected: OpenedFiles | None = None
        """The files inspected last."""
        self.more_facts: dict[str, Any] = {}
        """Measurements of the current session, added to the facts of runs and turns."""
        self.store = TraceStore()
        """The trace for runs of the current session."""
        self._stores: list[tuple[dict[str, Any], TraceStore]] = []
        """A trace for every opened model or server, by its identity."""
        self._going: DecodingJob | None = None
        self._break_rules: tuple[BreakRule, ...] = ()
        self._watch = BreakWatch(self.store)
        self._to_cancel: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._executor = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._ending: futures.Future[None] | None = None

    def ask(self, job: EngineJob) -> None:
        ended = None if isinstance(job, DecodingJob) else job.finish
        self._submit(lambda: job.run(self), ended)

    def advance(self) -> None:
        self._submit(self._advance)

    def set_break_rules(self, rules: tuple[BreakRule, ...]) -> None:
        """Replace the break rules, from the next round on."""
        self._break_rules = rules

    def cancel_sequence(self, seq_id: int) -> None:
        self._to_cancel.put(seq_id)
        self._submit(self._cancel_sequences)  # for a paused run

    def drop(self, store: TraceStore) -> None:
        """Drop the trace of a model that is not in use; opened again, it starts a new one."""

        def forget() -> None:
            self._stores = [kept for kept in self._stores if kept[1] is not store]

        self._submit(forget)

    def end_questions(self) -> None:
        """Abandon pending requests to the server."""
        server = self.server
        if server is not None:
            server.end_questions()

    def finish(self) -> futures.Future[None] | None:
        """End a paused run; the future is done when no run is active."""
        return self._submit(self._finish)

    def close(self, timeout: float) -> bool:
        """End the thread after the current job; False on timeout (seconds).

        The caller sets the flags that cancel the current job. Nothing is posted from here on.
        """
        self._closed.set()
        if self._ending is None:
            self._ending = self._executor.submit(self._leave)
            self._executor.shutdown(wait=False)
        ended, _ = futures.wait([self._ending], timeout)
        if ended:
            self._executor.shutdown()
        return bool(ended)

    # -- on the engine's thread ------------------------------------------------------------

    def _submit(
        self, command: Callable[[], State | None], ended: Change | None = None
    ) -> futures.Future[None] | None:
        if self._closed.is_set():
            return None
        return self._executor.submit(self._serve, command, ended)

    def _serve(self, command: Callable[[], State | None], ended: Change | None) -> None:
        """Run a command and post its changes and the resulting state."""
        if self._closed.is_set():
            return
        state = None
        try:
            state = command()
        except BaseException as error:  # a thread's exceptions reach no caller
            state = self.rest()
            self.end_run(error)
        finally:
            if ended is not None:
                self.post(ended)
            if state is not None:
                self.post_state(state)

    def post(self, change: Change) -> None:
        """Schedule a change on the window's thread, unless the window closes."""
        if not self._closed.is_set():
            self._post_out(change)

    def post_state(self, state: State) -> None:
        """Post the engine's state."""
        memory = self.session.memory if self.session is not None else None
        self.post(lambda status: status.settle(state, memory))

    def rest(self) -> State:
        """The state without a run."""
        if self.session is not None:
            return State.READY
        return State.EMPTY if self.inspected is None else State.INSPECTED

    def use(
        self, session: EngineSession, identity: dict[str, Any], files: OpenedFiles | None
    ) -> None:
        """Replace the current session. identity: of the model, which selects the trace. files: None
        for a server."""
        before, self.session = self.session, session
        self.files = self.inspected = files
        self.server, self.more_facts = None, {}
        self.store = self._store_of(identity)
        if before is not None:
            before.close()

    def _store_of(self, identity: dict[str, Any]) -> TraceStore:
        """The trace for a model's runs: the one from its earlier use, if any."""
        for known, store in self._stores:
            if same_model(known, identity):
                return store
        self._stores.append((identity, TraceStore()))
        return self._stores[-1][1]

    def _store_with_room(self) -> TraceStore:
        """The trace for the next run: a new one if the current one is full, so that old rows can be
        kept on disk."""
        full = self.store
        if full.n_bytes() >= FULL_TRACE_BYTES:
            self.store = TraceStore()
            self._stores = [
                (known, self.store if store is full else store) for known, store in self._stores
            ]
        return self.store

    def decode(self, job: DecodingJob) -> State | None:
        """Start a run and continue until it ends or pauses."""
        self.end_run()
        if self.session is None:
            return self.rest()
        store = self._store_with_room()
        self._watch = BreakWatch(store)
        self._going = job
        job.begin_in(store, self, self.session)
        self.post(job.on_start)
        job.shown.wait(_SHOWN_S)
        return self._advance()

    def _advance(self) -> State | None:
        going = self._going
        decoding = None if going is None else going.decoding
        if going is None or decoding is None:
            return self.rest()
        done, is_audited = 0, False
        while not going.stop.is_set():
            was_audited = is_audited
            is_audited = going.ref is not None and audit_goes_on(going.ref.facts)
            if is_audited and not was_audited:
                self.post_state(State.AUDITING)
            if going.pause.is_set() or (done == going.rounds and not is_audited):
                return State.PAUSED
            self._cancel_sequences()
            # rounds are counted, or stop rules checked, one by one
            at_once = going.rounds is None and not self._break_rules
            more = decoding.advance() if at_once else decoding.step()
            hit = self._watch.check(self._break_rules)
            if hit is not None:
                self.post(partial(_show_break, hit))
            if not more:
                break
            done += not is_audited
            if hit is not None and not going.stop.is_set() and self.server is None:
                return State.PAUSED
        return self._finish()

    def _cancel_sequences(self) -> None:
        while not self._to_cancel.empty():
            seq_id = self._to_cancel.get()
            if self._going is not None and self._going.decoding is not None:
                try:
                    self._going.decoding.cancel(seq_id)
                except DraftscopeError as error:  # a refusal, not a failure: the run continues
                    self._post_failure(error)

    def _post_failure(self, error: BaseException) -> str:
        """Report an error; returns its message."""
        failed = failure(error)
        self.post(lambda status: status.failed.emit(failed))
        return failed.message

    def _finish(self) -> State | None:
        if self._going is None:
            return None  # it had ended, and the window may have requested the next one since
        self.end_run()
        return self.rest()

    def end_run(self, error: BaseException | None = None) -> None:
        """Close the current run, if any, whatever it raises.

        error: what ended the current job; it is shown, and recorded as the end of the run.
        """
        errors = [] if error is None or isinstance(error, Cancelled) else [error]
        going, self._going = self._going, None
        if going is not None and going.decoding is not None:
            try:
                going.decoding.stop()
            except BaseException as another:
                errors.append(another)
        messages = [self._post_failure(one) for one in errors]
        if going is not None:
            going.close(messages[0] if messages else "")
            self.post(going.on_finish)

    def _leave(self) -> None:
        self.end_run()
        session, self.session, self.server = self.session, None, None
        if session is not None:
            session.close()


def _show_break(hit: BreakHit, status: EngineStatus) -> None:
    status.broke.emit(hit)
