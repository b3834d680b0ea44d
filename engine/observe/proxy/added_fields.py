"""Fields added to a client's request so that its reply shows the rounds, and removed from the
reply.

Removed fields are cut from the text of an event; the rest stays byte for byte as it came.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from engine.observe.proxy.request_checks import json_excess

Reply = Literal["completion", "text", "chat", "responses", "messages", "other"]

REPLIES: dict[str, Reply] = {
    "/completion": "completion",
    "/completions": "completion",
    "/infill": "completion",
    "/v1/completions": "text",
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/responses": "responses",
    "/responses": "responses",
    "/v1/messages": "messages",
    "/generate": "other",  # SGLang
    "/api/generate": "other",  # ollama
    "/api/chat": "other",
    "/api/v0/chat/completions": "other",  # LM Studio
    "/api/v0/completions": "other",
}
"""The endpoints that generate text, and the form in which each replies."""

_ADDED: dict[Reply, tuple[str, ...]] = {
    "completion": ("timings_per_token",),
    "text": ("timings_per_token", "verbose"),
    "chat": ("timings_per_token",),
    "responses": ("timings_per_token",),
    "messages": (),  # its replies cannot carry them
    "other": (),
}
MAX_LINE = 16 * 2**20
"""Longest line held until its end arrives, bytes; a longer one is passed on unchanged."""

MAX_MEMBERS = 1024
"""Most members of a request or an event; one with more has an unknown form."""
_SHORT_LINE, _MAX_SIGNS = 4096, 1 << 15
"""Bytes of an event that is always parsed, and the most punctuation characters of a longer one."""

_SPACE = re.compile(r"[ \t\r\n]*")
_decoder = json.JSONDecoder()


class _Members:
    """The members of a JSON object and their spans in its text, one character per byte.

    Raises ValueError or RecursionError for any other text, and for a duplicate key.
    """

    def __init__(self, text: str, start: int = 0) -> None:
        self.values: dict[str, Any] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        """Span of each value."""
        self.cuts: dict[str, tuple[int, int]] = {}
        """Span of each member but the first, including the comma before it."""
        at = _skip(text, start, "{")
        more, behind = text[at : at + 1] != "}", None
        while more:
            key, at = _decoder.raw_decode(text, at)
            begin = _skip(text, at, ":")
            value, end = _decoder.raw_decode(text, begin)
            if not isinstance(key, str) or key in self.values:
                raise ValueError("no key, or one that comes twice")
            if len(self.values) == MAX_MEMBERS:
                raise ValueError("too many members")
            self.values[key], self.spans[key] = value, (begin, end)
            if behind is not None:
                self.cuts[key] = behind, end
            behind, at = end, _space(text, end)
            more = text[at : at + 1] == ","
            if more:
                at = _skip(text, at, ",")
        self.end = _skip(text, at, "}")
        """Offset after the object and its white space."""

    def cut(self, key: str) -> tuple[int, int, str]:
        """The edit that removes a member."""
        if key not in self.cuts:
            raise ValueError("the first member is never an added one")
        return *self.cuts[key], ""


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _skip(text: str, at: int, sign: str) -> int:
    """The offset after a punctuation character and its white space."""
    at = _space(text, at)
    if text[at : at + 1] != sign:
        raise ValueError(f"{sign} is missing")
    return _space(text, at + 1)


def _object(text: str) -> _Members:
    members = _Members(text)
    if members.end != len(text):
        raise ValueError("there is more after the object")
    return members


def add_fields(reply: Reply, body: bytes) -> tuple[bytes, tuple[str, ...]]:
    """The request body with the missing fields added, and the names of those fields.

    A body that is not a JSON object, has more than MAX_MEMBERS or does not stream is returned
    unchanged. The caller checks the body against `request_checks` first.
    """
    text = body.decode("latin-1")
    try:
        members = _object(text)
    except (ValueError, RecursionError):
        return body, ()
    lacking = tuple(name for name in _ADDED[reply] if members.values.get(name) is not True)
    if members.values.get("stream") is not True:
        return body, ()
    spliced = [name for name in lacking if name not in members.values]
    edits = [(*members.spans[name], "true") for name in lacking if name in members.values]
    if spliced:
        behind = max(end for _, end in members.spans.values())
        edits.append((behind, behind, "".join(f',"{name}":true' for name in spliced)))
    return _edited(text, edits).encode("latin-1"), lacking


class FieldRemover:
    """Removes from an event stream what was added on behalf of a client.

    Data is released as it arrives, except for an incomplete line. Lines of an unknown form stay
    unchanged.
    """

    def __init__(self, reply: Reply, added: tuple[str, ...]) -> None:
        self._reply, self._added = reply, added
        self._held = bytearray()
        self._is_through = False
        """Whether a line was too long, so that the rest of it passes through."""

    def feed(self, piece: bytes) -> bytes:
        """Feed a piece of the stream; returns what can be passed on now."""
        *ends, tail = piece.split(b"\n")
        passed = []
        for end in ends:
            line = bytes(self._held) + end + b"\n"
            self._held.clear()
            passed.append(line if self._is_through else self._without(line))
            self._is_through = False
        self._held += tail
        if self._is_through or len(self._held) > MAX_LINE:
            self._is_through = True
            passed.append(self.rest())
        return b"".join(passed)

    def rest(self) -> bytes:
        """What is still held at the end of the stream."""
        held = bytes(self._held)
        self._held.clear()
        return held

    def _without(self, line: bytes) -> bytes:
        if not line.startswith(b"data:") or not any(
            mark in line for mark in (b"timings", b'"__verbose"')
        ):
            return line
        if len(line) > _SHORT_LINE and json_excess(line, _MAX_SIGNS):
            return line
        text = line[5:].decode("latin-1")
        try:
            edits = self._edits(text, _object(text))
        except (ValueError, RecursionError):
            return line
        return b"data:" + _edited(text, edits).encode("latin-1")

    def _edits(self, text: str, event: _Members) -> list[tuple[int, int, str]]:
        edits = []
        if "verbose" in self._added and "__verbose" in event.values:
            edits.append(event.cut("__verbose"))
        if "timings_per_token" in self._added:
            if "timings" in event.values and self._is_partial(event.values):
                edits.append(event.cut("timings"))
            edits += self._settings(text, event)
        return edits

    def _is_partial(self, event: dict[str, Any]) -> bool:
        """Whether a server sends timings in this event only on request, so not the last event."""
        if self._reply == "completion":
            return event.get("stop") is False
        if self._reply == "responses":
            return event.get("type") not in (None, "response.completed")
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices:
            return False
        return all(
            isinstance(choice, dict) and choice.get("finish_reason", "") is None
            for choice in choices
        )

    def _settings(self, text: str, event: _Members) -> list[tuple[int, int, str]]:
        """Edits for the settings at the end of /completion, which echo that timings were
        requested."""
        if self._reply != "completion":
            return []
        edits = []
        name = "generation_settings/timings_per_token"  # the client sent response_fields
        if event.values.get(name) is True:
            edits.append((*event.spans[name], "false"))
        if "generation_settings" in event.spans and isinstance(
            event.values["generation_settings"], dict
        ):
            settings = _Members(text, event.spans["generation_settings"][0])
            if settings.values.get("timings_per_token") is True:
                edits.append((*settings.spans["timings_per_token"], "false"))
        return edits


def _edited(text: str, edits: list[tuple[int, int, str]]) -> str:
    """The text with edits applied; they must not overlap."""
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text
