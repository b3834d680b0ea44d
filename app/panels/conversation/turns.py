"""What the conversation view shows of a trace: the turns on one branch, and their answers."""

from __future__ import annotations

from engine.conversation.turns import Turn, TurnTree, content_of
from engine.trace.prompt_reuse import processed_lines, reused_text
from engine.trace.records import EMITTED_KINDS
from engine.trace.store import TraceStore

_LONGEST_TEXT = 6000


def answer_text(store: TraceStore, turn: Turn) -> str:
    """The answer as it is so far."""
    if turn.answer is not None:
        return shown_text(content_of(turn.answer))
    tokens, n = store.tokens, len(store.tokens)
    mine = tokens.column("run_id", 0, n) == turn.run_id
    if not mine.any():
        return ""
    first = int(mine.argmax())
    kinds = tokens.texts("kind", first, n)
    ids = tokens.column("token_id", first, n).tolist()
    pieces = (
        store.pieces.get(token, b"")
        for token, kind, is_mine in zip(ids, kinds, mine[first:].tolist(), strict=True)
        if is_mine and kind in EMITTED_KINDS
    )
    return shown_text(b"".join(pieces).decode("utf-8", "replace"))


def said_text(turn: Turn) -> str:
    """What the messages say; with roles where there is another than the user's."""
    if all(message.get("role") == "user" for message in turn.messages):
        return shown_text(turn.text)
    return shown_text(
        "\n".join(f"{message.get('role')}: {content_of(message)}" for message in turn.messages)
    )


def shown_text(text: str) -> str:
    """A text as long as a card can hold."""
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}… ({len(text):,} characters)"


def fact_lines(turn: Turn) -> list[str]:
    """What a turn took from memory, what it processed and why."""
    record = turn.record
    if record is None:
        return ["not measured what was reused"]
    lines = [reused_text(record), *processed_lines(record)]
    if turn.given:
        lines.append(f"{turn.given:,} of these are the recorded answer before")
    if turn.rewritten_at is not None:
        lines.append(
            f"the history reads differently from token {turn.rewritten_at:,} on than it was "
            "written (end token, chat template or tokeniser)"
        )
    return lines


def leaf_of(tree: TurnTree, chosen: int | None) -> int | None:
    """The turn to show up to: the chosen one, else the newest, None without any."""
    if chosen in tree.turns:
        return chosen
    return max(tree.turns, default=None)
