"""Turns of conversations and scripts of memory operations: runs with stages of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.engine_thread.events import TurnRequest
from app.engine_thread.jobs.engine import PlayScript, StartTurn
from engine.compare.memory_script_parser import read_script
from engine.conversation.conversation import Conversation, Rendering
from engine.conversation.turns import TurnTree, conversations
from engine.options import RunOptions, SpecOptions
from engine.session import Session
from engine.trace.store import TraceStore
from resources import MEMORY_SCRIPTS

if TYPE_CHECKING:
    from tests.torture.idle_acts import IdleWindow

_SAYS = "x y"
_MOST_TURNS = 3
_WHOLE = ["limit"]
_SCRIPT = MEMORY_SCRIPTS / "1-save-after-rollback.toml"


def options(rollback: str) -> RunOptions:
    """Of a turn. The same bits whatever was in memory, so that the same tokens can be expected."""
    spec = SpecOptions(("draft-mtp",), n_max=3)
    return RunOptions(n_predict=6, n_ctx=96, spec=spec, rollback=rollback, batch_invariant=True)


def begin_conversation(idle: IdleWindow) -> None:
    idle.real.window.bridge.ask(StartTurn(TurnRequest(None, None, _SAYS, options(idle.rollback))))


def go_on(idle: IdleWindow) -> None:
    """After the newest turn that was answered in full, whatever came after it."""
    bridge, tree = idle.real.window.bridge, _newest(idle)
    runs = bridge.session_store.runs
    whole = [
        turn for turn in tree.turns.values() if turn.answer and runs[turn.run_id]["stops"] == _WHOLE
    ]
    last = max(whole, key=lambda turn: turn.number)
    bridge.ask(
        StartTurn(TurnRequest(last.conversation, last.number, _SAYS, options(idle.rollback)))
    )


def is_answered(idle: IdleWindow) -> bool:
    """Whether the newest turn has the answer of a model that remembers nothing."""
    tree = _newest(idle)
    said = [turn.answer["content"] for turn in tree.path(max(tree.turns)) if turn.answer]
    return said == answers(idle.model, idle.real.window.bridge.compute)[: len(said)]


def _newest(idle: IdleWindow) -> TurnTree:
    """The conversation that was started last and has an answer."""
    runs = idle.real.window.bridge.session_store.runs
    trees = [TurnTree.of(runs, number) for number in conversations(runs)]
    return [tree for tree in trees if any(turn.answer for turn in tree.turns.values())][-1]


@cache
def answers(model: Path, compute: str) -> list[str]:
    """What is answered turn by turn, each prompt processed from its first token on. To be asked
    for a first time where no fault is planted: it decodes here."""
    session, parent = Session.open(model, compute=compute), None
    alone = replace(options("checkpoint"), spec=SpecOptions())
    said = Conversation(session, TraceStore(), Rendering(session, is_chat=False), None)
    for _ in range(_MOST_TURNS):
        turn = said.start([{"role": "user", "content": _SAYS}], parent, alone)
        while turn.step():
            pass
        parent = turn.number
    return [str(turn.answer["content"]) for turn in said.tree.turns.values() if turn.answer]


def play_script(idle: IdleWindow) -> None:
    idle.real.window.bridge.ask(PlayScript(read_script(_SCRIPT), "planes"))


def script_error(idle: IdleWindow) -> bool:
    """Whether a lane of the newest script tells of an error."""
    return any("lane_error" in facts for facts in _lanes(idle))


def has_played(idle: IdleWindow) -> bool:
    """Whether the script came to its end in every lane."""
    return all(facts["stops"] == ["end"] for facts in _lanes(idle))


def _lanes(idle: IdleWindow) -> list[dict[str, Any]]:
    """The reference lane of the newest comparison, and the contexts of its script."""
    runs, live = idle.real.window.bridge.session_store.runs, idle.real.window.bridge.live
    return [] if live is None else [runs[run_id] for run_id in runs if run_id >= live.run_id]
