"""Kept requests of a run: their bytes up to a limit, and facts without keys or headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from engine.observe.rounds.log_words import file_name

LONGEST_TEXT = 1 << 16
MOST_BYTES = 64 << 20
"""Limit per run; later data is dropped."""
_OVERHEAD = 64
_STOPS = {"length": "limit", "max_tokens": "limit", "none": "stopped"}
_STOPS |= dict.fromkeys(("eos", "end_turn"), "end")


def stop_of(final: Mapping[str, Any]) -> str:
    """Why an answer ended, by the trace's name if it has one."""
    if final.get("truncated") is True:
        return "context"
    told = final.get("stop_type") or final.get("finish_reason") or final.get("stop_reason")
    if not isinstance(told, str):
        return "limit" if final.get("status") == "incomplete" else "end"
    return _STOPS.get(told, told[:100])


def settings_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a request, without its text."""
    left_out = ("prompt", "messages", "input", "input_prefix", "input_suffix", "tools")
    found = {str(k)[:100]: as_fact(v) for k, v in body.items() if k not in left_out}
    return found | ({"tools": len(tools)} if isinstance(tools := body.get("tools"), list) else {})


def asked_facts(body: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a sent request."""
    return {
        "settings": settings_of(body),
        "prompt": prompt_text(body),
        "messages": messages_of(body),
    }


def prompt_text(body: Mapping[str, Any]) -> str | None:
    """The prompt, if it is a text."""
    prompt = body.get("prompt", body.get("input"))
    return prompt[:LONGEST_TEXT] if isinstance(prompt, str) else None


def n_answers_asked(body: Mapping[str, Any]) -> int:
    """Number of answers requested: for several prompts, or several for each."""
    prompt, n = body.get("prompt"), body.get("n")
    is_several = isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt)
    n_prompts = len(prompt) if isinstance(prompt, list) and is_several else 1
    return n_prompts * (n if isinstance(n, int) and n > 1 else 1)


def messages_of(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Role and text of a chat's messages."""
    messages, room = body.get("messages"), LONGEST_TEXT
    found = []
    for one in messages if isinstance(messages, list) else ():
        role, content = (one.get("role"), one.get("content")) if isinstance(one, dict) else (0, 0)
        if not isinstance(role, str) or not isinstance(content, str) or len(content) > room:
            return []
        room -= len(content)
        found.append({"role": role[:100], "content": content})
    return found


def as_fact(value: Any) -> Any:
    """A value in the form that facts may have: scalars, and short lists and objects of them."""
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    if isinstance(value, dict):
        return {str(k)[:100]: _inner_fact(v) for k, v in list(value.items())[:200]}
    if isinstance(value, list):
        return [_inner_fact(v) for v in value[:1000]]
    return value if isinstance(value, (int, float, bool)) else None


def _inner_fact(value: Any) -> Any:
    if isinstance(value, str):
        return value[:1000]
    if isinstance(value, list):
        return [_plain_item(v) for v in value[:100]]
    return value if isinstance(value, (int, float, bool)) else None


def _plain_item(value: Any) -> Any:
    """An entry of a list setting, such as a token and its bias."""
    if isinstance(value, list):
        return [_plain_item(v) for v in value[:2] if not isinstance(v, (list, dict))]
    if isinstance(value, dict):
        return {str(k)[:100]: v for k, v in list(value.items())[:8] if isinstance(v, (int, float))}
    return value[:1000] if isinstance(value, str) else _inner_fact(value)


def server_of(given: str, props: Mapping[str, Any]) -> dict[str, Any]:
    """A server by its address, without credentials, and facts from /props."""
    shown = given
    if "//" in given:
        address = urlsplit(given)
        shown = f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
    found = {"address": shown, "build_info": as_fact(props.get("build_info"))}
    for name in ("total_slots", "model_alias", "n_ctx"):
        if name in props:
            found[name] = as_fact(props[name])
    defaults = props.get("default_generation_settings")
    if isinstance(defaults, dict) and isinstance(defaults.get("n_ctx"), int):
        found["n_ctx"] = defaults["n_ctx"]
    return found


def model_of(
    props: Mapping[str, Any], models: Mapping[str, Any], named: str = ""
) -> dict[str, Any] | None:
    """The model by its file's name, with facts from /v1/models. named: its name in requests."""
    data = models.get("data")
    first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
    path = props.get("model_path") or named or first.get("id")
    if not isinstance(path, str) or props.get("role") == "router":
        return None  # each request of a router names its model
    meta = first.get("meta")
    return {"name": file_name(path), "meta": as_fact(meta) if isinstance(meta, dict) else {}}


@dataclass(slots=True)
class RawRequest:
    """One request and its reply, kept by a run or read from a capture. pieces: of the body, with
    arrival times. Times are milliseconds since the run began. has_left: the client disconnected
    early. is_whole: nothing was dropped for lack of space."""

    path: str
    body: Mapping[str, Any]
    sent_ms: float
    head_ms: float = 0.0
    done_ms: float = 0.0
    status: int = 0
    content_type: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    has_left: bool = False
    broke: str = ""
    is_whole: bool = True


class RawStore:
    """The requests of a run and the server's log, up to MOST_BYTES in total."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.requests: list[RawRequest] = []
        self.log: list[str] = []
        self.metrics: tuple[str, str] | None = None
        self._room = most_bytes

    @property
    def is_whole(self) -> bool:
        """Whether everything was kept."""
        return self._room >= 0

    def request(self, path: str, body: Mapping[str, Any], at_ms: float) -> RawRequest | None:
        """Add a request. None if there is no space."""
        if not self._take(len(json.dumps(body))):
            return None
        found = RawRequest(path, body, at_ms, at_ms, at_ms)
        self.requests.append(found)
        return found

    def data(self, request: RawRequest, piece: bytes, at_ms: float) -> None:
        """Add a piece of a reply's body."""
        if request.is_whole and self._take(len(piece)):
            request.pieces.append((at_ms, piece))
        else:
            request.is_whole = False

    def add_log(self, text: str) -> None:
        """Add a part of the log."""
        if self._take(len(text)):
            self.log.append(text)

    def _take(self, size: int) -> bool:
        """Whether there is space. Once there was none, nothing more is kept, so that there are no
        gaps."""
        if self._room >= 0:
            self._room -= size + _OVERHEAD
        return self._room >= 0
