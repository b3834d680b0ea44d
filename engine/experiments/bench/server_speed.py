"""Decoding speed of a server: greedy streamed requests in sequence, timed from the first generated
token to the last by the server's `timings` if present, else by our clock."""

from __future__ import annotations

import http.client
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from engine.errors import ApiKeyError, PeerLibraryError, ServerError
from engine.foreign import COUNT

Prompt = str | Sequence[int]
"""A text, or its tokens."""
_LONGEST_LINE = 2**22
_LONGEST_TEXT = 2**24
_AGAIN_S, _LONGEST_S = 0.1, 1800.0


@dataclass(frozen=True, slots=True)
class TimedReply:
    """One request. n_tokens: after the first one, generated in `seconds`. drafted, accepted:
    reported by the server, or None. rounds: tokens drafted and accepted in each, if requested and
    reported per token."""

    text: str
    n_tokens: int
    seconds: float
    drafted: int | None = None
    accepted: int | None = None
    rounds: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ServerPass:
    """The replies to all prompts, which took took_s seconds by our clock, prompts included."""

    answers: tuple[TimedReply, ...]
    took_s: float = 0.0

    @property
    def prompt_s(self) -> float:
        """Seconds per request in addition to its tokens."""
        generating = sum(one.seconds for one in self.answers)
        return max(0.0, self.took_s - generating) / max(1, len(self.answers))

    def speed(self, rates: Sequence[float] = ()) -> float:
        """Tokens per second over all of them, 0 if untimed. rates: acceptance probabilities up to
        each place; then their expected value counts instead of the random outcome if rounds are
        known, and the median of the replies, which differ in nothing else."""
        of = [[one] for one in self.answers] if rates else [self.answers]
        return statistics.median([_speed(answers, rates) for answers in of if answers] or [0.0])

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(one.text for one in self.answers)

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens, None without drafts or if unknown."""
        drafted = sum(one.drafted or 0 for one in self.answers)
        return sum(one.accepted or 0 for one in self.answers) / drafted if drafted else None


def _speed(answers: Sequence[TimedReply], rates: Sequence[float]) -> float:
    seconds = sum(one.seconds for one in answers)
    luck = sum(a - sum(rates[:n]) for one in answers for n, a in one.rounds if rates)
    return (sum(one.n_tokens for one in answers) - luck) / seconds if seconds > 0 else 0.0


class TimedServer:
    """An OpenAI-compatible server at an address such as http://127.0.0.1:8080. key: sent as a
    bearer token; empty for none."""

    def __init__(self, url: str, key: str = "") -> None:
        self._parts = urlsplit(url if "//" in url else f"http://{url}")
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ServerError(f"{url} is not the address of a server.", "Write http://HOST:PORT.")
        self._heads = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            self._heads["Authorization"] = f"Bearer {key}"
        self._model = ""
        self.n_params = 0
        """Parameters of its model, 0 if not reported."""
        self.pid: int | None = None
        """Process id, if this process started it."""
        self.until = math.inf
        """Deadline for replies, by time.monotonic()."""

    @property
    def url(self) -> str:
        return self._parts.geturl()

    def is_ready(self) -> bool:
        """Whether it lists its models, of which the first is used, and has loaded it. Raises
        ApiKeyError."""
        try:
            status, reply = self._request("GET", "/v1/models", None)
            raw = reply.read(_LONGEST_LINE)
            reply.close()
            if status in (401, 403):
                raise ApiKeyError(
                    f"{self.url} does not accept the API key.",
                    "Name the variable that holds it with --api-key-env.",
                )
            listed = json.loads(raw)["data"]
            self._model = str(listed[0]["id"]) if status == 200 else ""
            self.n_params = int((listed[0].get("meta") or {}).get("n_params", 0))
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return False
        # a llama-server lists models while it loads
        return bool(self._model) and self._is_healthy()

    def wait(self, check: Callable[[], None], most_s: float, remedy: str) -> None:
        """Wait until it is ready. check: raises once it has ended. Raises PeerLibraryError, with
        this remedy, after most_s seconds."""
        until = time.monotonic() + most_s
        while not self.is_ready():
            check()
            if time.monotonic() > until:
                raise PeerLibraryError(f"{self.url} was not ready within {most_s:.0f} s.", remedy)
            time.sleep(_AGAIN_S)

    def ask(
        self, prompts: Sequence[Prompt], n_predict: int, *, ignore_eos: bool, by_round: bool = False
    ) -> ServerPass:
        """Replies to the prompts, in sequence. by_round: with their rounds, from a llama-server.
        Raises ServerError."""
        more = {"ignore_eos": ignore_eos} | ({"timings_per_token": True} if by_round else {})
        began = time.perf_counter()
        answers = tuple(self._answer(text, n_predict, more) for text in prompts)
        return ServerPass(answers, time.perf_counter() - began)

    def _is_healthy(self) -> bool:
        try:
            status, reply = self._request("GET", "/health", None)
            reply.close()
        except (OSError, http.client.HTTPException):
            return False
        return status in (200, 404)  # not every server has it

    def _answer(self, prompt: Prompt, n_predict: int, more: Mapping[str, bool]) -> TimedReply:
        body = {
            "model": self._model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": n_predict,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": False,
            **more,
        }
        try:
            status, reply = self._request("POST", "/v1/completions", body)
            with reply:
                if status == 200:
                    return _read(reply, self.until)
                words = reply.read(500).decode(errors="replace")
            raise ServerError(
                f"{self.url}/v1/completions answered with status {status}: {words[:200]}.",
                "Check whether the server's command works on its own.",
            )
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() >= self.until:
                raise ServerError(
                    f"{self.url} did not answer a request within the time limit.",
                    "Give it more time with --budget, or check its log.",
                ) from error
            raise ServerError(
                f"{self.url} did not answer a request: {error or type(error).__name__}.",
                "Check whether the server is still running, and its log.",
            ) from error

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[int, http.client.HTTPResponse]:
        https = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        left = max(_AGAIN_S, min(_LONGEST_S, self.until - time.monotonic()))
        connection = kind(self._parts.netloc, timeout=left)
        text = None if body is None else json.dumps(body)
        try:
            connection.request(method, f"{self._parts.path.rstrip('/')}{path}", text, self._heads)
            reply = connection.getresponse()
        except (OSError, http.client.HTTPException):
            connection.close()
            raise
        return reply.status, reply


def _read(reply: http.client.HTTPResponse, until: float) -> TimedReply:
    """A streamed completion. Raises ValueError if invalid, TimeoutError after `until`."""
    pieces: list[str] = []
    first = last = 0.0
    n_tokens, timings = 0, {}
    counts: dict[float, tuple[int, int]] = {}
    for event in _events(reply):
        if time.monotonic() >= until:
            raise TimeoutError
        usage, choices = event.get("usage"), event.get("choices")
        if isinstance(event.get("timings"), dict):
            timings = event["timings"]
            ended = timings.get("predicted_ms")
            if isinstance(ended, (int, float)):  # equal for all tokens of a round
                sums = (_whole(timings, name) or 0 for name in ("draft_n", "draft_n_accepted"))
                counts.setdefault(float(ended), (next(sums), next(sums)))
        if isinstance(usage, dict):
            n_tokens = _whole(usage, "completion_tokens") or n_tokens
        piece = choices[0].get("text") if choices else None
        if isinstance(piece, str) and piece:
            last = time.perf_counter()
            first = first or last
            pieces.append(piece)
            if sum(map(len, pieces)) > _LONGEST_TEXT:
                raise ValueError("its answer has no end")
    text = "".join(pieces)
    drafted, accepted = _whole(timings, "draft_n"), _whole(timings, "draft_n_accepted")
    ms, n_timed = timings.get("predicted_ms"), _whole(timings, "predicted_n")
    if isinstance(ms, (int, float)) and 0 < ms < 1e9 and n_timed:
        in_order = [counts[at] for at in sorted(counts)]
        rounds = tuple((b[0] - a[0], b[1] - a[1]) for a, b in pairwise(in_order))
        return TimedReply(text, n_timed, ms / 1e3, drafted, accepted, rounds)
    if not n_tokens:
        raise ValueError("its answer does not have the number of tokens")
    return TimedReply(text, max(n_tokens - 1, 0), last - first, drafted, accepted)


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := reply.readline(_LONGEST_LINE):
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError("an event of its answer is not an object")
            if "error" in event:
                raise ValueError(f"its answer is an error: {str(event['error'])[:200]}")
            yield event


def _whole(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) and 0 <= value <= COUNT else None
