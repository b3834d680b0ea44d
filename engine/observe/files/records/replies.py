"""Replies among the objects of a file: grouping of events, and the token data of replies without
timings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import ge
from typing import Any

from engine.errors import TraceFileError
from engine.foreign import are_whole, is_real
from engine.observe.files.records.document import nodes
from engine.observe.files.records.readers import READERS
from engine.observe.files.records.request import RecordedRequest, sum_figures, sums_of
from engine.observe.rounds.answer import EmittedTokens
from engine.observe.rounds.counters import Movement
from engine.observe.rounds.kept_requests import stop_of
from engine.observe.rounds.stream import UnreadableError, chunks, is_message, is_reply
from engine.observe.rounds.stream_rounds import Addition

_SIGNS = {key for shape in READERS for key in shape.keys}
_MOST_OPEN = 64
"""Replies that the next event may belong to."""


_BUILD = re.compile(r"b\d{1,8}-")
_MARKS = {
    "llama-server": {"tokens_predicted", "__verbose", "generation_settings"},
    "sglang": {"meta_info", "sglext", "matched_stop"},
    "ollama": {"done", "eval_count"},
    "lm-studio": {"stats", "model_info", "runtime"},
    "vllm": {"prompt_token_ids", "token_ids", "kv_transfer_params", "prompt_logprobs"},
}
"""Keys of a reply, or of an answer in it, that only one engine writes."""
_ALL_MARKS = set[str]().union(*_MARKS.values())
_USED = {"choices", "usage", "model", "id", "object", "created", "text"} | {
    *("output_ids", "token_ids", "prompt_token_ids")
}
_ASKED = {"prompt", "messages", "input_ids", "sampling_params"}
"""Keys of a request that no reply has; the last two are SGLang's."""


@dataclass(slots=True)
class KeptReply:
    """The events of one reply, or the reply in one piece as the only one.

    events: objects, and tuples of additions. place: of the first. request: as sent, if it is kept
    next to the reply.
    """

    place: str
    request: Mapping[str, Any]
    events: list[Any] = field(default_factory=list)
    name: str = ""
    done: set[int] = field(default_factory=set)
    """Answers that have ended."""
    _clocks: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _counts: dict[int, list[float]] = field(default_factory=dict)

    def takes(self, event: dict[str, Any], name: str, answers: list[tuple[int, bool]]) -> bool:
        """Whether an event, not a whole reply, may belong to this one: it has its name, and its
        answers are still open. answers: see `_answers_in`."""
        if name:
            return True
        first = self.events[0]
        signs = () if event.keys() == first.keys() else ("choices", "meta_info", "done")
        is_same_form = all((key in event) == (key in first) for key in signs)
        return is_same_form and all(self._may_follow(index, event) for index, _ in answers)

    def _may_follow(self, index: int, event: dict[str, Any]) -> bool:
        """Whether counters allow it, for streams without names."""
        timings = _timings_of(event)
        if timings is None:
            return True
        if self._clocks.get(index, clock := _clock(timings)) != clock:
            return False
        return all(map(ge, _growing(timings, math.inf), self._counts.get(index, ())))

    def add(self, event: dict[str, Any], answers: list[tuple[int, bool]]) -> None:
        """Add an event."""
        self.events.append(event)
        timings = _timings_of(event)
        for index, is_last in answers:
            if is_last:
                self.done.add(index)
            if timings is not None and timings.get("predicted_n"):
                self._clocks[index] = _clock(timings)
                self._counts[index] = _growing(timings, 0)


def kept_replies(documents: Sequence[tuple[str, Any]]) -> Iterator[KeptReply]:
    """The replies of a file, in the order of their first events."""
    found: list[KeptReply] = []
    open_ones: list[KeptReply] = []
    reply: KeptReply | None = None
    for place, event, around in _events(documents):
        if isinstance(event, tuple):  # of the same reply as the previous event
            if reply is not None:
                reply.events.append(event)
            continue
        if not is_reply(event):  # an error belongs to what came before it
            if open_ones:
                open_ones[-1].events.append(event)
            continue
        name, answers = _name(event), _answers_in(event)
        indices = {index for index, _ in answers}
        open_now = () if _is_complete(event) else reversed(open_ones)
        named = (one for one in open_now if not one.done & indices and one.name == name)
        reply = next((one for one in named if one.takes(event, name, answers)), None)
        if reply is None:
            reply = KeptReply(place, _request(around), name=name)
            found.append(reply)
            open_ones = [*open_ones[1 - _MOST_OPEN :], reply]
        reply.add(event, answers)
    yield from found


