"""What one reply of a server says, event by event: bytes cut anywhere go in, chunks come out.

Every number is checked here, so that a reader of chunks may rely on their types: a server may
send anything.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.foreign_json import JsonError, parse_json
from engine.foreign_numbers import MOST_PROMPT_TOKENS, MOST_TOKENS, is_real, is_whole
from engine.gguf.binary import shorten

MOST_LINE_BYTES = 16 << 20
"""A longer line, or a longer reply in one piece, is not read."""
MOST_ANSWERS = 1024
"""Of one reply."""
_LINE_END = re.compile(rb"\r\n|\n|\r")


class UnreadableError(ValueError):
    """The reply cannot be read any further. The message is a clause without its subject."""


class Timings(NamedTuple):
    """The server's counters at one time, cumulative over a request. Times are milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    draft_n: int
    draft_n_accepted: int


@dataclass(slots=True)
class Chunk:
    """One event of a generation.

    index: which of several answers. text: what it adds to the answer. token_id: of the last token
    in it, None where it is not given. ids: all ids, of a reply in one piece.
    processed: prompt tokens so far, of an event with the progress of the prompt that is there
    for no token. last: the answer is complete; final holds what was said about it then.
    """

    index: int = 0
    text: str = ""
    token_id: int | None = None
    ids: tuple[int, ...] = ()
    timings: Timings | None = None
    processed: int | None = None
    last: bool = False
    final: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


class EventReader:
    """A stream of server-sent events, or a JSON reply in one piece.

    n_events: events with data that came as a whole; neither comments nor pings count.
    """

    def __init__(self, content_type: str = "") -> None:
        """content_type: of the reply; where it is empty the first bytes decide."""
        self.n_events = 0
        self._parts: list[bytes] = []
        self._n_rest = self._n_event = 0
        self._data: list[bytes] = []
        self._is_stream: bool | None = None
        if "event-stream" in content_type:
            self._is_stream = True
        elif "json" in content_type:
            self._is_stream = False

    def feed(self, piece: bytes) -> Iterator[Chunk]:
        """The chunks that these bytes complete. Raises UnreadableError, after those before it."""
        if self._is_stream is None and (start := piece.lstrip()):
            self._is_stream = not start.startswith((b"{", b"["))
        self._parts.append(piece)
        self._n_rest += len(piece)
        if self._is_stream is False or not (b"\n" in piece or b"\r" in piece):
            if self._n_rest > MOST_LINE_BYTES:
                what = "a line" if self._is_stream else "a reply"
                raise UnreadableError(f"sent {what} of more than {MOST_LINE_BYTES >> 20} MiB")
            return
        data = b"".join(self._parts)
        held = data.endswith(b"\r")  # its "\n" may come with the next piece
        if b"\r" in data:
            data = _LINE_END.sub(b"\n", data[:-1] if held else data)
        lines = data.split(b"\n")
        rest = lines.pop() + (b"\r" if held else b"")
        self._parts, self._n_rest = [rest], len(rest)
        for line in lines:
            if line:
                self._field(line)
            else:
                yield from self._event()
        if len(rest) > MOST_LINE_BYTES:
            raise UnreadableError(f"sent a line of more than {MOST_LINE_BYTES >> 20} MiB")

    def end(self) -> Iterator[Chunk]:
        """The reply is over: what the last bytes say, if they are complete."""
        data = b"".join(self._parts)
        self._parts, self._n_rest = [], 0
        if self._is_stream is False:
            if data.strip():
                yield from chunks(read_json(data))
        elif data == b"\r":
            yield from self._event()

    def _field(self, line: bytes) -> None:
        """A line of an event. Only its data matter (HTML standard, 9.2.6)."""
        self._n_event += len(line)
        if self._n_event > MOST_LINE_BYTES:
            raise UnreadableError(f"sent an event of more than {MOST_LINE_BYTES >> 20} MiB")
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))

    def _event(self) -> Iterator[Chunk]:
        """A blank line: the event is complete."""
        data, self._data, self._n_event = self._data, [], 0
        if data:
            self.n_events += 1
            text = b"\n".join(data)
            if text.strip() not in (b"", b"[DONE]", b"null"):
                yield from chunks(read_json(text))


def read_json(text: bytes | str) -> Any:
    """What a server sent as JSON. Raises UnreadableError."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    try:
        return parse_json(text, whole_texts=True)
    except JsonError as error:
        raise UnreadableError(f"sent text that is not valid JSON ({error.what})") from None


def chunks(event: Any) -> Iterator[Chunk]:
    """What an event of any of the server's endpoints says. Raises UnreadableError."""
    if isinstance(event, list):
        for one in event:
            yield from chunks(one)
    elif isinstance(event, dict):
        yield from _chunks(event)


def _chunks(event: dict[str, Any]) -> Iterator[Chunk]:
    if event.get("error"):
        yield Chunk(error=_error(event["error"]))
    elif isinstance(event.get("choices"), list):
        yield from _choices(event)
    elif isinstance(event.get("type"), str):
        yield from _typed(event)
    elif "content" in event or "tokens" in event:
        yield _completion(event)


