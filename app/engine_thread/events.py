"""Records that the engine's thread sends to the window: files, servers, progress, failures."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import DraftscopeError
from engine.progress import ReportProgress
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.model.drafters.config import DrafterInfo
    from engine.model.info import ModelInfo
    from engine.observe.rounds.observed_run import ServerFacts

log = logging.getLogger("draftscope.worker")

TraceMark = tuple[int, int]
"""Rows of a trace and how many of its runs have ended: it is another when there is more to save."""

PROGRESS_PERIOD = 0.05
"""Least time between two progress events, seconds."""


class State(enum.Enum):
    """What the engine is doing, as far as the window needs to know. AUDITING: a run has all its
    tokens and is compared with plain decoding, which ends for whatever is asked for next."""

    EMPTY = "no model"
    INSPECTED = "not loaded"
    LOADING = "loading"
    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"
    AUDITING = "auditing"


@dataclass(frozen=True)
class DraftFile:
    """A file that drafts for the model. drafter: which one uses it."""

    path: Path
    drafter: str
    info: ModelInfo | DrafterInfo


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

    gone: one sentence once it does not answer any more, else empty. slots: its reply to /slots,
    None where it has none. counters: what its speculative counters have grown by since the
    connection, by the server's names, None where it has none.
    """

    gone: str = ""
    slots: tuple[Mapping[str, Any], ...] | None = None
    counters: Mapping[str, float] | None = None


@dataclass(frozen=True)
class TraceRead:
    """A trace that was read from a folder, or made of what another engine wrote into a file."""

    folder: Path
    store: TraceStore


@dataclass(frozen=True)
class ProgressMade:
    """Bytes (or rows) done of a total, and what is being done."""

    done: int
    total: int
    phase: str


@dataclass(frozen=True)
class CommandFailed:
    """What went wrong and what to do about it, one sentence each."""

    message: str
    remedy: str


def mark_of(store: TraceStore) -> TraceMark:
    """How much a trace holds now: its size (TraceStore.size) and the number of ended runs."""
    return store.size(), sum("stops" in facts for facts in list(store.runs.values()))


def throttled(post: Callable[[ProgressMade], None]) -> ReportProgress:
    """A progress function that posts at most every PROGRESS_PERIOD, and always the end."""
    last = 0.0

    def report(done: int, total: int, phase: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_PERIOD or done >= total:
            last = now
            post(ProgressMade(done, total, phase))

    return report


def failure(error: BaseException) -> CommandFailed:
    """The message for the user about an error that ended a piece of work."""
    if isinstance(error, DraftscopeError):
        return CommandFailed(error.message, error.remedy)
    if isinstance(error, MemoryError):
        return CommandFailed(
            "There is not enough memory for this.", "Close other programs and try again."
        )
    log.error("the engine failed", exc_info=error)
    return CommandFailed(
        f"The engine failed: {type(error).__name__}: {error}.",
        "What was recorded is still there; the log has the details (Help, Copy report).",
    )
