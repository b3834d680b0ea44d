"""Additions: events of a stream that add text to an answer and say nothing else, as nearly all do.
They are read by their type, which takes a third of the time that any event takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from engine.foreign import Count, Size
from engine.observe.rounds.stream import MOST_ANSWERS, Chunk, Timings, message


class _Choice(Struct, forbid_unknown_fields=True):
    delta: dict[Literal["content", "reasoning_content", "reasoning", "role"], str | None] | None = (
        None
    )
    text: str | None = None
    index: Annotated[int, Meta(ge=0, lt=MOST_ANSWERS)] = 0
    token_ids: tuple[Count, ...] | None = None
    logprobs: None = None
    finish_reason: None = None
    stop_reason: None = None


class Addition(Struct, forbid_unknown_fields=True):
    """Such an event of /v1/completions or /v1/chat/completions."""

    id: str
    choices: tuple[_Choice]
    created: Size = 0
    model: str = ""
    object: str = ""
    system_fingerprint: str | None = None
    usage: None = None
    timings: Timings | None = None

    @property
    def text(self) -> str:
        """What it adds."""
        choice = self.choices[0]
        return choice.text or "" if choice.delta is None else message(choice.delta)

    @property
    def ids(self) -> tuple[int, ...]:
        """Of its tokens, where they are given."""
        return self.choices[0].token_ids or ()

    @property
    def chunk(self) -> Chunk:
        """The same as of any event."""
        return Chunk(self.choices[0].index, self.text, ids=self.ids, timings=self.timings)


_DECODER = msgspec.json.Decoder(Addition)


def additions(texts: Sequence[str]) -> list[Addition | None]:
    """The events of a stream that are additions to one answer in a row, but for the first and the
    last of them, which say what these have in common; None for others. texts: of an event each."""
    known = list(map(_addition, texts))
    kinds = [None, *(one and one[1] for one in known), None]
    return [
        one[0] if one is not None and before == one[1] == after else None
        for before, one, after in zip(kinds, known, kinds[2:], strict=False)
    ]


def _addition(text: str) -> tuple[Addition, tuple[Any, ...]] | None:
    """An event, and what it has in common with the next one of its answer: the quotes too, of which
    an object with a key twice has others."""
    try:
        found = _DECODER.decode(text)
    except (msgspec.MsgspecError, ValueError):
        return None
    n_quotes = text.count('"')
    if "\\" in text:
        n_quotes -= text.count('\\"')
    if not found.text or "\\\\" in text:
        return None
    return found, (found.id, found.choices[0].index, found.timings is None, n_quotes)
