"""Conversations that were recorded elsewhere, as turns: OpenAI-style messages, or texts.

A file is one JSON value or JSON lines. A value is a message with a role, a text or a named text
({"name": …, "text": …}), each a turn of its own, or a request ({"messages": […], "tools": […]}).
Several
requests, as an agent's log has them, are one conversation: each goes on from the longest history
that it has in common with those before it, so a history that was edited becomes a branch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.conversation.turns import Message
from engine.errors import OptionError
from engine.files import is_unicode, user_text
from engine.foreign_json import JsonError, parse_json

_MOST_BYTES = 1 << 26
_MOST_TURNS = 10_000
_LONGEST_ROLE = 64
_TEXT_PARTS = ("text", "input_text", "output_text")
_REMEDY = 'Give messages like {"role": "user", "content": "Hello"}.'


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One turn. parent: index of the turn before it, None for a first one. messages: those said
    since. answer: what was answered, None where the record ends."""

    parent: int | None
    messages: tuple[Message, ...]
    answer: Message | None


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """A file's turns, each after its parent. has_roles: whether its messages have roles, and are
    not texts alone. tools: as the first request describes them."""

    turns: list[RecordedTurn]
    has_roles: bool
    tools: list[dict[str, Any]] | None = None


def read_recorded(path: Path) -> RecordedConversation:
    """The conversation of a file.

    Raises OptionError naming file and place for anything that is no such record, for one above
    64 MiB, with more than 10,000 turns or with no message.
    """
    entries = list(_entries(path, user_text(path, _MOST_BYTES)))
    tools, turns = None, _Turns(path)
    if any(isinstance(value, dict) and "messages" in value for _, value in entries):
        for place, value in entries:
            listed = value.get("messages") if isinstance(value, dict) else None
            if not isinstance(listed, list):
                raise OptionError(f"{path}: {place} has no list of messages.", _REMEDY)
            tools = tools or _tools(path, place, value.get("tools"))
            within = [(f"{place}, message {n}", one) for n, one in enumerate(listed, 1)]
            turns.add([_message(path, where, one) for where, one in within])
        has_roles = True
    else:
        messages = [_message(path, place, value) for place, value in entries]
        has_roles = any(isinstance(value, dict) and "role" in value for _, value in entries)
        if has_roles:
            turns.add(messages)
        else:
            turns.found = [
                RecordedTurn(n - 1 if n else None, (one,), None) for n, one in enumerate(messages)
            ]
    if not turns.found:
        raise OptionError(f"{path} holds no message.", _REMEDY)
    return RecordedConversation(turns.found, has_roles, tools)


class _Turns:
    """Turns of histories that begin alike."""

    def __init__(self, path: Path) -> None:
        self.found: list[RecordedTurn] = []
        self._path = path
        self._known: dict[tuple[int | None, str], int] = {}

    def add(self, messages: Sequence[Message]) -> None:
        """One history, from its first message on."""
        parent: int | None = None
        said: list[Message] = []
        for message in messages:
            # what an assistant says without being asked is a part of what the next turn reads
            if message["role"] == "assistant" and any(m["role"] != "assistant" for m in said):
                parent, said = self._turn(parent, said, message), []
            else:
                said.append(message)
        if any(message["role"] != "assistant" for message in said):
            self._turn(parent, said, None)

    def _turn(self, parent: int | None, said: Sequence[Message], answer: Message | None) -> int:
        asked = json.dumps(said, sort_keys=True)
        key = parent, json.dumps([asked, answer], sort_keys=True)
        open_key = parent, json.dumps([asked, None], sort_keys=True)
        index = self._known.get(key)
        if index is None and (index := self._known.pop(open_key, None)) is not None:
            self.found[index] = replace(self.found[index], answer=answer)
        if index is None:
            index = len(self.found)
            self.found.append(RecordedTurn(parent, tuple(said), answer))
            if index >= _MOST_TURNS:
                raise OptionError(f"{self._path} has more than {_MOST_TURNS:,} turns.", "Split it.")
        self._known[key] = index
        return index


def _entries(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The values of a file, each with its place."""
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    try:
        value = parse_json(text)
    except JsonError as error:
        if not lines or not _is_json(lines[0][1]):
            raise _not_json(path, error.line, error) from error
    else:
        for n, one in enumerate(value if isinstance(value, list) else [value], 1):
            yield f"message {n}" if isinstance(value, list) else "its object", one
        return
    for n, line in lines:
        try:
            yield f"line {n}", parse_json(line)
        except JsonError as error:
            raise _not_json(path, n, error) from error


def _is_json(line: str) -> bool:
    try:
        parse_json(line)
    except JsonError:
        return False
    return True


def _not_json(path: Path, line: int, error: JsonError) -> OptionError:
    return OptionError(
        f"{path}: line {line} is not valid JSON (column {error.column}: {error.what}).",
        "Give one JSON value, or one a line.",
    )


def _message(path: Path, place: str, value: Any) -> Message:
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    if isinstance(value, dict) and "role" not in value and isinstance(value.get("text"), str):
        value = {"role": "user", "content": value["text"]}
    if not isinstance(value, dict):
        raise OptionError(f"{path}: {place} is neither a text nor a message.", _REMEDY)
    role = value.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= _LONGEST_ROLE:
        raise OptionError(f"{path}: {place} has no role.", _REMEDY)
    return {**value, "content": _text(path, place, value.get("content"))}


def _text(path: Path, place: str, content: Any) -> str:
    """A content as one text: OpenAI's may be a list of parts, or null with calls of tools."""
    if content is None or isinstance(content, str):
        if not is_unicode(content or ""):
            raise OptionError(f"{path}: {place} has half of a character.", "Correct its text.")
        return content or ""
    if not isinstance(content, list):
        raise OptionError(f"{path}: {place} has a content that is not text.", _REMEDY)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise OptionError(
                f"{path}: {place} has a part of type {str(kind)[:40]!r}, which is not text.",
                "Leave such parts out.",
            )
        texts.append(text)
    return _text(path, place, "".join(texts))


def _tools(path: Path, place: str, tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise OptionError(
            f"{path}: {place} has tools that are no list of objects.", "Correct or remove them."
        )
    return tools
