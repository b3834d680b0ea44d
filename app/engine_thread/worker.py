"""The engine's thread: it owns the session and the run, and nothing in it touches Qt.

Commands run one after another on a single thread. Tokens go out through the trace store;
everything else goes out as events, through one `post` function. Whatever a command raises ends in
one place: the run in hand is closed with its error, the window is told, and the next command is
served.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from app.engine_thread.events import (
    BreakRuleHeld,
    Disconnected,
    Event,
    FidelityMeasured,
    FilesInspected,
    ModelLoaded,
    OpenedFiles,
    Post,
    RescoreUnsure,
    RunEnded,
    RunStarted,
    ServerConnected,
    State,
    StateChanged,
    failure,
    throttled,
)
from app.engine_thread.jobs import (
    CompareRequest,
    Engine,
    EngineSession,
    Job,
    OpenRequest,
    RescoreRequest,
    RunFlags,
    RunRequest,
    ScriptRequest,
    ServerRunRequest,
    Servers,
    ServerSession,
    TurnRequest,
)
from app.trace_models.run_notes import STARTED
from engine.analysis.audit_text import audit_goes_on
from engine.analysis.breaks import BreakRule, BreakWatch
from engine.errors import Cancelled, DraftscopeError
from engine.trace.run_ref import RunRef, same_model
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter

if TYPE_CHECKING:
    from engine.compare.fidelity import Fidelity
    from engine.observe.rounds.observed_run import ServerFacts

FULL_TRACE_BYTES = 64 << 20
"""A trace that takes as much memory takes no further run."""


@dataclass
class _JobInHand:
    """The run in hand. A job that fails while it begins may have begun runs already: all from
    `first` on are its own."""

    store: TraceStore
    first: int
    job: Job | None = None
    run: RunRef | None = None

    def close(self, error: str) -> None:
        """Give its runs an end where the engine gave them none; `error` if one ended them."""
        for run_id in range(self.first, len(self.store.runs)):
            run = TraceWriter(self.store, run_id)
            if error:
                run.fail(error)
            else:
                run.end(["stopped"])


# A forward pass runs beside the window's Python, and this thread asks for its turn at the end of
# each: Python's 5 ms until the window has to give way are several rounds of a small model, and half
# a millisecond still is a part of one.
_SWITCH_S = 0.00002

_SHOWN_S = 0.1
"""How long a run waits at most until the window has brought it on show. Both are Python: what the
window does meanwhile would be in the times of the prompt and of the first rounds."""


class EngineWorker:
    """One thread for an engine. Public methods are for the window's side and return at once."""

    def __init__(self, post: Post, engine: Engine, servers: Servers) -> None:
        sys.setswitchinterval(_SWITCH_S)
        self._post_out, self._engine, self._servers = post, engine, servers
        self._closed = threading.Event()
        self._session: EngineSession | None = None
        self._server: ServerSession | None = None
        """The session in use, if it is a server."""
        self._files: OpenedFiles | None = None
        """Those of the session in use."""
        self._inspected: OpenedFiles | None = None
        """Those looked at last."""
        self._stores: list[tuple[dict[str, Any], TraceStore]] = []
        """A trace for every model that was opened, by the model's identity."""
        self._store = TraceStore()
        self._going: _JobInHand | None = None
        self._fidelity: Fidelity | None = None
        self._break_rules: tuple[BreakRule, ...] = ()
        self._watch = BreakWatch(self._store)
        self._to_cancel: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._executor = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._ending: futures.Future[None] | None = None

    def open(self, request: OpenRequest) -> None:
        """Inspect, then load; the session in use stays until the new one is complete."""
        self._submit(lambda: self._open(request))

    def connect(self, request: ServerRunRequest) -> None:
        """Use a server from then on; the session in use stays until the server answers."""
        self._submit(lambda: self._connect(request))

    def disconnect(self) -> None:
        """Let go of the server in use."""
        self._submit(self._disconnect)

    def watch(self, listen: str, flags: RunFlags) -> None:
        """Record what other programs ask of the server in use through host:port, as a run."""

        def begin(session: EngineSession) -> Job:
            assert self._server is session
            return self._server.watch(listen, self._store)

        self._submit(lambda: self._start(begin, flags, None))

    def rescore(self, request: RescoreRequest) -> None:
        """Let a model judge the tokens of a run."""
        self._submit(lambda: self._rescore(request))

    def start(self, request: RunRequest, flags: RunFlags, rounds: int | None) -> None:
        """Begin a run and advance it by `rounds` (None = until it ends or is told to pause)."""

        def begin(session: EngineSession) -> Job:
            run = session.start(request, self._store)
            facts = self._store.runs[run.run_id]
            if self._fidelity is not None:
                facts.update(fidelity=asdict(self._fidelity))
            if request.chat is not None:
                facts.chat = json.dumps(request.chat.kwargs)
            return run

        self._submit(lambda: self._start(begin, flags, rounds))

    def say(self, request: TurnRequest, flags: RunFlags) -> None:
        """Begin a turn of a conversation, which is a run of its own."""

        def begin(session: EngineSession) -> Job:
            turn = session.say(request, self._store)
            if self._fidelity is not None:
                self._store.runs[turn.run_id].update(fidelity=asdict(self._fidelity))
            return turn

        self._submit(lambda: self._start(begin, flags, None))

    def compare(
        self, request: CompareRequest | ScriptRequest, flags: RunFlags, rounds: int | None
    ) -> None:
        """Begin a comparison of lanes; it is advanced, paused and ended like a run."""
        self._submit(
            lambda: self._start(
                lambda session: session.compare(request, self._store), flags, rounds
            )
        )

    def measure(self, text: str, cancelled: threading.Event) -> None:
        """Measure the session's compute mode against f32, on its own continuation of a text."""
        self._submit(lambda: self._measure(text, cancelled))

    def advance(self, flags: RunFlags, rounds: int | None) -> None:
        """Go on with a paused run."""
        self._submit(lambda: self._advance(flags, rounds))

    def set_break_rules(self, rules: tuple[BreakRule, ...]) -> None:
        """Replace the rules at which a run pauses, from its next round on."""
        self._break_rules = rules

    def cancel_sequence(self, seq_id: int) -> None:
        """End one sequence of the run before the next round."""
        self._to_cancel.put(seq_id)
        self._submit(self._cancel_sequences)  # for a run that is paused

    def drop(self, store: TraceStore) -> None:
        """Forget the trace of a model that is not in use: opened again, it begins a new one."""

        def forget() -> None:
            self._stores = [kept for kept in self._stores if kept[1] is not store]

        self._submit(forget)

    def end_questions(self) -> None:
        """Have the server's answers waited for no longer."""
        server = self._server
        if server is not None:
            server.end_questions()

    def finish(self) -> futures.Future[None] | None:
        """End a paused run; what is returned is done when no run is in hand any more."""
        return self._submit(self._finish)

    def close(self, timeout: float) -> bool:
        """End the thread after the command in hand; False if it did not end in `timeout` seconds.

        The caller sets the flags that make the command in hand give up. No event is posted
        from here on.
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

    def _submit(self, command: Callable[[], State | None]) -> futures.Future[None] | None:
        return None if self._closed.is_set() else self._executor.submit(self._serve, command)

    def _serve(self, command: Callable[[], State | None]) -> None:
        """Run a command and tell the state that it leaves the engine in, if it is another."""
        if self._closed.is_set():
            return
        state = None
        try:
            state = command()
        except BaseException as error:  # nobody waits for what a thread raises
            state = self._rest()
            self._end_run(error)
        finally:
            if state is not None:
                self._post(StateChanged(state))

    def _post(self, event: Event) -> None:
        if not self._closed.is_set():
            self._post_out(event)

    def _rest(self) -> State:
        if self._session is not None:
            return State.READY
        return State.EMPTY if self._inspected is None else State.INSPECTED

    def _open(self, request: OpenRequest) -> State:
        self._end_run()
        found = self._engine.inspect(request)  # if that fails, everything is as it was
        before, self._inspected = self._inspected, found
        try:
            self._post(FilesInspected(found))
            self._post(StateChanged(State.LOADING))
            session = self._engine.open(request, throttled(self._post))
        except BaseException:
            if self._session is not None:
                self._inspected = before
                self._post(FilesInspected(self._files))  # what is in use
            raise
        replaced, self._session, self._server = self._session, session, None
        self._files, self._fidelity = found, None
        self._store = self._store_of(found.identity)
        self._post(ModelLoaded(found, request.compute, session.compute, request.mmap, self._store))
        if replaced is not None:
            replaced.close()
        return State.READY

    def _connect(self, request: ServerRunRequest) -> State:
        self._end_run()
        self._post(StateChanged(State.LOADING))
        session = self._servers.connect(request, throttled(self._post), self._post)
        replaced, self._session, self._server = self._session, session, session
        self._files = self._inspected = self._fidelity = None
        self._store = self._store_of(identity_of(session.facts))
        self._post(FilesInspected(None))
        self._post(ServerConnected(session.facts, session.key_kept, self._store))
        if replaced is not None:
            replaced.close()
        return State.READY

    def _disconnect(self) -> State:
        self._end_run()
        server, self._server = self._server, None
        if server is not None:
            self._session = None
            self._store = TraceStore()
            self._post(Disconnected())
            server.close()
        return self._rest()

    def _rescore(self, request: RescoreRequest) -> State:
        self._end_run()
        self._post(StateChanged(State.LOADING))
        found = self._engine.rescore(request, self._session, throttled(self._post))
        if isinstance(found, str):
            self._post(RescoreUnsure(request.run, request.target, found))
        else:
            self._post(found)
        return self._rest()

    def _store_of(self, identity: dict[str, Any]) -> TraceStore:
        """The trace that takes the runs of a model: the one it had when it was opened before."""
        for known, store in self._stores:
            if same_model(known, identity):
                return store
        self._stores.append((identity, TraceStore()))
        return self._stores[-1][1]

    def _store_with_room(self) -> TraceStore:
        """The trace that takes the next run: a new one where the one in use is full, so that the
        rows of old runs can be kept on disk."""
        full = self._store
        if full.n_bytes() >= FULL_TRACE_BYTES:
            self._store = TraceStore()
            self._stores = [
                (known, self._store if store is full else store) for known, store in self._stores
            ]
        return self._store

    def _measure(self, text: str, cancelled: threading.Event) -> State:
        self._end_run()
        session = self._session
        if session is not None:
            self._fidelity = session.measure(text, throttled(self._post), cancelled.is_set)
            for facts in self._store.runs.values():
                if facts.compute == session.compute:
                    facts.update(fidelity=asdict(self._fidelity))
            self._post(FidelityMeasured(self._fidelity))
        return self._rest()

    def _start(
        self, begin: Callable[[EngineSession], Job], flags: RunFlags, rounds: int | None
    ) -> State | None:
        self._end_run()
        if self._session is None:
            return self._rest()
        store = self._store_with_room()
        self._watch = BreakWatch(store)
        going = self._going = _JobInHand(store, len(store.runs))
        try:
            going.job = begin(self._session)
        finally:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            for run_id in range(going.first, len(store.runs)):
                TraceWriter(store, run_id).set_facts(**{STARTED: now})
        going.run = RunRef(store, going.job.run_id)
        self._post(RunStarted(going.run))
        flags.shown.wait(_SHOWN_S)
        return self._advance(flags, rounds)

    def _advance(self, flags: RunFlags, rounds: int | None) -> State | None:
        going = self._going
        job = None if going is None else going.job
        if going is None or job is None:
            return self._rest()
        done, is_audited = 0, False
        while not flags.stop.is_set():
            was_audited = is_audited
            is_audited = going.run is not None and audit_goes_on(going.run.facts)
            if is_audited and not was_audited:
                self._post(StateChanged(State.AUDITING))
            if flags.pause.is_set() or (done == rounds and not is_audited):
                return State.PAUSED
            self._cancel_sequences()
            # whoever counts rounds, or wants to stop behind one, sees every single one
            at_once = rounds is None and not self._break_rules
            more = job.advance() if at_once else job.step()
            hit = self._watch.check(self._break_rules)
            if hit is not None:
                self._post(BreakRuleHeld(hit))
            if not more:
                break
            done += not is_audited
            if hit is not None and not flags.stop.is_set() and self._server is None:
                return State.PAUSED
        return self._finish()

    def _cancel_sequences(self) -> None:
        while not self._to_cancel.empty():
            seq_id = self._to_cancel.get()
            if self._going is not None and self._going.job is not None:
                try:
                    self._going.job.cancel(seq_id)
                except DraftscopeError as error:  # a refusal, not a failure: the run goes on
                    self._post(failure(error))

    def _finish(self) -> State | None:
        if self._going is None:
            return None  # it had ended, and the window may have asked for the next one since
        self._end_run()
        return self._rest()

    def _end_run(self, error: BaseException | None = None) -> None:
        """Take leave of the run in hand, if there is one, whatever its job raises.

        error: what ended the command in hand; it is told, and recorded as the end of the run.
        """
        errors = [] if error is None or isinstance(error, Cancelled) else [error]
        going, self._going = self._going, None
        if going is not None and going.job is not None:
            try:
                going.job.stop()
            except BaseException as another:
                errors.append(another)
        told = [failure(one) for one in errors]
        for failed in told:
            self._post(failed)
        if going is not None:
            going.close(told[0].message if told else "")
            if going.run is not None:
                self._post(RunEnded(going.run))

    def _leave(self) -> None:
        self._end_run()
        session, self._session, self._server = self._session, None, None
        if session is not None:
            session.close()


def identity_of(facts: ServerFacts) -> dict[str, Any]:
    """Stands for a server with its model: runs of one share a trace, as far as can be told."""
    told = facts.models.get("data")
    first = told[0] if isinstance(told, list) and told else None
    meta = first.get("meta") if isinstance(first, dict) else None
    return {"name": facts.address, "sha256": facts.props.get("model_path"), "size": meta}
