"""Records between the window and the engine's thread: files, servers and failures out; what a
session is asked for in."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.compare.lane_spec import LaneSpec
from engine.errors import DraftscopeError
from engine.fork import Fork
from engine.long_work import ReportProgress
from engine.options import CacheOptions, RunOptions
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.conversation.turns import Message
    from engine.model.drafters.config import DrafterInfo
    from engine.model.info import ModelInfo
    from engine.observe.rounds.observed_run import ServerFacts


log = logging.getLogger("draftscope.worker")

TraceMark = tuple[int, int]
"""Rows of a trace and how many of its runs have ended: it is another when there is more to save."""

PROGRESS_PERIOD = 0.05
"""Least time between two progress events, seconds."""


class State(enum.Enum):
    """What the engine is doing, as far as the window needs to know. LOADING: it takes a model, or
    measures one. AUDITING: a run has all its tokens and is compared with plain decoding, which ends
    for whatever is asked for next."""

    EMPTY = "no model"
    INSPECTED = "not loaded"
    LOADING = "busy"
    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"
    AUDITING = "auditing"


DraftFile = tuple[Path, str, "ModelInfo | DrafterInfo"]
"""A file that drafts for the model, which drafter uses it, and its figures."""


@dataclass(frozen=True)
class OpenedFiles:
    """What the heads of the model files say, known before their weights are loaded."""

    target: Path
    drafts: tuple[DraftFile, ...]
    info: ModelInfo
    identity: dict[str, Any]
    has_chat_template: bool = False


@dataclass(frozen=True)
class ServerConnected:
    """A server in use. key_kept: see `app.engine_thread.serving.ServedSession`. store takes its
    runs; it has those from when the server was in use before."""

    facts: ServerFacts
    key_kept: str
    store: TraceStore


@dataclass(frozen=True)
class ServerSeen:
    """How the server in use is now.

    gone: one sentence once it does not answer any more, or is ANOTHER, else empty. slots: its reply
    to /slots, None where it has none. counters: what its speculative counters have grown by since
    the connection, by the server's names, None where it has none.
    """

    gone: str = ""
    slots: tuple[Mapping[str, Any], ...] | None = None
    counters: Mapping[str, float] | None = None


ANOTHER = "was started again, with another model or other settings."
"""Follows the address of a server."""


def mark_of(store: TraceStore) -> TraceMark:
    """How much a trace holds now: its size (TraceStore.size) and the number of ended runs."""
    return store.size(), sum("stops" in facts for facts in list(store.runs.values()))


def throttled(post: ReportProgress) -> ReportProgress:
    """A progress function that calls another at most every PROGRESS_PERIOD, and always the end."""
    last = 0.0

    def report(done: int, total: int, phase: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_PERIOD or done >= total:
            last = now
            post(done, total, phase)

    return report


def failure(error: BaseException) -> DraftscopeError:
    """What the user reads about an error that ended a piece of work."""
    if isinstance(error, DraftscopeError):
        return DraftscopeError(error.message, error.remedy)  # without what its frames hold
    if isinstance(error, MemoryError):
        return DraftscopeError(
            "There is not enough memory for this.", "Close other programs and try again."
        )
    log.error("the engine failed", exc_info=error)
    return DraftscopeError(
        f"The engine failed: {type(error).__name__}: {error}.",
        "What was recorded is still there; the log has the details (Help, Copy report).",
    )


@dataclass(frozen=True)
class OpenRequest:
    """Files to load, and the way out. mmap: see engine.model.loader.reader_for. options: see
    engine.session.Session.open."""

    target: Path
    drafts: tuple[Path, ...]
    compute: str
    mmap: bool | None = None
    device: str = "auto"
    options: RunOptions | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class RunRequest:
    """The prompts and options of a run: one sequence for each text. fork: where it goes on from
    another run, whose prompts are meant then. of: the run whose prompts are meant else, None = the
    texts. chat: variables of the model's chat template, in which each text is wrapped as a user's
    message; None: it is continued as it is.

    Of a comparison: lanes, next to the reference. draft_accept: right tokens of successive drafts,
    to draft by script; () = as the options say. llama_library: a build of llama.cpp for its lanes,
    None = an installed package."""

    texts: tuple[str, ...]
    options: RunOptions
    chat: dict[str, Any] | None = None
    fork: Fork | None = None
    of: RunRef | None = None
    lanes: tuple[LaneSpec, ...] = ()
    draft_accept: tuple[int, ...] = ()
    llama_library: Path | None = None


@dataclass(frozen=True)
class TurnRequest:
    """A turn of a conversation of the model's trace. conversation: its number, None for a new one;
    parent: the turn that it follows, None for a first one. text: what the user says. before: what
    else was said in this turn, ahead of the text. cache: the first turn with others than the one
    before finds nothing in memory."""

    conversation: int | None
    parent: int | None
    text: str
    options: RunOptions
    chat: dict[str, Any] | None = None
    cache: CacheOptions = field(default_factory=CacheOptions)
    before: tuple[Message, ...] = ()


class Decoding(Protocol):
    """A run or a comparison in progress, which can be paused or ended between two rounds."""

    @property
    def run_id(self) -> int:
        """The run that it writes in the trace; of a comparison, that of the reference lane."""

    def step(self) -> bool:
        """Do one round. False when no round is left."""

    def advance(self) -> bool:
        """Do rounds until the trace is to be looked at again. False when no round is left."""

    def cancel(self, seq_id: int) -> None:
        """End one sequence; the others go on. Raises OptionError where that cannot be."""

    def stop(self) -> None:
        """End it now; recorded rows stay. Ignored once it has ended."""
