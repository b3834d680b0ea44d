"""Conversations of any turns, and what plain decoding from an empty memory answers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from engine.conversation.conversation import Conversation, Rendering, TurnRun
from engine.decode.held_sequences import PromptCache
from engine.options import CacheOptions, RunOptions, SpecOptions
from engine.session import Session
from engine.trace.store import TraceStore
from tests.support.golden_runs import decode, tokens_of

WORDS = ("a b ", "def f(x):\n", "return x", " and so on", "1 2 3 4 5 6 7 8 ")


def conversation(
    opened: Session, cache: CacheOptions | None = None, **rendering
) -> tuple[Conversation, TraceStore]:
    trace = TraceStore()
    how = Rendering(opened, **({"is_chat": False} | rendering))
    return Conversation(opened, trace, how, PromptCache(cache)), trace


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def finish(turn: TurnRun) -> TurnRun:
    while turn.advance():
        pass
    return turn


@st.composite
def moves(draw):
    """What a user does next: go on, edit a turn, or branch off after one."""
    kind = draw(st.sampled_from(["say", "edit", "branch"]))
    words = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3))
    return kind, draw(st.floats(0, 1)), "".join(words)


def converse(opened: Session, options: RunOptions, turns, cache: CacheOptions) -> None:
    """Every answer is that of plain decoding, and every record adds up."""
    held, trace = conversation(opened, cache)
    newest = None
    for kind, where, text in turns:
        parent = newest
        if newest is not None and kind != "say":
            chosen = int(where * (len(held.tree) - 1))
            parent = held.tree.turns[chosen].parent if kind == "edit" else chosen
        run = finish(held.start(said(text), parent, options))
        newest = run.number
        before = held.tree.messages(parent)
        prompt = Rendering(opened, is_chat=False).prompt([*before, *said(text)])
        plain = replace(options, spec=SpecOptions(), faults=(), parallel=1)
        assert run.emitted == tokens_of(decode(opened, [prompt], plain))
        check_record(run, len(prompt.tokens))
    assert len(trace.findings) == 0 or not {
        rule for rule in trace.findings.texts("rule") if rule.startswith(("checkpoint-b", "roll"))
    }


def check_record(run: TurnRun, n_prompt: int) -> None:
    record = run.turn.record
    assert record is not None and record.n_prompt == n_prompt
    summary = run.trace.runs[run.run_id]["summary"]
    assert (summary["cache_n"], summary["prompt_n"]) == (
        record.n_reused,
        n_prompt - record.n_reused,
    )
    ends = [record.n_reused]
    for part in record.parts:
        assert part.start == ends[-1] < part.stop
        ends.append(part.stop)
    assert ends[-1] == n_prompt
    assert record.n_reused <= record.n_common <= min(n_prompt, record.n_held)
    assert record.state_tokens in (None, record.n_reused)
    assert all(n <= record.n_reused for n in record.drafters.values())
    assert [n for n, _ in record.held] == sorted({n for n, _ in record.held})
