"""Reply events of a server: JSON goes in, chunks come out.

Every number is checked here, so that readers of chunks can rely on their types: a server may send
anything.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from engine.foreign import (
    LONGEST_PART_MS,
    MOST_PROMPT_TOKENS,
    MOST_TOKENS,
    JsonError,
    are_whole,
    is_real,
    is_whole,
    parse_json,
)
from engine.gguf.binary import shorten
from engine.trace.timings import n_timed

MOST_ANSWERS = 1024
"""Answers per reply."""
_TOKEN_ID = re.compile(r"token_id:\d{1,10}", re.ASCII)


class UnreadableError(ValueError):
    """The reply cannot be read any further. The message is a clause without its subject."""


_OfPrompt = Annotated[int, Meta(ge=0, le=MOST_PROMPT_TOKENS)]
_OfAnswer = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
_Milliseconds = Annotated[float, Meta(ge=0, le=LONGEST_PART_MS)]


class Timings(Struct, frozen=True, gc=False):
    """The server's counters at one time, cumulative over a request. Times are milliseconds."""

    cache_n: _OfPrompt
    prompt_n: _OfPrompt
    prompt_ms: _Milliseconds
    predicted_n: Annotated[int, Meta(ge=2, le=MOST_TOKENS)]  # the first is not an addition
    predicted_ms: _Milliseconds
    draft_n: _OfAnswer = 0
    draft_n_accepted: _OfAnswer = 0
    predicted_per_second: _Milliseconds | None = None

    @property
    def n_timed(self) -> int:
        """Number of tokens that predicted_ms covers."""
        return n_timed(self.predicted_ms, self.predicted_n, self.predicted_per_second)


class Usage(NamedTuple):
    """Token counts of a reply; None = not given. completion: of all answers together. times: other
    figures by the names of `engine.trace.timings.summary`."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    times: Mapping[str, float] = {}


class Chunk(Struct):
    """One event of a generation.

    index: of several answers. text: added to the answer. token_id: of the last token in it, None if
    not given. ids: of all tokens in it, if given; prompt_ids: of the prompt. pieces: text of each
    token, if it is split. is_whole: text and ids are those of the whole answer so far. usage: of
    the request. count: tokens of the answer so far, if given. processed: prompt tokens so far, for
    a progress event without a token. last: the answer is complete; final holds what was sent about
    it. event: the parsed event. additions: several events in sequence instead of one; timings are
    those of the last.
    """

    index: int = 0
    text: str = ""
    token_id: int | None = None
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    is_whole: bool = False
    usage: Usage | None = None
    count: int | None = None
    timings: Timings | None = None
    processed: int | None = None
    last: bool = False
    final: Mapping[str, Any] = {}
    error: str = ""
    event: Mapping[str, Any] = {}
    additions: Sequence[Any] = ()


_NOTHING = Chunk()


def read_json(text: bytes | str) -> Any:
    """Parse a server's JSON. Raises UnreadableError."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    try:
        return parse_json(text, whole_texts=True)
    except JsonError as error:
        raise UnreadableError(f"sent text that is not valid JSON ({error.what})") from None


def chunks(event: Any) -> Iterator[Chunk]:
    """The chunks of an event of any endpoint, or of a tuple of additions to one answer. Raises
    UnreadableError."""
    if isinstance(event, tuple):
        yield Chunk(event[0].index, timings=event[-1].timings, additions=event)
    elif isinstance(event, list):
        for one in event:
            yield from chunks(one)
    elif isinstance(event, dict):
        for chunk in _chunks(event):
            chunk.event = event
            yield chunk


def is_reply(event: dict[str, Any]) -> bool:
    """Whether an object is an event of a generation, or a reply in one piece."""
    kind, choices = event.get("type"), event.get("choices")
    if isinstance(choices, list):  # a benchmark may also use this name
        known = (isinstance(one, dict) and not _ANSWER.isdisjoint(one) for one in choices)
        return not choices or any(known)
    return (
        _is_of_sglang(event)
        or _is_of_ollama(event)
        or (isinstance(kind, str) and kind.startswith(("response.", "content_block_", "message_")))
        or _is_response(event)
        or (("content" in event or "tokens" in event) and not _COMPLETION.isdisjoint(event))
    )


_ANSWER = {"message", "delta", "text", "finish_reason", "logprobs", "token_ids"}
"""A reply has one of these keys."""
_COMPLETION = {"stop", "tokens_predicted", "id_slot", "generation_settings", "timings"}