class PlainReplies:
    """Reads replies without timings for a run, see engine.observe.rounds.answer.PlainReader."""

    def answers(
        self, tokens: Mapping[int, EmittedTokens], events: Sequence[Mapping[str, Any]]
    ) -> Iterable[RecordedRequest]:
        """The known data of each answer of a reply."""
        if not tokens:
            return
        counts = counts_in(events)
        for one in recorded(tokens, {0: counts} if counts is not None else {}):
            one.engine = one.engine or (engine_of(events[0]) if events else "")
            yield one

    def figures(self, records: Sequence[RecordedRequest], moved: Movement | None) -> dict[str, Any]:
        """Figures of several answers together."""
        found = sum_figures(records)
        if found.get("num_draft_tokens") is None and moved is not None:
            known = sum_figures([sums_of(moved)])
            found |= {name: value for name, value in known.items() if found.get(name) is None}
        return found


def recorded(
    answers: Mapping[int, EmittedTokens], counts: Mapping[int, RecordedRequest]
) -> Iterator[RecordedRequest]:
    """The known data of each answer of a reply without timings. counts: speculation data by
    answer."""
    first = next(iter(answers.values()))
    for index, answer in answers.items():
        one = counts.get(index) or RecordedRequest("", "")
        n = answer.n_tokens
        if len(answers) > 1:  # the reply's count is the sum of all
            n = answer.n_ids or None
        if "predicted_n" not in one.timings:
            n_prompt = first.n_prompt if one.prompt_tokens is None else one.prompt_tokens
            one.set_tokens(n_prompt, first.n_cached, n)
        one.timings = {**answer.times, **one.timings}
        emitted, ms = (one.timings.get(name) for name in ("predicted_n", "predicted_ms"))
        if emitted and ms:  # in Ollama's form
            one.timings.setdefault("predicted_per_second", 1e3 * emitted / ms)
        one.prompt_ids = answer.prompt_ids or first.prompt_ids
        one.chunks, one.tokens = answer.events, answer.tokens(n)
        _, texts = one.tokens
        if None in texts or not texts:
            one.text = answer.text
        one.learn_steps()
        yield one


def counts_in(events: Sequence[Mapping[str, Any]]) -> RecordedRequest | None:
    """Speculation data in the last of a server's events."""
    every = nodes("reply", [("", list(events))], _SIGNS)
    for node in reversed(every):
        for shape in READERS:
            if shape.sign_of(node.values):
                try:
                    return shape.read(node)
                except TraceFileError as error:
                    found = RecordedRequest("", "")
                    found.contradictions.append((("reply",), error.message.rstrip(".")))
                    return found
    return None


def read_reply(
    reply: KeptReply, counts: Mapping[int, RecordedRequest], taken: dict[int, set[str]], file: str
) -> list[RecordedRequest]:
    """The requests of a reply without timings, one per answer. counts: speculation data by answer.
    taken: see `Node`. file: its name. Raises TraceFileError."""
    answers: dict[int, EmittedTokens] = {}
    stops: dict[int, str] = {}
    try:
        for event in reply.events:
            if isinstance(event, dict):
                taken.setdefault(id(event), set()).update(_USED)
            for chunk in chunks(event):
                answers.setdefault(chunk.index, EmittedTokens()).take(chunk)
                if chunk.last:
                    stops[chunk.index] = stop_of(chunk.final)
    except UnreadableError as error:
        raise TraceFileError(
            f"{file}: {reply.place or 'the reply'} {error}.",
            "Save the reply again as the engine wrote it.",
        ) from error
    if not answers:  # just an error
        answers[0] = EmittedTokens()
    found = list(recorded(answers, counts))
    begin = reply.events[0]
    named = (begin, begin.get("message"), begin.get("response"))
    models = (one.get("model") for one in named if isinstance(one, dict))
    model = next((one[:1000] for one in models if isinstance(one, str)), "")
    for index, one in zip(answers, found, strict=True):
        one.place = one.place or reply.place
        one.engine = one.engine or engine_of(begin)
        one.model = one.model or model
        one.stop = one.stop or stops.get(index, "")
        one.asked = reply.request
        asked = one.asked.get("input_ids", one.asked.get("prompt"))
        if not one.prompt_ids and isinstance(asked, list) and are_whole(asked):
            one.prompt_ids = tuple(asked)
    return found


