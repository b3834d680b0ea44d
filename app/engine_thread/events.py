"""What the engine's thread tells the window: states, files, progress, failures, ends of work."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.analysis.breaks import BreakHit
from engine.errors import DraftscopeError
from engine.progress import ReportProgress
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.compare.fidelity import Fidelity
    from engine.model.drafters.info import DrafterInfo
    from engine.model.info import ModelInfo
    from engine.observe.rescoring.triage import Triage
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
class StateChanged:
    state: State


@dataclass(frozen=True)
class FilesInspected:
    """Metadata to show; None takes the model map down again."""

    files: OpenedFiles | None


@dataclass(frozen=True)
class ModelLoaded:
    """A complete session is in use.

    mode: the compute mode asked for, compute: the one in effect. mmap: as asked for. store takes
    the model's runs; it has those from when the model was open before.
    """

    files: OpenedFiles
    mode: str
    compute: str
    mmap: bool | None
    store: TraceStore


@dataclass(frozen=True)
class ServerConnected:
    """A server is in use. key_kept: see ServerSession. store takes its runs; it has those from
    when the server was in use before."""

    facts: ServerFacts
    key_kept: str
    store: TraceStore


@dataclass(frozen=True)
class ServerSeen:
    """How the server in use is now.

    gone: one sentence once it does not answer any more, else empty. slots: its reply to /slots,
    None where it does not report. counters: what its speculative counters have grown by since the
    connection, by the server's names, None where it has none.
    """

    gone: str = ""
    slots: tuple[Mapping[str, Any], ...] | None = None
    counters: Mapping[str, float] | None = None


@dataclass(frozen=True)
class ServerWaitedFor:
    """What the run waits for at the server, and for how long: a sentence, empty once it does no
    more."""

    sentence: str


@dataclass(frozen=True)
class Disconnected:
    """No server is in use any more."""


@dataclass(frozen=True)
class RunRescored:
    """A model has judged the tokens of a run. sentence: what came of it. text_changed: an emitted
    token cannot be the model's."""

    run: RunRef
    sentence: str
    text_changed: bool


@dataclass(frozen=True)
class RunsTriaged:
    """Where the texts of two runs part, and whether that is explained."""

    shown: RunRef
    overlaid: RunRef
    found: Triage


@dataclass(frozen=True)
class RescoreUnsure:
    """Whether the model is the run's own cannot be told: the user has to say. why: one sentence."""

    run: RunRef
    target: Path
    why: str


@dataclass(frozen=True)
class ProgressMade:
    """Bytes (or rows) done of a total, and what is being done."""

    done: int
    total: int
    phase: str


@dataclass(frozen=True)
class CommandFailed:
    """One sentence each; `detail` is a traceback when the error was not foreseen."""

    message: str
    remedy: str
    detail: str = ""


@dataclass(frozen=True)
class RunStarted:
    """A run, or the reference lane of a comparison; the other lanes are the runs after it."""

    run: RunRef


@dataclass(frozen=True)
class RunEnded:
    run: RunRef


@dataclass(frozen=True)
class TraceExported:
    """An export of a trace ended; `folder` is None when it was cancelled or failed.

    mark: how far the trace had grown when the export began, which at least is in the folder.
    """

    store: TraceStore
    mark: TraceMark
    folder: Path | None


@dataclass(frozen=True)
class ReportWritten:
    """A report is there."""

    path: Path


@dataclass(frozen=True)
class BreakRuleHeld:
    """A break rule held; the run pauses."""

    hit: BreakHit


@dataclass(frozen=True)
class FidelityMeasured:
    """How far the compute mode in use is from f32."""

    fidelity: Fidelity


Event = (
    StateChanged
    | FilesInspected
    | ModelLoaded
    | ProgressMade
    | CommandFailed
    | RunStarted
    | RunEnded
    | BreakRuleHeld
    | FidelityMeasured
    | TraceExported
    | ServerConnected
    | ServerSeen
    | ServerWaitedFor
    | Disconnected
    | RunRescored
    | RescoreUnsure
    | RunsTriaged
)
Post = Callable[[Event], None]


def mark_of(store: TraceStore) -> TraceMark:
    """How much a trace holds now: its size (TraceStore.size) and the number of ended runs."""
    return store.size(), sum("stops" in facts for facts in list(store.runs.values()))


def throttled(post: Post) -> ReportProgress:
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
    """What to tell the user about an error that ended a piece of work."""
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