def _is_of_sglang(event: dict[str, Any]) -> bool:
    return isinstance(event.get("meta_info"), dict) and ("text" in event or "output_ids" in event)


def _is_of_ollama(event: dict[str, Any]) -> bool:
    return isinstance(event.get("done"), bool) and ("response" in event or "message" in event)


def _is_response(event: dict[str, Any]) -> bool:
    is_response = event.get("object") == "response" and isinstance(event.get("output"), list)
    return is_response or is_message(event)


def is_message(event: dict[str, Any]) -> bool:
    """Whether an object is a reply of /v1/messages in one piece; one inside a reply of
    /v1/responses has no counts of its own."""
    return (
        event.get("type") == "message"
        and isinstance(event.get("content"), list)
        and isinstance(event.get("usage"), dict)
    )


def _chunks(event: dict[str, Any]) -> Iterator[Chunk]:
    if error := event.get("error"):
        said = error.get("message") if isinstance(error, dict) else error
        yield Chunk(error=server_words(said, 500))
    elif isinstance(event.get("choices"), list):
        yield from _choices(event)
    elif _is_of_sglang(event):
        yield from _sglang(event)
    elif _is_of_ollama(event):
        yield from _ollama(event)
    elif _is_response(event):
        yield from _response(event)
    elif isinstance(event.get("type"), str):
        yield from _typed(event)
    elif "content" in event or "tokens" in event:
        yield _completion(event)


def _completion(event: dict[str, Any]) -> Chunk:
    """An event of /completion, or its copy in `__verbose`."""
    is_last = event.get("stop") is True
    ids = _ids(event.get("tokens"))
    timings = _timings(event)
    processed = None
    if isinstance(progress := event.get("prompt_progress"), dict):
        processed = _count(progress, "processed")
    usage = None
    if "tokens_evaluated" in event and "tokens_predicted" in event:
        usage = Usage(
            _count(event, "tokens_evaluated", MOST_PROMPT_TOKENS),
            completion=_count(event, "tokens_predicted"),
        )
    return Chunk(
        index=_index(event),
        text=_text(event.get("content")),
        token_id=ids[-1] if ids and not is_last and processed is None else None,
        ids=ids if processed is None else (),
        usage=usage if is_last or "stop" not in event else None,
        count=None if usage is None or processed is not None else usage.completion,
        timings=timings,
        processed=processed,
        last=is_last,
        final=event if is_last else {},
    )


def _choices(event: dict[str, Any]) -> Iterator[Chunk]:
    """An event of /v1/completions or /v1/chat/completions."""
    timings, usage = _timings(event), _usage(event.get("usage"))
    verbose = event.get("__verbose")
    verbose = verbose if isinstance(verbose, dict) else {}
    inner = _completion(verbose) if verbose else _NOTHING
    if len(event["choices"]) > MOST_ANSWERS:
        raise UnreadableError(f"sent more than {MOST_ANSWERS:,} answers in one event")
    for choice in event["choices"]:
        if not isinstance(choice, dict):
            continue
        is_last = isinstance(choice.get("finish_reason"), str)
        said = choice.get("delta")
        said = said if isinstance(said, dict) else choice.get("message")
        text = message(said) if isinstance(said, dict) else _text(choice.get("text"))
        logprobs = choice.get("logprobs")
        logged, pieces = _logged(logprobs) if logprobs else ((), ())
        token_id = logged[-1] if len(logged) == 1 else inner.token_id
        ids = _ids(choice.get("token_ids")) or inner.ids or logged
        prompt_ids = _ids(choice.get("prompt_token_ids")) or _ids(event.get("prompt_token_ids"))
        is_empty = not text and timings is None and not is_last
        if is_empty and not ids and not prompt_ids:
            continue  # the role, before anything is generated
        reason = {"finish_reason": choice.get("finish_reason")}
        yield Chunk(
            index=_index(choice),
            text=text,
            token_id=None if is_last else token_id,
            ids=ids,
            prompt_ids=prompt_ids,
            pieces=pieces,
            timings=timings,
            last=is_last,
            final=verbose | event | reason if is_last else {},
        )
    if usage is not None:
        yield Chunk(usage=usage._replace(times=_speed(event.get("stats"))))
    elif not event["choices"] and len(event) > 1:
        yield Chunk(usage=Usage())  # SGLang's speculation data come without an answer


