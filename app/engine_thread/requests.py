"""What a session is asked for, and what it gives: something that decodes in rounds."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.compare.lane_spec import LaneSpec
from engine.compare.memory_script import MemoryScript
from engine.fork import Fork
from engine.options import CacheOptions, RunOptions
from engine.options.llama_cpp import DEFAULT_GATE, GateOptions
from engine.trace.run_ref import RunRef

if TYPE_CHECKING:
    from engine.conversation.turns import Message


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
class ServerRunRequest:
    """A server to talk to, and the way out. key: empty for the one that was kept, if any.
    log: the file that the server writes, to be joined with what it says. timeout: of its replies,
    seconds; None for the default. model: which of its models, empty where it need not be said."""

    address: str
    key: str = field(default="", repr=False)
    log: Path | None = None
    timeout: float | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    model: str = ""


@dataclass(frozen=True)
class ChatWrap:
    """Wrap each text as a user's message in the model's chat template; kwargs: its variables."""

    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRequest:
    """The prompts and options of a run: one sequence for each text. fork: where it goes on from
    another run, whose prompts are meant then. of: the run whose prompts are meant else, None = the
    texts."""

    texts: tuple[str, ...]
    options: RunOptions
    chat: ChatWrap | None = None
    fork: Fork | None = None
    of: RunRef | None = None


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
    chat: ChatWrap | None = None
    cache: CacheOptions = field(default_factory=CacheOptions)
    before: tuple[Message, ...] = ()


@dataclass(frozen=True)
class CompareRequest:
    """What a comparison is made of: prompts as text, common options, lanes next to the reference.

    draft_accept: right tokens of successive drafts, to draft by script; () = as the options say.
    llama_library: a build of llama.cpp for its lanes, None = an installed package.
    """

    texts: tuple[str, ...]
    options: RunOptions
    lanes: tuple[LaneSpec, ...]
    draft_accept: tuple[int, ...] = ()
    chat: ChatWrap | None = None
    llama_library: Path | None = None


@dataclass(frozen=True)
class ScriptRequest:
    """A script of memory operations to play under a rollback policy; its contexts are the lanes."""

    script: MemoryScript
    policy: str


@dataclass(frozen=True)
class GateRequest:
    """Every check of rollback on a build of llama.cpp, None = an installed package, at one
    settings after another."""

    llama_library: Path | None = None
    gates: tuple[GateOptions, ...] = (DEFAULT_GATE,)


LanesRequest = CompareRequest | ScriptRequest | GateRequest
"""What lanes are made of."""


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
