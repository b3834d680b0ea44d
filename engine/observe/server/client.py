"""Talking to a llama-server: what it says of itself, and streams of what it generates.

All network work happens on one thread of the client's own; what arrives is put into an inbox that
one other thread empties.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from engine.errors import Cancelled, OptionError, ServerError
from engine.observe.rounds.observed_run import ServerFacts
from engine.observe.server.address import is_loopback, server_address
from engine.observe.server.errors import foreign, is_loading, refusal, unreachable
from engine.observe.server.inbox import Arrival, Inbox
from engine.observe.server.reply import AGAIN_S, CONNECT_S, OverLong, Reply, read_body

if TYPE_CHECKING:
    import httpx

_T = TypeVar("_T")

_CLOSE_S = 2.0
_LARGEST_FACTS = 16 * 2**20

ReportWaiting = Callable[[str], None]
"""Called with a sentence as long as a server is not ready."""


class ServerClient:
    """One llama-server. address: http:// or https:// with host and port.

    api_key is sent as a bearer token and kept nowhere else. Close it after use. Raises OptionError
    for an address or a key that cannot be one.
    """

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self.address = server_address(address)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
            raise OptionError(
                "The API key has characters that no key has.", "Copy it again, without line ends."
            )
        self._api_key = api_key
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._http: httpx.AsyncClient | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._streams: set[asyncio.Task[None]] = set()
        self._questions: set[asyncio.Task[Any]] = set()
        self._goodbyes: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"ServerClient({self.address!r})"

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def facts(
        self,
        waiting: ReportWaiting = lambda sentence: None,
        cancelled: threading.Event | None = None,
    ) -> ServerFacts:
        """What the server says of itself, once its model is loaded.

        Raises ServerError (ApiKeyError: it wants another key), and Cancelled once `cancelled` is
        set.
        """
        return self._call(lambda: self._facts(waiting), cancelled)

    def slots(self, seconds: float = CONNECT_S) -> list[dict[str, Any]] | None:
        """The reply of /slots, None where the server tells nothing of them. seconds: how long it
        may take. Raises ServerError."""
        reply = self._call(lambda: self._told("/slots", seconds))
        if not isinstance(reply, list):
            return None
        return [slot for slot in reply if isinstance(slot, dict)]

    def metrics(self, seconds: float = CONNECT_S) -> tuple[str, str] | None:
        """The text of /metrics, and what is the same as long as the server is not started again;
        None for a server without --metrics. seconds: how long it may take. Raises ServerError."""
        return self._call(lambda: self._metrics(seconds))

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of a short reply: of a GET, with a body of a POST. Raises ServerError."""
        return self._call(lambda: self._json("GET" if body is None else "POST", path, body))

    def chat_prompt(self, text: str, kwargs: Mapping[str, Any]) -> str:
        """A user's message in the chat template of the server's model. kwargs: variables of the
        template. Raises ServerError."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        if kwargs:
            body["chat_template_kwargs"] = dict(kwargs)
        reply = self.ask("/apply-template", body)
        if not isinstance(reply, dict) or not isinstance(reply.get("prompt"), str):
            raise foreign(self.address, "/apply-template")
        return str(reply["prompt"])

    def stream(
        self, request: int, path: str, body: bytes, inbox: Inbox, conversation: str | None = None
    ) -> Callable[[], None]:
        """Send a request whose reply is a stream; what comes is put into the inbox under its
        number. The result ends it, here and at the server; what arrives afterwards is of no use.

        conversation: a name that nobody else uses, to find a lost stream again.
        """
        loop, started = self._running(), list[asyncio.Task[None]]()

        def start() -> None:
            work = self._stream(request, path, body, inbox, conversation)
            started.append(self._kept(loop.create_task(work), self._streams))

        loop.call_soon_threadsafe(start)

        return lambda: _end(loop, started)

    def close(self) -> None:
        """End what runs, and the thread. Whoever waits or asks again gets a CancelledError."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            self._is_closed = True
        if loop is None or thread is None:
            return

        async def end() -> None:
            tasks = [*self._streams, *self._questions]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._goodbyes:
                await asyncio.wait(self._goodbyes, timeout=_CLOSE_S)
            if self._http is not None:
                await self._http.aclose()
                self._http = None
            await loop.shutdown_default_executor()

        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(end(), loop).result(CONNECT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CONNECT_S)

    # ---------------------------------------------------------------- the thread

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._is_closed:
                raise CancelledError
            if self._loop is None:
                begun: Future[asyncio.AbstractEventLoop] = Future()
                thread = threading.Thread(
                    target=_serve, args=(begun,), name="server client", daemon=True
                )
                thread.start()
                self._loop, self._thread = begun.result(), thread
            return self._loop

    def _call(
        self, work: Callable[[], Coroutine[Any, Any, _T]], cancelled: threading.Event | None = None
    ) -> _T:
        """The result of work on the client's thread. It is begun there: a signal that interrupts
        this thread leaves no coroutine that nobody awaits."""
        loop, answer, begun = self._running(), Future[_T](), list[asyncio.Task[_T]]()

        def begin() -> None:
            begun.append(self._kept(loop.create_task(work()), self._questions))
            begun[0].add_done_callback(lambda task: _settle(answer, task))

        loop.call_soon_threadsafe(begin)
        while True:
            try:
                return answer.result(None if cancelled is None else 0.05)
            except TimeoutError:
                if answer.done():
                    raise
                if cancelled is not None and cancelled.is_set():
                    _end(loop, begun)
                    raise Cancelled from None

    def _connected(self) -> httpx.AsyncClient:
        """The connections; only on the client's thread."""
        if self._http is None:
            import httpx

            url = urlsplit(self.address)
            # no detour through a proxy to this machine itself; certificates are the system's
            self._http = httpx.AsyncClient(
                base_url=self.address,
                headers={"Accept-Encoding": "identity"}
                | ({"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}),
                verify=ssl.create_default_context(),
                trust_env=not is_loopback(url.hostname or ""),
                # a server may close an idle connection just when it is used again
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            )
        return self._http

    # ---------------------------------------------------------------- questions

    async def _facts(self, waiting: ReportWaiting) -> ServerFacts:
        while True:
            status, _, raw = await self._fetch("GET", "/health")
            if not is_loading(status, raw):
                break
            waiting(f"{self.address} loads its model.")
            await asyncio.sleep(AGAIN_S)
        props = await self._json("GET", "/props")
        if not isinstance(props, dict):
            raise foreign(self.address, "/props")
        models = await self._told("/v1/models")
        return ServerFacts(
            self.address, props=props, models=models if isinstance(models, dict) else {}
        )

    async def _told(self, path: str, seconds: float = CONNECT_S) -> Any:
        """A JSON reply, or None from a server that does not offer it."""
        status, kind, raw = await self._fetch("GET", path, seconds=seconds)
        return None if status in (404, 501) else self._value(path, status, kind, raw)

    async def _metrics(self, seconds: float) -> tuple[str, str] | None:
        try:
            async with self._opened("GET", "/metrics", seconds=seconds) as response:
                raw = await read_body(response, _LARGEST_FACTS)
                start = response.headers.get("Process-Start-Time-Unix", "")
        except OverLong as error:
            raise foreign(self.address, "/metrics") from error
        if response.status_code in (404, 501):
            return None
        if response.status_code != 200:
            raise refusal(self.address, "/metrics", response.status_code, raw)
        return raw.decode("utf-8", "replace"), start

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        status, kind, raw = await self._fetch(method, path, body)
        return self._value(path, status, kind, raw)

    def _value(self, path: str, status: int, kind: str, raw: bytes) -> Any:
        if status != 200:
            raise refusal(self.address, path, status, raw)
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise foreign(self.address, path, kind) from error

    async def _fetch(
        self, method: str, path: str, body: Any = None, *, seconds: float = CONNECT_S
    ) -> tuple[int, str, bytes]:
        """Status, content type and body of a short reply."""
        try:
            async with self._opened(method, path, body, seconds) as response:
                raw = await read_body(response, _LARGEST_FACTS)
                kind = response.headers.get("Content-Type", "").split(";")[0]
                return response.status_code, kind, raw
        except OverLong as error:
            raise foreign(self.address, path) from error

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, body: Any = None, seconds: float = CONNECT_S
    ) -> AsyncIterator[httpx.Response]:
        import httpx

        try:
            async with self._connected().stream(
                method, path, json=body, timeout=seconds
            ) as response:
                yield response
        except (httpx.TransportError, ssl.SSLError, OSError) as error:
            raise unreachable(self.address, error) from error

    # ---------------------------------------------------------------- streams

    async def _stream(
        self, request: int, path: str, content: bytes, inbox: Inbox, conversation: str | None
    ) -> None:
        def tell(kind: Any, **more: Any) -> None:
            inbox.put(Arrival(request, kind, perf_counter(), **more))

        try:
            http = self._connected()
            await Reply(http, self.address, path, content, inbox, conversation, tell).read()
            tell("done")
        except ServerError as error:
            tell("broke", reason=error.message, error=error)
        except asyncio.CancelledError:
            tell("broke", reason="The request was ended here.")
            # a named stream goes on at the server when its reader leaves; what is cancelled can
            # not await any more
            if conversation is not None:
                task = asyncio.get_running_loop().create_task(self._give_up(conversation))
                self._kept(task, self._goodbyes)
        except Exception as error:  # a reader must learn of the end, whatever it was
            tell("broke", reason=f"The client failed: {type(error).__name__}: {error}.")
            raise

    @staticmethod
    def _kept(task: asyncio.Task[_T], tasks: set[asyncio.Task[_T]]) -> asyncio.Task[_T]:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def _give_up(self, conversation: str) -> None:
        with suppress(ServerError):
            await self._fetch("DELETE", f"/v1/stream?conv_id={conversation}")


def _serve(begun: Future[asyncio.AbstractEventLoop]) -> None:
    """A client's thread. It makes its loop itself: no signal interrupts it half-way."""
    try:
        loop = asyncio.new_event_loop()
    except OSError as error:  # no more files may be open
        begun.set_exception(error)
        return
    begun.set_result(loop)
    loop.run_forever()
    loop.close()


def _settle(answer: Future[_T], task: asyncio.Task[_T]) -> None:
    """Give the end of a task to the thread that waits for it."""
    if task.cancelled():
        answer.cancel()
    elif error := task.exception():
        answer.set_exception(error)
    else:
        answer.set_result(task.result())


def _end(loop: asyncio.AbstractEventLoop, begun: list[asyncio.Task[_T]]) -> None:
    """End a task that the loop has been asked to begin."""
    with suppress(RuntimeError):  # the client was closed
        loop.call_soon_threadsafe(lambda: begun[0].cancel())