def _sglang(event: dict[str, Any]) -> Iterator[Chunk]:
    """An event of SGLang's /generate: each contains the answer so far."""
    about = event["meta_info"]
    reason = about.get("finish_reason")
    is_last = bool(reason)
    found = Usage(
        _given(about, "prompt_tokens", MOST_PROMPT_TOKENS),
        _given(about, "cached_tokens", MOST_PROMPT_TOKENS),
        _given(about, "completion_tokens"),
    )
    ids = _ids(event.get("output_ids")) or _listed(about.get("output_token_logprobs"))
    prompt_ids = _listed(about.get("input_token_logprobs"))
    name = reason.get("type") if isinstance(reason, dict) else reason
    yield Chunk(
        index=_index(event),
        text=_text(event.get("text")),
        ids=ids,
        prompt_ids=prompt_ids if len(prompt_ids) == found.prompt else (),
        is_whole=True,
        usage=found,
        last=is_last,
        final={"finish_reason": name} if is_last else {},
    )


def _ollama(event: dict[str, Any]) -> Iterator[Chunk]:
    """An event of ollama's /api/generate or /api/chat. Its times are nanoseconds."""
    message, is_last = event.get("message"), event["done"]
    message = message if isinstance(message, dict) else event
    thought, text = message.get("thinking"), message.get("content", event.get("response"))
    usage = None
    if is_last and ("eval_count" in event or "prompt_eval_count" in event):
        times = {
            name: value / 1e6
            for name, key in (
                ("prompt_ms", "prompt_eval_duration"),
                ("predicted_ms", "eval_duration"),
            )
            if is_real(value := event.get(key), LONGEST_PART_MS * 1e6)
        }
        prompt = _given(event, "prompt_eval_count", MOST_PROMPT_TOKENS)
        usage = Usage(prompt, None, _given(event, "eval_count"), times)
    reason = event.get("done_reason") or "stop"
    yield Chunk(
        text=_text(thought) + _text(text),
        usage=usage,
        last=is_last,
        final={"finish_reason": reason} if is_last else {},
    )


def _response(event: dict[str, Any]) -> Iterator[Chunk]:
    """A reply of /v1/responses or /v1/messages in one piece."""
    parts: list[str] = []
    for item in [event] if is_message(event) else event["output"][:MOST_ANSWERS]:
        content = item.get("content") if isinstance(item, dict) else None
        listed = content if isinstance(content, list) else ()
        texts = (p.get("text", p.get("thinking")) for p in listed if isinstance(p, dict))
        parts += map(_text, texts)
    yield Chunk(text="".join(parts), timings=_timings(event), last=True, final=event)
    if (usage := _usage(event.get("usage"))) is not None:
        yield Chunk(usage=usage)


def _typed(event: dict[str, Any]) -> Iterator[Chunk]:
    """An event of /v1/responses or /v1/messages."""
    kind, timings = event["type"], _timings(event)
    if kind in ("response.completed", "response.incomplete", "response.failed"):
        response = event.get("response")
        final = (response if isinstance(response, dict) else {}) | event
        yield Chunk(timings=timings, last=True, final=final)
        if (usage := _usage(final.get("usage"))) is not None:
            yield Chunk(usage=usage)
    elif kind.endswith(".delta") and isinstance(event.get("delta"), str):
        yield Chunk(text=event["delta"], timings=timings)
    elif kind == "content_block_delta" and isinstance(event.get("delta"), dict):
        delta = event["delta"]
        text = next((delta[k] for k in ("text", "thinking", "partial_json") if k in delta), "")
        yield Chunk(text=_text(text), timings=timings)
    elif kind == "message_delta":
        delta = event.get("delta")
        final = (delta if isinstance(delta, dict) else {}) | event
        yield Chunk(timings=timings, usage=_usage(event.get("usage")), last=True, final=final)
    elif kind == "message_start" and isinstance(start := event.get("message"), dict):
        if (usage := _usage(start.get("usage"))) is not None:
            yield Chunk(usage=usage._replace(completion=None), timings=timings)
    elif timings is not None:
        yield Chunk(timings=timings)


def message(said: Mapping[Any, Any]) -> str:
    """The text added by a delta or a message of a chat: thinking, content, tool arguments."""
    if len(said) == 1 and isinstance(text := said.get("content"), str):
        return text
    thought = said.get("reasoning_content") or said.get("reasoning")
    parts = [_text(thought), _text(said.get("content"))]
    calls = said.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts += [_text(function.get("name")), _text(function.get("arguments"))]
    return "".join(parts)


