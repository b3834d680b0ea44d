"""Events and requests between the window and the engine thread."""

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
"""Rows of a trace and number of its ended runs; it changes when there is more to save."""

PROGRESS_PERIOD = 0.05
"""Least time between two progress events, seconds."""


class State(enum.Enum):
    """State of the engine as the window sees it. LOADING: it loads, connects, measures or judges.
    AUDITING: a finished run is compared with plain decoding, until something else is requested."""

    EMPTY = "no model"
    INSPECTED = "not loaded"
    LOADING = "busy"
    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"
    AUDITING = "auditing"


DraftFile = tuple[Path, str, "ModelInfo | DrafterInfo"]
"""A drafter file, its drafter, and its figures."""


@dataclass(frozen=True)
class OpenedFiles:
    """Headers of the model files, known before their weights are loaded."""

    target: Path
    drafts: tuple[DraftFile, ...]
    info: ModelInfo
    identity: dict[str, Any]
    has_chat_template: bool = False


@dataclass(frozen=True)
class ServerConnected:
    """A server in use. key_kept: see `app.engine_thread.serving.ServedSession`. store: for its
    runs, including those of earlier connections."""

    facts: ServerFacts
    key_kept: str
    store: TraceStore


@dataclass(frozen=True)
class ServerSeen:
    """Current status of the server in use.

    gone: one sentence if it does not answer, or is ANOTHER, else empty. slots: its reply to /slots,
    None if unavailable. counters: growth of its speculative counters since the connection, by the
    server's names, None if unavailable.
    """

    gone: str = ""
    slots: tuple[Mapping[str, Any], ...] | None = None
    counters: Mapping[str, float] | None = None


ANOTHER = "was started again, with another model or other settings."
"""Appended to a server's address."""


def mark_of(store: TraceStore) -> TraceMark:
    """The present size of a trace (TraceStore.size) and its number of ended runs."""
    return store.size(), sum("stops" in facts for facts in list(store.runs.values()))


def throttled(post: ReportProgress) -> ReportProgress:
    """A progress function that calls another at most every PROGRESS_PERIOD, and always at the
    end."""
    last = 0.0

    def report(done: int, total: int, phase: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_PERIOD or done >= total:
            last = now
            post(done, total, phase)

    return report


def failure(error: BaseException) -> DraftscopeError:
    """The user-visible form of an error that ended a piece of work."""
    if isinstance(error, DraftscopeError):
        return DraftscopeError(error.message, error.remedy)  # without its frames' contents
    if isinstance(error, MemoryError):
        return DraftscopeError(
            "There is not enough memory for this.", "Close other programs and try again."
        )
    log.error("the engine failed", exc_info=error)
    return DraftscopeError(
        f"The engine failed: {type(error).__name__}: {error}.",
        "The recorded rounds are kept; the log has the details (Help, Copy report).",
    )


@dataclass(frozen=True)
class OpenRequest:
    """Files to load, and how. mmap: see engine.model.loader.reader_for. options: see
    engine.session.Session.open. cancelled: set to give up."""

    target: Path
    drafts: tuple[Path, ...]
    compute: str
    mmap: bool | None = None
    device: str = "auto"
    options: RunOptions | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class RunRequest:
    """Prompts and options of a run: one sequence per text. fork: continues another run with its
    prompts. of: a run whose prompts are used, None = the texts. chat: variables of the model's chat
    template, which wraps each text as a user message; None: texts are continued as they are.

    For a comparison: lanes, in addition to the reference. draft_accept: right tokens of successive
    scripted drafts; () = as in the options. llama_library: a build of llama.cpp for its lanes, None
    = an installed package.
    """

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
    """A turn of a conversation in the model's trace. conversation: its number, None for a new one;
    parent: the previous turn, None for a first one. text: the user's message. before: other
    messages of this turn before the text. cache: the first turn with other options than the
    previous one finds an empty cache."""

    conversation: int | None
    parent: int | None
    text: str
    options: RunOptions
    chat: dict[str, Any] | None = None
    cache: CacheOptions = field(default_factory=CacheOptions)
    before: tuple[Message, ...] = ()


class Decoding(Protocol):
    """A run or comparison in progress, which can be paused or ended between rounds."""

    @property
    def run_id(self) -> int:
        """Its run in the trace; for a comparison, that of the reference lane."""

    def step(self) -> bool:
        """Do one round. Returns False when no round is left."""

    def advance(self) -> bool:
        """Do rounds until the trace should be displayed again. Returns False when no round is
        left."""

    def cancel(self, seq_id: int) -> None:
        """End one sequence; the others continue. Raises OptionError if that is impossible."""

    def stop(self) -> None:
        """End it now; recorded rows stay. Ignored after the end."""
