"""The engine's thread: it owns the session and the run, and nothing in it touches Qt.

Commands come in through a queue and run one after another. Tokens go out through the trace
store; everything else goes out as the small events below, through one `post` function. torch is
imported here, by the first command that needs it, so that the window is on screen before.
"""

from __future__ import annotations

import enum
import gc
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.compare.lane_spec import LaneSpec
from engine.errors import Cancelled, DraftscopeError
from engine.options import RunOptions
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.model.info import ModelInfo
    from engine.session import Session

log = logging.getLogger("draftscope.worker")

PROGRESS_PERIOD = 0.05
"""Least time between two progress events, seconds."""


class State(enum.Enum):
    """What the engine is doing, as far as the window needs to know."""

    EMPTY = "no model"
    INSPECTED = "not loaded"
    LOADING = "loading"
    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"
    FAILED = "failed"


@dataclass(frozen=True)
class ModelFiles:
    """What is known of the files before (and after) their weights are loaded."""

    target: Path
    draft: Path | None
    info: ModelInfo
    draft_info: ModelInfo | None
    identity: dict[str, Any]


@dataclass(frozen=True)
class StateChanged:
    state: State


@dataclass(frozen=True)
class Inspected:
    """Metadata to show; None takes the model map down again."""

    files: ModelFiles | None


@dataclass(frozen=True)
class Loaded:
    """A complete session is in use.

    mode: the compute mode asked for, compute: the one in effect. store takes the session's runs;
    replaced holds earlier ones that belong to another model, if there are any.
    """

    files: ModelFiles
    mode: str
    compute: str
    store: TraceStore
    replaced: TraceStore | None


@dataclass(frozen=True)
class Progress:
    """Bytes (or rows) done of a total, and what is being done."""

    done: int
    total: int
    phase: str


@dataclass(frozen=True)
class Failed:
    """One sentence each; `detail` is a traceback when the error was not foreseen."""

    message: str
    remedy: str
    detail: str = ""


@dataclass(frozen=True)
class RunStarted:
    """A run, or the reference lane of a comparison; the other lanes are the runs after it."""

    run_id: int


@dataclass(frozen=True)
class RunEnded:
    run_id: int


@dataclass(frozen=True)
class Exported:
    """An export ended; `folder` is None when it was cancelled or failed."""

    folder: Path | None


Event = StateChanged | Inspected | Loaded | Progress | Failed | RunStarted | RunEnded | Exported
Post = Callable[[Event], None]


@dataclass(frozen=True)
class OpenRequest:
    """Files to load, and the way out."""

    target: Path
    draft: Path | None
    compute: str
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class RunControl:
    """Flags that the window sets and the worker reads between rounds."""

    pause: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)


class OpenSession(Protocol):
    """`Session.open`, or a stand-in."""

    def __call__(
        self,
        target: Path,
        draft: Path | None,
        *,
        compute: str,
        progress: Callable[[int, int, str], None],
        cancelled: Callable[[], bool],
    ) -> Session: ...


class Job(Protocol):
    """A run or a comparison: work in rounds that can be paused between them."""

    def step(self) -> bool: ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class CompareRequest:
    """What a comparison is made of: prompts as text, common options, lanes beside the reference.

    draft_accept: right tokens of successive drafts, to draft by script; () = as the options say.
    """

    texts: tuple[str, ...]
    options: RunOptions
    lanes: tuple[LaneSpec, ...]
    draft_accept: tuple[int, ...] = ()


class OpenComparison(Protocol):
    """`open_comparison`, or a stand-in. The reference lane is the first run that it begins."""

    def __call__(self, session: Session, request: CompareRequest, trace: TraceStore) -> Job: ...


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
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def open(self, request: OpenRequest) -> None:
        """Inspect, then load; the session in use stays until the new one is complete."""
        self._commands.put(lambda: self._open(request))

    def start(
        self, texts: list[str], options: RunOptions, control: RunControl, rounds: int | None
    ) -> None:
        """Begin a run and advance it by `rounds` (None = until it ends or is told to pause)."""

        def begin(session: Session) -> tuple[Job, int]:
            prompts = [session.prompt(text) for text in texts]
            run = session.start(prompts, options, self._store)
            return run, run.run_id

        self._commands.put(lambda: self._start(begin, control, rounds))

    def compare(self, request: CompareRequest, control: RunControl, rounds: int | None) -> None:
        """Begin a comparison of lanes; from there on it is a run like any other."""

        def begin(session: Session) -> tuple[Job, int]:
            run_id = len(self._store.runs)
            return self._open_comparison(session, request, self._store), run_id

        self._commands.put(lambda: self._start(begin, control, rounds))

    def advance(self, control: RunControl, rounds: int | None) -> None:
        """Go on with a paused run."""
        self._commands.put(lambda: self._advance(control, rounds))

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
        self._session, self._files = session, found
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

    def _start(
        self,
        begin: Callable[[Session], tuple[Job, int]],
        control: RunControl,
        rounds: int | None,
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
                if not job.step():
                    break
                done += 1
            self._finish()
        except Exception as error:
            self._job = None
            self._post(failure(error))
            self._post(RunEnded(self._run_id))
            self._post(StateChanged(State.FAILED))

    def _finish(self) -> None:
        if self._job is not None:
            self._end_run()
            self._post(StateChanged(State.READY))

    def _end_run(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.stop()
            self._post(RunEnded(self._run_id))


def throttled(post: Post) -> Callable[[int, int, str], None]:
    """A progress function that posts at most every PROGRESS_PERIOD, and always the end."""
    last = 0.0

    def report(done: int, total: int, phase: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_PERIOD or done >= total:
            last = now
            post(Progress(done, total, phase))

    return report


def failure(error: Exception) -> Failed:
    """What to tell the user about an error that ended a piece of work."""
    if isinstance(error, DraftscopeError):
        return Failed(error.message, error.remedy)
    if isinstance(error, MemoryError):
        return Failed("There is not enough memory for this.", "Close other programs and try again.")
    log.error("the engine failed", exc_info=error)
    return Failed(
        f"The engine failed: {type(error).__name__}: {error}.",
        "What was recorded is still there; the log has the details (Help, Copy report).",
    )


def inspect_files(request: OpenRequest) -> ModelFiles:
    """Read the metadata of the files; no tensor data is touched and torch is not imported."""
    from engine.gguf.file import GgufFile
    from engine.model.info import describe

    with GgufFile.open(request.target) as file:
        info, identity = describe(file), file.identity()
    draft_info = None
    if request.draft is not None:
        with GgufFile.open(request.draft) as file:
            draft_info = describe(file)
    return ModelFiles(request.target, request.draft, info, draft_info, identity)


def open_engine(
    target: Path,
    draft: Path | None,
    *,
    compute: str,
    progress: Callable[[int, int, str], None],
    cancelled: Callable[[], bool],
) -> Session:
    """`Session.open`, leaving one core to the window."""
    first = "torch" not in sys.modules
    progress(0, 1, "starting torch")
    import torch

    from engine.session import Session

    if first:
        gc.freeze()  # 170,000 objects that stay: a full collection takes 5 instead of 130 ms
        torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    return Session.open(target, draft, compute=compute, progress=progress, cancelled=cancelled)


def open_comparison(session: Session, request: CompareRequest, trace: TraceStore) -> Job:
    """A Comparison on the prompts, as many side by side as the options allow."""
    from engine.compare.comparison import Comparison

    prompts = [session.prompt(text) for text in request.texts]
    return Comparison(
        session, prompts, request.options, request.lanes, trace,
        draft_accept=request.draft_accept or None,
    )  # fmt: skip