def _ids(value: Any) -> Any:
    """Token ids, empty if a list contains anything else. An array of them has been checked."""
    if not value or not isinstance(value, list):
        return value if isinstance(value, array) else ()
    return tuple(value) if are_whole(value) else ()


def _listed(value: Any) -> tuple[int, ...]:
    """Ids from SGLang's log probabilities: for each token its log probability, id, and text."""
    rows = value if isinstance(value, list) else []
    return _ids([row[1] if isinstance(row, list) and len(row) > 1 else None for row in rows])


def _logged(logprobs: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ids and texts from tokens' log probabilities. An id has a key of its own, or replaces the
    text as vLLM's "token_id:9"."""
    if not isinstance(logprobs, dict):
        return (), ()
    content, names = logprobs.get("content"), logprobs.get("tokens")
    if isinstance(content, list):
        rows = [one for one in content if isinstance(one, dict)]
        texts, ids = [one.get("token") for one in rows], [one.get("id") for one in rows]
    else:
        texts = names if isinstance(names, list) else []
        ids = [None] * len(texts)
    written = [
        int(text[9:]) if isinstance(text, str) and _TOKEN_ID.fullmatch(text) else own
        for text, own in zip(texts, ids, strict=True)
    ]
    pieces = tuple(
        text for text in texts if isinstance(text, str) and not _TOKEN_ID.fullmatch(text)
    )
    return _ids(written), pieces if len(pieces) == len(texts) else ()


def _usage(said: Any) -> Usage | None:
    """`usage` of a reply, with OpenAI's or Anthropic's names."""
    if not isinstance(said, dict):
        return None
    first = "prompt_tokens" if "prompt_tokens" in said else "input_tokens"
    last = "completion_tokens" if "completion_tokens" in said else "output_tokens"
    details = said.get("prompt_tokens_details")
    details = details if isinstance(details, dict) else said.get("input_tokens_details")
    cached = None
    if isinstance(details, dict):
        cached = _given(details, "cached_tokens", MOST_PROMPT_TOKENS)
    prompt = _given(said, first, MOST_PROMPT_TOKENS)
    if "cache_read_input_tokens" in said:  # Anthropic's, which are not included in the prompt's
        cached = _given(said, "cache_read_input_tokens", MOST_PROMPT_TOKENS)
        prompt = None if prompt is None else prompt + (cached or 0)
    return Usage(prompt, cached, _given(said, last))


def _speed(stats: Any) -> dict[str, float]:
    """LM Studio's times of a reply, which are seconds."""
    if not isinstance(stats, dict):
        return {}
    found = {}
    for name, key, factor in (
        ("predicted_per_second", "tokens_per_second", 1.0),
        ("predicted_ms", "generation_time", 1e3),
    ):
        if is_real(value := stats.get(key)):
            found[name] = value * factor
    return found


def _timings(event: dict[str, Any]) -> Timings | None:
    """The counters of an event. Raises UnreadableError for an invalid counter."""
    said = event.get("timings")
    if not isinstance(said, dict) or said.get("predicted_n") is None:
        return None
    speed = said.get("predicted_per_second")
    return Timings(
        _count(said, "cache_n", MOST_PROMPT_TOKENS),
        _count(said, "prompt_n", MOST_PROMPT_TOKENS),
        _milliseconds(said, "prompt_ms"),
        _count(said, "predicted_n"),
        _milliseconds(said, "predicted_ms"),
        _count(said, "draft_n"),
        _count(said, "draft_n_accepted"),
        speed if is_real(speed) else None,
    )


def _given(said: dict[str, Any], name: str, most: int = MOST_TOKENS) -> int | None:
    """An optional count. Raises UnreadableError."""
    return None if said.get(name) is None else _count(said, name, most)


def _count(said: dict[str, Any], name: str, most: int = MOST_TOKENS) -> int:
    value = 0 if said.get(name) is None else said[name]
    if type(value) is int and 0 <= value <= most:  # as nearly all are
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not is_whole(value, most):
        raise UnreadableError(f"sent {name} = {_shown(value)}, which is not a count")
    return int(value)


def _milliseconds(said: dict[str, Any], name: str) -> float:
    value = 0.0 if said.get(name) is None else said[name]
    if type(value) is float and 0.0 <= value <= LONGEST_PART_MS:
        return value
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


def _shown(value: Any) -> str:
    return server_words(value, 40)


def server_words(value: Any, limit: int) -> str:
    """One line of printable characters, at most `limit`: it may reach a terminal."""
    return shorten(" ".join(str(value).split()), limit)