def engine_of(event: Mapping[str, Any]) -> str:
    """The engine of a reply, as far as its keys tell."""
    choices = event.get("choices")
    listed = choices if isinstance(choices, list) else []
    keys = set(event).union(*(one for one in listed if isinstance(one, dict)))
    build = event.get("system_fingerprint")
    if isinstance(build, str) and _BUILD.match(build):
        return "llama-server"
    if build == "fp_ollama":
        return "ollama"
    if keys.isdisjoint(_ALL_MARKS):
        return ""
    return next(name for name, marks in _MARKS.items() if not marks.isdisjoint(keys))


def _events(documents: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Events and replies anywhere in documents, tuples of additions between them, and error
    objects."""

    def walk(
        items: Iterable[tuple[Any, Any]], place: str, around: tuple[Any, ...]
    ) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
        for is_addition, some in groupby(items, lambda item: isinstance(item[1], Addition)):
            if is_addition:
                yield "", tuple(one for _, one in some), ()
                continue
            for key, one in some:
                here = f"{place}.{key}" if place else str(key)
                if isinstance(one, list):
                    yield from walk(enumerate(one), here, (*around, one))
                elif isinstance(one, dict):
                    if is_reply(one) or (isinstance(one.get("error"), dict) and len(one) < 4):
                        yield here, one, around
                    else:
                        yield from walk(one.items(), here, (*around, one))

    yield from walk(documents, "", ())


def _request(around: tuple[Any, ...]) -> Mapping[str, Any]:
    """The request that a script has kept next to the reply."""
    for one in reversed(around):
        if not isinstance(one, dict):
            continue
        for value in (one, *(one.get(key) for key in ("request", "body", "payload"))):
            if isinstance(value, dict) and not _ASKED.isdisjoint(value):
                return value
    return {}


def _name(event: dict[str, Any]) -> str:
    """Identifies a stream's events."""
    if isinstance(event.get("type"), str):  # of whose events most have none
        return ""
    for one in (event, event.get("meta_info")):
        if isinstance(one, dict) and isinstance(one.get("id"), str):
            return str(one["id"])[:200]
    return ""


def _is_complete(event: dict[str, Any]) -> bool:
    """Whether an event has the form of a reply in one piece."""
    choices = event.get("choices")
    if isinstance(choices, list):
        return any(isinstance(one, dict) and "message" in one for one in choices)
    return event.get("object") == "response" or is_message(event)


def _answers_in(event: dict[str, Any]) -> list[tuple[int, bool]]:
    """The answers in an event, and whether each ends there."""
    choices = event.get("choices")
    if isinstance(choices, list):
        return [
            (_index(one), isinstance(one.get("finish_reason"), str))
            for one in choices
            if isinstance(one, dict)
        ]
    about = event.get("meta_info")
    if isinstance(about, dict):
        return [(_index(event), bool(about.get("finish_reason")))]
    kind = event.get("type")
    if isinstance(kind, str):
        is_end = kind in ("response.completed", "response.incomplete", "response.failed")
        return [(0, is_end or kind == "message_stop")] if kind != "response.created" else []
    return [(_index(event), event.get("stop") is True or event.get("done") is True)]


def _index(one: dict[str, Any]) -> int:
    index = one.get("index", 0)
    return index if isinstance(index, int) else 0


def _timings_of(event: dict[str, Any]) -> dict[str, Any] | None:
    timings = event.get("timings")
    known = timings if isinstance(timings, dict) else {}
    return known if "predicted_n" in known and "draft_rounds" not in known else None


def _clock(timings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Values that are equal in all timings of one answer."""
    return tuple(timings.get(name) for name in ("cache_n", "prompt_n", "prompt_ms"))


def _growing(timings: Mapping[str, Any], unknown: float) -> list[float]:
    """Values that never fall in the timings of one answer."""
    counts = (timings.get(name) for name in ("predicted_n", "predicted_ms"))
    return [one if is_real(one) else unknown for one in counts]
