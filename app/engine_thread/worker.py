"""The engine's thread: it owns the session and the run, and nothing in it touches Qt.

Commands come in through a queue and run one after another. Tokens go out through the trace
store; everything else goes out as the small events below, through one `post` function. torch is
imported here, by the first command that needs it, so that the window is on screen before.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from app.engine_thread.events import (
    Broke,
    Event,
    Inspected,
    Loaded,
    Measured,
    ModelFiles,
    Post,
    RunEnded,
    RunStarted,
    State,
    StateChanged,
    failure,
    throttled,
)
from app.engine_thread.jobs import (
    Advances,
    CompareRequest,
    HasSequences,
    Job,
    OpenComparison,
    OpenRequest,
    OpenSession,
    RunControl,
    RunRequest,
    ScriptRequest,
    make_prompt,
)
from engine.errors import Cancelled, DraftscopeError
from engine.trace.breaks import BreakRule, BreakWatch
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.compare.fidelity import Fidelity
    from engine.session import Session


class EngineWorker:
    """One thread, started at once. Public methods are for the window's side."""

    def __init__(
        self,
        post: Post,
        open_session: OpenSession,
        inspect: Callable[[OpenRequest], ModelFiles],
        compare: OpenComparison,
    ) -> None:
        self._post_out = post
        self._open_session = open_session
        self._inspect = inspect
        self._open_comparison = compare
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._session: Session | None = None
        self._files: ModelFiles | None = None
        self._store = TraceStore()
        self._job: Job | None = None
        self._run_id = -1
        self._fidelity: Fidelity | None = None
        self._break_rules: tuple[BreakRule, ...] = ()
        self._watch = BreakWatch(self._store)
        self._cancelled: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def open(self, request: OpenRequest) -> None:
        """Inspect, then load; the session in use stays until the new one is complete."""
        self._commands.put(lambda: self._open(request))

    def start(self, request: RunRequest, control: RunControl, rounds: int | None) -> None:
        """Begin a run and advance it by `rounds` (None = until it ends or is told to pause)."""

        def begin(session: Session) -> tuple[Job, int]:
            prompts = [make_prompt(session, text, request.chat) for text in request.texts]
            run = session.start(prompts, request.options, self._store)
            if self._fidelity is not None:
                self._store.runs[run.run_id]["fidelity"] = asdict(self._fidelity)
            if request.chat is not None:
                self._store.runs[run.run_id]["chat"] = json.dumps(request.chat.kwargs)
            return run, run.run_id

        self._commands.put(lambda: self._start(begin, control, rounds))

    def compare(
        self, request: CompareRequest | ScriptRequest, control: RunControl, rounds: int | None
    ) -> None:
        """Begin a comparison of lanes; from there on it is a run like any other."""

        def begin(session: Session) -> tuple[Job, int]:
            run_id = len(self._store.runs)
            return self._open_comparison(session, request, self._store), run_id

        self._commands.put(lambda: self._start(begin, control, rounds))

    def measure(self, request: OpenRequest, text: str) -> None:
        """Measure the session's compute mode against f32, on its own continuation of a text."""
        self._commands.put(lambda: self._measure(request, text))

    def advance(self, control: RunControl, rounds: int | None) -> None:
        """Go on with a paused run."""
        self._commands.put(lambda: self._advance(control, rounds))

    def set_break_rules(self, rules: tuple[BreakRule, ...]) -> None:
        """Pause at these conditions from the next round on."""
        self._break_rules = rules

    def cancel_sequence(self, seq_id: int) -> None:
        """End one sequence of the run before the next round."""
        self._cancelled.put(seq_id)
        self._commands.put(self._cancel_sequences)  # for a run that is paused

    def finish(self) -> None:
        """End a paused run."""
        self._commands.put(self._finish)

    def close(self, timeout: float) -> bool:
        """End the thread after the command in hand; False if it did not end in time.

        The caller sets the flags that make the command in hand give up. No event is posted
        from here on.
        """
        self._closed.set()
        self._commands.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- on the worker thread --------------------------------------------------------------

    def _serve(self) -> None:
        while (command := self._commands.get()) is not None:
            if not self._closed.is_set():
                command()
        self._end_run()

    def _post(self, event: Event) -> None:
        if not self._closed.is_set():
            self._post_out(event)

    def _open(self, request: OpenRequest) -> None:
        self._end_run()
        found: ModelFiles | None = None
        try:
            found = self._inspect(request)
            self._post(Inspected(found))
            self._post(StateChanged(State.LOADING))
            session = self._open_session(
                request.target,
                request.draft,
                compute=request.compute,
                progress=throttled(self._post),
                cancelled=request.cancelled.is_set,
            )
        except Cancelled:
            self._keep_old_session(found)
        except Exception as error:
            self._post(failure(error))
            self._keep_old_session(found)
        else:
            self._replace_session(session, found, request.compute)

    def _replace_session(self, session: Session, found: ModelFiles, mode: str) -> None:
        replaced = None
        same_model = self._files is not None and self._files.identity == found.identity
        if not same_model and self._store.runs:
            replaced, self._store = self._store, TraceStore()
        self._session, self._files, self._fidelity = session, found, None
        self._post(Loaded(found, mode, session.compute, self._store, replaced))
        self._post(StateChanged(State.READY))

    def _keep_old_session(self, found: ModelFiles | None) -> None:
        if self._session is not None:
            self._post(Inspected(self._files))
            self._post(StateChanged(State.READY))
        elif found is not None:
            self._post(StateChanged(State.INSPECTED))
        else:
            self._post(Inspected(None))
            self._post(StateChanged(State.EMPTY))

    def _measure(self, request: OpenRequest, text: str) -> None:
        from engine.compare.fidelity import N_TOKENS, greedy_text, measure_fidelity

        self._end_run()
        session = self._session
        if session is None:
            return
        cancelled = request.cancelled.is_set
        try:
            report = throttled(self._post)
            report(0, 1, "writing a text to measure on")
            tokens = greedy_text(session, text, N_TOKENS, cancelled)
            reference = session
            if session.compute != request.compute:
                reference = self._open_session(
                    request.target,
                    None,
                    compute=request.compute,
                    progress=report,
                    cancelled=cancelled,
                )
            report(0, 1, "comparing logits with f32")
            self._fidelity = measure_fidelity(session, reference, tokens)
        except Cancelled:
            pass
        except Exception as error:
            self._post(failure(error))
        else:
            for facts in self._store.runs.values():
                if facts.get("compute") == session.compute:
                    facts["fidelity"] = asdict(self._fidelity)
            self._post(Measured(self._fidelity))
        self._post(StateChanged(State.READY))

    def _start(
        self, begin: Callable[[Session], tuple[Job, int]], control: RunControl, rounds: int | None
    ) -> None:
        self._end_run()
        if self._session is None:
            return
        try:
            self._job, self._run_id = begin(self._session)
        except Exception as error:
            self._post(failure(error))
            self._post(StateChanged(State.FAILED))
            return
        self._watch = BreakWatch(self._store)
        self._post(RunStarted(self._run_id))
        self._advance(control, rounds)

    def _advance(self, control: RunControl, rounds: int | None) -> None:
        job = self._job
        if job is None:
            return
        done = 0
        try:
            while not control.stop.is_set():
                if control.pause.is_set() or done == rounds:
                    self._post(StateChanged(State.PAUSED))
                    return
                self._cancel_sequences()
                # whoever counts rounds, or wants to stop behind one, sees every single one
                at_once = rounds is None and not self._break_rules
                more = job.advance() if at_once and isinstance(job, Advances) else job.step()
                hit = self._watch.check(self._break_rules)
                if hit is not None:
                    self._post(Broke(hit))
                if not more:
                    break
                done += 1
                if hit is not None and not control.stop.is_set():
                    self._post(StateChanged(State.PAUSED))
                    return
            self._finish()
        except Exception as error:
            self._job = None
            self._post(failure(error))
            self._post(RunEnded(self._run_id))
            self._post(StateChanged(State.FAILED))

    def _cancel_sequences(self) -> None:
        while not self._cancelled.empty():
            seq_id = self._cancelled.get()
            if isinstance(self._job, HasSequences):
                try:
                    self._job.cancel(seq_id)
                except DraftscopeError as error:
                    self._post(failure(error))

    def _finish(self) -> None:
        if self._job is not None:
            self._end_run()
            self._post(StateChanged(State.READY))

    def _end_run(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.stop()
            self._post(RunEnded(self._run_id))
