"""Finding tokens in a stream: neighbours, rounds, rejections, positions."""

from __future__ import annotations

from collections.abc import Callable

from app.trace_models.position import Position
from app.trace_models.token_stream import KIND, TokenStream

NOWHERE = -1
"""The index that means no token."""

FindToken = Callable[[TokenStream, int, int, frozenset[int]], int]
"""(stream, token to start from, +1 or -1, hidden kinds) -> index of a token or NOWHERE."""


def next_shown(stream: TokenStream, token: int, step: int, hidden: frozenset[int]) -> int:
    """The first token from `token` on, itself included, that is not hidden."""
    token = min(token, len(stream) - 1) if step < 0 else max(token, 0)
    while 0 <= token < len(stream):
        if stream.kinds[token] not in hidden:
            return token
        token += step
    return NOWHERE


def next_rejection(stream: TokenStream, token: int, step: int, hidden: frozenset[int]) -> int:
    """The rejected token after or before `token`, or what replaced it if those are hidden."""
    rejected = bytes((KIND["rejected"],))
    if step > 0:
        found = stream.kinds.find(rejected, token + 1)
    else:
        end = len(stream) if token == NOWHERE else token
        if token != NOWHERE and KIND["rejected"] in hidden:
            # the rejection that this token replaced lies before it, in the same round
            end = stream.round_span(stream.rounds[token])[0]
        found = stream.kinds.rfind(rejected, 0, end)
    return NOWHERE if found < 0 else next_shown(stream, found, +1, hidden)


def find(stream: TokenStream, position: Position, hidden: frozenset[int]) -> int:
    """The token at a position, else the first one of its round."""
    start, stop = stream.round_span(position.round)
    for token in range(start, stop):
        if stream.kinds[token] not in hidden and stands_at(stream, token, position):
            return token
    return next_shown(stream, start, +1, hidden) if start < stop else NOWHERE


def stands_at(stream: TokenStream, token: int, position: Position) -> bool:
    """Whether a token lies in the round of a position and, if it names one, at its place."""
    if token == NOWHERE or stream.rounds[token] != position.round:
        return False
    return position.pos is None or stream.position(token) == position.pos