def _completion(event: dict[str, Any], text: str | None = None) -> Chunk:
    """An event of /completion, or what `__verbose` repeats of it."""
    is_last = event.get("stop") is True
    tokens = event.get("tokens")
    ids = tuple(t for t in tokens if is_whole(t)) if isinstance(tokens, list) else ()
    timings = _timings(event)
    processed = None
    if isinstance(progress := event.get("prompt_progress"), dict):
        processed = _count(progress, "processed")
    return Chunk(
        index=_index(event),
        text=_text(event.get("content")) if text is None else text,
        token_id=ids[-1] if ids and not is_last and processed is None else None,
        ids=ids if is_last else (),
        timings=timings,
        processed=processed,
        last=is_last,
        final=event if is_last else {},
    )


def _choices(event: dict[str, Any]) -> Iterator[Chunk]:
    """An event of /v1/completions or /v1/chat/completions."""
    timings = _timings(event)
    verbose = event.get("__verbose")
    verbose = verbose if isinstance(verbose, dict) else {}
    inner = _completion(verbose) if verbose else Chunk()
    if len(event["choices"]) > MOST_ANSWERS:
        raise UnreadableError(f"sent more than {MOST_ANSWERS:,} answers in one event")
    for choice in event["choices"]:
        if not isinstance(choice, dict):
            continue
        is_last = isinstance(choice.get("finish_reason"), str)
        said = choice.get("delta")
        said = said if isinstance(said, dict) else choice.get("message")
        text = _message(said) if isinstance(said, dict) else _text(choice.get("text"))
        token_id = _logged_id(choice.get("logprobs"))
        token_id = inner.token_id if token_id is None else token_id
        if not text and timings is None and not is_last:
            continue  # the role, before anything is generated
        final = ChainMap({"finish_reason": choice.get("finish_reason")}, event, verbose)
        yield Chunk(
            index=_index(choice),
            text=text,
            token_id=None if is_last else token_id,
            ids=inner.ids,
            timings=timings,
            last=is_last,
            final=final if is_last else {},
        )


def _typed(event: dict[str, Any]) -> Iterator[Chunk]:
    """An event of /v1/responses or /v1/messages."""
    kind, timings = event["type"], _timings(event)
    if kind in ("response.completed", "response.incomplete", "response.failed"):
        response = event.get("response")
        final = (response if isinstance(response, dict) else {}) | event
        yield Chunk(timings=timings, last=True, final=final)
    elif kind.endswith(".delta") and isinstance(event.get("delta"), str):
        yield Chunk(text=event["delta"], timings=timings)
    elif kind == "content_block_delta" and isinstance(event.get("delta"), dict):
        delta = event["delta"]
        text = next((delta[k] for k in ("text", "thinking", "partial_json") if k in delta), "")
        yield Chunk(text=_text(text), timings=timings)
    elif kind == "message_delta":
        delta = event.get("delta")
        yield Chunk(
            timings=timings, last=True, final=(delta if isinstance(delta, dict) else {}) | event
        )
    elif timings is not None:
        yield Chunk(timings=timings)


def _message(said: dict[str, Any]) -> str:
    """What a delta or a message of a chat adds: thoughts, words, arguments of tools."""
    parts = [_text(said.get("reasoning_content")), _text(said.get("content"))]
    calls = said.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts += [_text(function.get("name")), _text(function.get("arguments"))]
    return "".join(parts)


def _logged_id(logprobs: Any) -> int | None:
    """The id next to the probabilities of the one token of a chunk."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        found = content[0].get("id")
        return found if is_whole(found) else None
    return None


def _timings(event: dict[str, Any]) -> Timings | None:
    """The counters of an event. Raises UnreadableError for a counter that is not a count."""
    said = event.get("timings")
    if not isinstance(said, dict) or "predicted_n" not in said:
        return None
    return Timings(
        _count(said, "cache_n", MOST_PROMPT_TOKENS),
        _count(said, "prompt_n", MOST_PROMPT_TOKENS),
        _milliseconds(said, "prompt_ms"),
        _count(said, "predicted_n"),
        _milliseconds(said, "predicted_ms"),
        _count(said, "draft_n"),
        _count(said, "draft_n_accepted"),
    )


def _count(said: dict[str, Any], name: str, most: int = MOST_TOKENS) -> int:
    value = said.get(name, 0)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not is_whole(value, most):
        raise UnreadableError(f"sent {name} = {_shown(value)}, which is not a count")
    return int(value)


def _milliseconds(said: dict[str, Any], name: str) -> float:
    value = said.get(name, 0.0)
    if not is_real(value):
        raise UnreadableError(f"sent {name} = {_shown(value)}, which is not a time in milliseconds")
    return float(value)


def _index(said: dict[str, Any]) -> int:
    index = said.get("index", 0)
    if not is_whole(index, MOST_ANSWERS - 1):
        raise UnreadableError(f"sent index {_shown(index)}, which is not the number of an answer")
    return int(index)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _error(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return server_words(message, 500)


def _shown(value: Any) -> str:
    return server_words(value, 40)


def server_words(value: Any, limit: int) -> str:
    """One line of printable characters, at most `limit`: it ends up on a terminal."""
    return shorten(" ".join(str(value).split()), limit)
