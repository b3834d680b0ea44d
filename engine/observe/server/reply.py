"""Responses of a server: requested, read within time and size limits, put into an inbox; the time
limits as options, and what is awaited under them."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from engine.errors import ServerError, ServerTimeoutError
from engine.observe.rounds.stream import server_words
from engine.observe.server.errors import (
    again_after_s,
    cut_short,
    foreign,
    is_loading,
    refusal,
    unreachable,
)
from engine.option_fields import NumberRange, check, option

if TYPE_CHECKING:
    import httpcore
    import httpx

_SHOWN_AFTER_S = 2.0
_SET_BY = {
    "--connect-timeout": "in the terminal --connect-timeout",
    "--timeout": "--timeout, in the window the dialog Connect to server,",
}
_SECONDS = NumberRange(0.0, 1e6, "Name a number of seconds up to 1000000.", is_open=True)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of a server, seconds. Only complete units count as progress: bytes that do not
    complete a header block, an event or a short response extend no limit. Raises OptionError."""

    GROUP: ClassVar[str] = "server"
    connect_timeout: float = option(
        10.0,
        "--connect-timeout S  time limit for a connection, and for a whole short reply such as "
        "that of /props, in seconds",
        _SECONDS,
    )
    timeout: float = option(
        600.0,
        "--timeout S  time limit for the headers of a reply, for its first event and between two "
        "events, in seconds; on a CPU a long prompt takes minutes",
        _SECONDS,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class Wait:
    """Something awaited from a server. what: such as "the headers of URL". limit: seconds, set by
    the option `flag`. since: `time.perf_counter`. is_connected: a connection was made."""

    what: str
    limit: float
    flag: str
    since: float
    is_connected: bool = True

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return perf_counter() - self.since

    @property
    def sentence(self) -> str:
        """For the user, without a full stop; empty while it is short."""
        if self.seconds < _SHOWN_AFTER_S:
            return ""
        return f"waiting for {self.what}, {int(self.seconds)} of {self.limit:g} s"

    @property
    def error(self) -> ServerError:
        """The error once the limit is reached."""
        kind = ServerTimeoutError if self.is_connected else ServerError
        return kind(
            f"Waiting for {self.what} took more than {self.limit:g} s.",
            f"Check whether the server is working; {_SET_BY[self.flag]} sets the limit.",
        )


class Awaited:
    """What a request waits for; set by the thread that reads, read by any other."""

    def __init__(self) -> None:
        self._wait: Wait | None = None
        self.loading: Wait | None = None
        """The loading of the server's model, which is polled."""

    @property
    def wait(self) -> Wait | None:
        """The current wait."""
        return self.loading or self._wait

    def begin(self, wait: Wait) -> None:
        """Start a wait."""
        self._wait = wait

    def load(self, address: str, limits: TimeLimits, todo: str = "load its model") -> None:
        """The server reports that it is loading its model, or has no room. Raises ServerError at
        the limit."""
        if self.loading is None:
            what, now = f"{address} to {todo}", perf_counter()
            self.loading = Wait(what, limits.timeout, "--timeout", now)
        if self.loading.seconds > self.loading.limit:
            raise self.loading.error


CONNECT_S = 10.0
"""Time limit of a connection, and of a response about the server, seconds."""
RESUME_S = 5.0
"""How long resuming a lost stream is tried at a server that does not answer, seconds."""
AGAIN_S = 0.25
"""Interval between requests to a server that is not ready, seconds."""
_LARGEST_ERROR = 2**20
_CONVERSATION = "X-Conversation-Id"

Tell = Callable[..., None]
MOST_HEAD_BYTES = 96 << 10
"""Most bytes of response headers, including all interim responses (1xx) before them."""
_INBOX_BYTES = 2**20
_OVERHEAD = 512
"""Memory of an arrival in addition to its data, bytes."""


class Reply:
    """A stream that is read to its end, over several connections if necessary."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        address: str,
        path: str,
        content: bytes,
        inbox: Inbox,
        conversation: str | None,
        tell: Tell,
        limits: TimeLimits,
        awaited: Awaited,
        replay: str,
    ) -> None:
        """replay: the path of a lost stream, for which this reply names the first byte."""
        self._http, self._address, self._replay = http, address, replay
        self._inbox, self._tell = inbox, tell
        self._path, self._content, self._conversation = path, content, conversation
        self._limits, self._awaited = limits, awaited
        self._gathered: list[bytes] = []
        self._n_read = 0
        self._has_begun = False

    async def read(self) -> None:
        """Read the stream. Raises ServerError if it is refused or breaks for good."""
        while wait := await self._ask():
            await asyncio.sleep(wait)

    async def _ask(self) -> float:
        """Send the request and read the response; returns the seconds after which to retry with a
        server that is not ready, 0.0 after reading it."""
        import httpx

        headers = {"Content-Type": "application/json"}
        if self._conversation is not None:
            headers[_CONVERSATION] = self._conversation
        try:
            async with exchange(
                self._http,
                "POST",
                self._path,
                self._awaited,
                connect_s=self._limits.connect_timeout,
                head_s=self._limits.timeout,
                content=self._content,
                headers=headers,
            ) as response:
                if response.status_code != 200:
                    raw = await self._error_body(response)
                    if is_loading(response.status_code, raw):
                        self._awaited.load(self._address, self._limits)
                        return AGAIN_S
                    wait = again_after_s(response.status_code, raw, response.headers)
                    if 0.0 < wait <= self._limits.timeout:
                        self._awaited.load(self._address, self._limits, "take the request")
                        return wait
                    self._tell("head", status=response.status_code, headers=dict(response.headers))
                    raise refusal(self._address, self._path, response.status_code, raw)
                self._awaited.loading = None
                self._has_begun = True
                self._tell("head", status=200, headers=dict(response.headers))
                kind = response.headers.get("Content-Type", "").split(";")[0]
                if kind not in ("text/event-stream", "application/json"):  # or in one piece
                    raise foreign(self._address, self._path, kind)
                await self._pass_on(response)
        except (httpx.TransportError, ssl.SSLError, OSError) as error:
            if not self._has_begun:
                raise unreachable(self._address, error) from error
            await self._resume(cut_short(self._address))
        return 0.0

    async def _resume(self, lost: ServerError) -> None:
        """Resume after a broken connection, with retries. Raises `lost` if that fails."""
        import httpx

        if self._conversation is None:
            raise lost
        self._tell("lost", reason=lost.message)
        until = perf_counter() + RESUME_S
        while perf_counter() < until:
            seconds, before = until - perf_counter(), self._n_read
            try:
                async with exchange(
                    self._http,
                    "GET",
                    f"{self._replay}&from={self._n_read}",
                    Awaited(),
                    connect_s=seconds,
                    head_s=seconds,
                ) as response:
                    if response.status_code == 200:
                        self._tell("resumed")
                        await self._pass_on(response)
                        return
                    raw = await self._error_body(response)
                    if not is_loading(response.status_code, raw):
                        raise lost  # restarted, or its buffer was too small
            except (httpx.TransportError, ssl.SSLError, OSError):
                pass
            except ServerError as error:
                if error is lost:
                    raise
            if self._n_read > before:
                until = perf_counter() + RESUME_S
            await asyncio.sleep(AGAIN_S)
        raise lost

    async def _error_body(self, response: httpx.Response) -> bytes:
        """The body of an error, as far as it arrives soon."""
        try:
            async with asyncio.timeout(self._limits.connect_timeout):
                return await read_body(response, _LARGEST_ERROR, cut=True)
        except TimeoutError:
            return b""

    async def _pass_on(self, response: httpx.Response) -> None:
        """Put the body into the inbox; each read of the connection is one piece."""
        loop = asyncio.get_running_loop()
        try:
            async for piece in response.aiter_raw():
                if not self._gathered:
                    loop.call_soon(self._hand_over)  # runs when this task next awaits
                self._gathered.append(piece)
                while self._inbox.is_full:
                    await asyncio.sleep(0.01)
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        piece, self._gathered = b"".join(self._gathered), []
        if piece:
            self._n_read += len(piece)
            self._tell("data", data=piece)


class OverLong(Exception):  # noqa: N818 - becomes a ServerError with the path
    """A short response that is too long."""


async def read_body(response: httpx.Response, most: int, *, cut: bool = False) -> bytes:
    """A complete response. most: bytes; a longer one is cut there, or raises OverLong."""
    raw = bytearray()
    async for piece in response.aiter_raw():
        raw += piece
        if len(raw) > most:
            if cut:
                break
            raise OverLong
    return bytes(raw)


@asynccontextmanager
async def exchange(
    http: httpx.AsyncClient,
    method: str,
    path: str,
    awaited: Awaited,
    *,
    connect_s: float,
    head_s: float | None = None,
    **sent: Any,
) -> AsyncIterator[httpx.Response]:
    """Send a request; read the response's body with `aiter_raw`.

    connect_s: time limit of the connection, and without head_s of everything until the context is
    left. head_s: time limit of the headers, from when the request was sent; the body then has none
    here. sent: as for httpx. Raises ServerError for a server that cannot be reached, is too slow,
    sends endless headers or an encoding that was not requested, and httpx's errors while the body
    is read.
    """
    import httpx

    address = f"{http.base_url}".rstrip("/")
    url = address + path.partition("?")[0]
    trace = _Trace(url, awaited, connect_s, head_s)
    try:
        async with asyncio.timeout(connect_s) as trace.deadline:
            request = http.build_request(
                method, path, timeout=None, extensions={"trace": trace}, **sent
            )
            try:
                response = await http.send(request, stream=True)
            except (httpx.TransportError, ssl.SSLError, OSError) as error:
                raise unreachable(address, error) from error
            try:
                check_encoding(url, response.headers)
                if head_s is not None:
                    trace.deadline.reschedule(None)
                yield response
            finally:
                await response.aclose()
    except TimeoutError as error:
        if trace.wait is None or not trace.deadline.expired():
            raise
        raise trace.wait.error from error


def check_encoding(url: str, headers: Mapping[str, str]) -> None:
    """Raises ServerError for an encoded response: only identity was requested, and nothing that a
    server sends is decompressed."""
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ServerError(
            f"{url} answers in the encoding {server_words(encoding, 40)}, which was not requested.",
            "Switch compression off in the proxy in front of the server.",
        )


class _Trace:
    """Follows a request from the connection to the headers, by httpcore's trace events."""

    deadline: asyncio.Timeout

    def __init__(self, url: str, awaited: Awaited, connect_s: float, head_s: float | None) -> None:
        self._url, self._awaited, self._head_s = url, awaited, head_s
        self._room = MOST_HEAD_BYTES
        self._is_in_head = False
        what = f"a connection to {url}"
        self.wait = Wait(what, connect_s, "--connect-timeout", perf_counter(), False)
        awaited.begin(self.wait)

    async def __call__(self, name: str, info: dict[str, Any]) -> None:
        if name.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._limit(info["return_value"])
        elif name.endswith("receive_response_headers.started"):
            self._is_in_head = True
            self._await_head()
        elif name.endswith("receive_response_headers.complete"):
            self._is_in_head = False

    def _await_head(self) -> None:
        before = self.wait
        if self._head_s is None:
            self.wait = Wait(f"the reply of {self._url}", before.limit, before.flag, before.since)
        else:
            self.wait = Wait(
                f"the headers of {self._url}", self._head_s, "--timeout", perf_counter()
            )
            self.deadline.reschedule(asyncio.get_running_loop().time() + self._head_s)
        self._awaited.begin(self.wait)

    def _limit(self, stream: httpcore.AsyncNetworkStream) -> None:
        """Limit the header bytes that a connection reads: httpx skips interim responses without a
        limit."""
        read = stream.read

        async def limited(max_bytes: int, timeout: float | None = None) -> bytes:
            piece = await read(max_bytes, timeout)
            if self._is_in_head:
                self._room -= len(piece)
                if self._room < 0:
                    raise ServerError(
                        f"{self._url} sends too many headers or interim responses (1xx).",
                        "Name the address and port of a llama-server.",
                    )
            return piece

        stream.read = limited  # type: ignore[method-assign]


What = Literal["request", "head", "data", "lost", "resumed", "done", "broke", "left", "unrecorded"]


@dataclass(frozen=True, slots=True)
class ExchangeEvent:
    """An event of a request. at: seconds of the recorder's clock.

    head: the response began (status, headers). data: a piece of its body. lost: the connection
    broke and is being resumed (reason). resumed: it was. done: the response ended normally. broke:
    it was truncated or refused (reason: one sentence; error, if there is a more specific one than
    the sentence). Through a proxy also: request: a client's, its body in data; reason: why it is
    not recorded. left: the client has gone, or its request was ended here. unrecorded: the response
    continues, but is not kept (reason).
    """

    request: int
    kind: What
    at: float
    data: bytes = b""
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    error: ServerError | None = None
    path: str = ""
    is_asked_by_us: bool = False


class Inbox:
    """Events of any number of requests, passed from one thread to another. While 1 MiB waits in it,
    a client stops reading, so the server waits, too."""

    def __init__(self, limit: int = _INBOX_BYTES) -> None:
        self._limit = limit
        self._arrivals: SimpleQueue[ExchangeEvent] = SimpleQueue()
        self._waiting = 0
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether reading should pause."""
        return self._waiting >= self._limit

    @property
    def n_waiting(self) -> int:
        """Number of events in the queue."""
        return self._arrivals.qsize()

    def has_room_for(self, arrival: ExchangeEvent) -> bool:
        """Whether one more event is within the limit."""
        return self._waiting + len(arrival.data) + _OVERHEAD <= self._limit

    def put(self, arrival: ExchangeEvent) -> None:
        """Add an event."""
        with self._lock:
            self._waiting += len(arrival.data) + _OVERHEAD
        self._arrivals.put(arrival)

    def take(self, seconds: float) -> ExchangeEvent | None:
        """The next event, after waiting up to `seconds`; None without one."""
        try:
            arrival = self._arrivals.get(timeout=seconds) if seconds > 0 else None
            arrival = arrival or self._arrivals.get_nowait()
        except Empty:
            return None
        with self._lock:
            self._waiting -= len(arrival.data) + _OVERHEAD
        return arrival
