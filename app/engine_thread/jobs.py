"""Work for the engine's thread as data: what to open, run or compare, and how to steer it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from engine.compare.lane_spec import LaneSpec
from engine.compare.memory_script import MemoryScript
from engine.errors import OptionError
from engine.options import Prompt, RunOptions
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.session import Session


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


@runtime_checkable
class Advances(Protocol):
    """A job that can do as many rounds at once as fit between two looks at the trace."""

    def advance(self) -> bool: ...


@runtime_checkable
class HasSequences(Protocol):
    """A job of several sequences, each of which can be ended for itself."""

    def cancel(self, seq_id: int) -> None: ...


@dataclass(frozen=True)
class ChatWrap:
    """Wrap each text as a user's message in the model's chat template; kwargs: its variables."""

    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRequest:
    """What a run is made of: one sequence for each text."""

    texts: tuple[str, ...]
    options: RunOptions
    chat: ChatWrap | None = None


@dataclass(frozen=True)
class CompareRequest:
    """What a comparison is made of: prompts as text, common options, lanes beside the reference.

    draft_accept: right tokens of successive drafts, to draft by script; () = as the options say.
    """

    texts: tuple[str, ...]
    options: RunOptions
    lanes: tuple[LaneSpec, ...]
    draft_accept: tuple[int, ...] = ()
    chat: ChatWrap | None = None


@dataclass(frozen=True)
class ScriptRequest:
    """A script of memory operations to play under a rollback policy; its contexts are the lanes."""

    script: MemoryScript
    policy: str


class OpenComparison(Protocol):
    """`open_comparison`, or a stand-in. The reference lane is the first run that it begins."""

    def __call__(
        self, session: Session, request: CompareRequest | ScriptRequest, trace: TraceStore
    ) -> Job: ...


def make_prompt(session: Session, text: str, chat: ChatWrap | None) -> Prompt:
    """Tokenise a text, in the chat template if asked for.

    Raises OptionError for a model without one, ChatTemplateError where the template fails.
    """
    if chat is None:
        return session.prompt(text)
    if session.chat is None:
        raise OptionError("The model has no chat template.", "Switch the chat template off.")
    return session.prompt(session.chat.render([{"role": "user", "content": text}], **chat.kwargs))
