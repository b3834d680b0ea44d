"""The client of a server: facts about it, and streams of generated text.

All network work happens in the client's own thread; what arrives goes into an inbox that one other
thread empties.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

from engine.errors import Cancelled, OptionError, ServerError
from engine.observe.rounds.observed_run import ServerFacts
from engine.observe.rounds.stream import server_words
from engine.observe.server.address import is_loopback, server_address, system_certificates
from engine.observe.server.errors import foreign, is_loading, refusal, unreachable
from engine.observe.server.models import (
    OPENAI,
    VERSIONS,
    chosen_model,
    listed_models,
    model_state,
    other_engine,
)
from engine.observe.server.network_thread import Question, Sent, serve
from engine.observe.server.reply import (
    AGAIN_S,
    Awaited,
    ExchangeEvent,
    Inbox,
    OverLong,
    Reply,
    TimeLimits,
    Wait,
    exchange,
    read_body,
)

if TYPE_CHECKING:
    import httpx

_T = TypeVar("_T")

_CLOSE_S = 1.0
"""How long closing waits for connections to end and for the server to notice, seconds."""
_LARGEST_FACTS = 16 * 2**20
_LOOK_S = 0.05
_LONGEST_END = 200
"""Characters of an end token."""

ReportWaiting = Callable[[str], None]
"""Called with a sentence repeatedly while a response is awaited."""


class ServerClient:
    """One server. address: http:// or https:// with host and port.

    model: name of one of its models, empty if it has one, or one is loaded. api_key is sent as a
    bearer token and kept nowhere else. report: called while anything but a stream is awaited. Close
    it after use. Raises OptionError for an invalid address or key.
    """

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        limits: TimeLimits | None = None,
        report: ReportWaiting = lambda sentence: None,
        model: str = "",
    ) -> None:
        self.report = report
        self._model = model
        self._about: ServerFacts | None = None
        self.address, self.limits = server_address(address), limits or TimeLimits()
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
            raise OptionError(
                "The API key has invalid characters.", "Copy it again, without line ends."
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
        self, waiting: ReportWaiting | None = None, cancelled: threading.Event | None = None
    ) -> ServerFacts:
        """What the server reports of itself, once its model is loaded. waiting: called instead of
        `report`.

        Raises ServerError (ApiKeyError: another key is needed), and Cancelled once `cancelled` is
        set.
        """
        waiting = waiting or self.report
        return self._answer(self._question(lambda a: self._facts(waiting, a)), waiting, cancelled)

    def slots(self) -> list[dict[str, Any]] | None:
        """The reply of /slots, None from a server without that endpoint. Raises ServerError."""
        return self._answer(self.ask_for_slots())

    def ask_for_slots(self, seconds: float | None = None) -> Question[list[dict[str, Any]] | None]:
        """As `slots`, without waiting. seconds: time limit."""
        return self._question(lambda awaited: self._slots(awaited, seconds))

    def metrics(self) -> tuple[str, str] | None:
        """The text of /metrics, and an identifier that stays the same until the server restarts;
        None from a server without --metrics. Raises ServerError."""
        return self._answer(self.ask_for_metrics())

    def ask_for_metrics(self, seconds: float | None = None) -> Question[tuple[str, str] | None]:
        """As `metrics`, without waiting. seconds: time limit."""
        return self._question(lambda awaited: self._metrics(awaited, seconds))

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of a short response to a GET, or with a body to a POST. Raises ServerError."""
        method = "GET" if body is None else "POST"
        if self._about is not None and (model := self._about.model):
            path = self._path(path) if body is None else path
            body = {"model": model, **body} if body is not None else None
        return self._answer(self._question(lambda a: self._json(method, path, a, body)))

    def end_questions(self) -> None:
        """Cancel short requests in flight: waiting for one raises CancelledError."""
        with self._lock:
            loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the client was closed
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._questions])

    def chat_prompt(self, text: str, kwargs: Mapping[str, Any]) -> str:
        """A user's message rendered by the server's chat template. kwargs: template variables.
        Raises ServerError."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        if kwargs:
            body["chat_template_kwargs"] = dict(kwargs)
        reply = self.ask("/apply-template", body)
        if not isinstance(reply, dict) or not isinstance(reply.get("prompt"), str):
            raise foreign(self.address, "/apply-template")
        return str(reply["prompt"])

    def stream(
        self, request: int, path: str, body: bytes, inbox: Inbox, conversation: str | None = None
    ) -> Sent[None]:
        """Send a request with a streamed response; its pieces go into the inbox under the request's
        number.

        conversation: a unique name by which a lost stream can be resumed.
        """
        loop = self._running()
        sent = Sent[None](loop)

        def start() -> None:
            work = self._stream(request, path, body, inbox, conversation, sent.awaited)
            sent.begin(self._kept(loop.create_task(work), self._streams))

        loop.call_soon_threadsafe(start)
        return sent

    def close(self) -> None:
        """End all requests, and the thread. Pending and later calls get a CancelledError."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            self._is_closed = True
        if loop is None or thread is None:
            return

        async def end() -> None:
            for task in (tasks := [*self._streams, *self._questions]):
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CLOSE_S)
            if self._goodbyes:
                await asyncio.wait(self._goodbyes, timeout=_CLOSE_S)
            if self._http is not None:
                await self._http.aclose()
                self._http = None

        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(end(), loop).result(3 * _CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5 * _CLOSE_S)  # nothing is awaited any more

    # ---------------------------------------------------------------- the thread

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._is_closed:
                raise CancelledError
            if self._loop is None:
                started: Future[asyncio.AbstractEventLoop] = Future()
                thread = threading.Thread(
                    target=serve, args=(started,), name="server client", daemon=True
                )
                thread.start()
                self._loop, self._thread = started.result(), thread
            return self._loop

    def _question(self, work: Callable[[Awaited], Coroutine[Any, Any, _T]]) -> Question[_T]:
        """Start work in the client's thread. The coroutine is created there: a signal that
        interrupts this thread leaves none that is never awaited."""
        loop = self._running()
        question = Question[_T](loop)

        def begin() -> None:
            task = loop.create_task(work(question.awaited))
            question.begin(self._kept(task, self._questions))

        loop.call_soon_threadsafe(begin)
        return question

    def _answer(
        self,
        question: Question[_T],
        waiting: ReportWaiting | None = None,
        cancelled: threading.Event | None = None,
    ) -> _T:
        """Wait for the answer, and report how long."""
        waiting = waiting or self.report
        while not question.is_done(_LOOK_S):
            if cancelled is not None and cancelled.is_set():
                question()
                raise Cancelled
            if self._is_closed:
                raise CancelledError
            awaits = question.awaited.wait
            if awaits is not None and awaits.sentence:
                waiting(awaits.sentence)
        return question.answer.result()

    def _connected(self) -> httpx.AsyncClient:
        """The HTTP client; only in the client's thread."""
        if self._http is None:
            import httpx

            url = urlsplit(self.address)
            # no HTTP proxy for this machine itself; the system's certificates
            self._http = httpx.AsyncClient(
                base_url=self.address,
                headers={"Accept-Encoding": "identity"}
                | ({"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}),
                verify=system_certificates(),
                trust_env=not is_loopback(url.hostname or ""),
                # a server may close an idle connection just when it is reused
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            )
        return self._http

    # ---------------------------------------------------------------- questions

    async def _facts(self, waiting: ReportWaiting, awaited: Awaited) -> ServerFacts:
        while True:
            status, _, raw = await self._fetch("GET", "/health", awaited)
            if not is_loading(status, raw):
                break
            awaited.load(self.address, self.limits)
            if awaited.wait is not None and not awaited.wait.sentence:
                waiting(f"{self.address} is loading its model.")
            await asyncio.sleep(AGAIN_S)
        awaited.loading = None
        models = await self._models(awaited)
        listed = listed_models(models)
        engine = other_engine(listed)
        if engine is None:
            props = await self._offered("/props", awaited)
            if props is None or (isinstance(props, dict) and "error" in props):
                listed = listed or ([{"id": self._model}] if self._model else [])
                if not listed or "owned_by" in listed[0]:
                    raise refusal(self.address, "/props", 404, b"")
                engine = OPENAI
            elif not isinstance(props, dict):
                raise foreign(self.address, "/props")
        if engine is not None:
            self._about = await self._other(engine, listed, awaited)
        elif props.get("role") == "router":
            self._about = await self._routed(listed, props, waiting, awaited)
        else:
            ends = await self._end_token(props, awaited)
            self._about = ServerFacts(self.address, props=props, models=models, end_token=ends)
        return self._about

    async def _end_token(self, props: Mapping[str, Any], awaited: Awaited) -> dict[int, bytes]:
        """The end-of-text token, which streams give only as an id; empty if the server does not
        name it."""
        text = props.get("eos_token")
        if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_END:
            return {}
        with suppress(ServerError, ValueError, RecursionError, LookupError, TypeError):
            body = {"content": text, "parse_special": True}
            _, _, raw = await self._fetch("POST", "/tokenize", awaited, body)
            (token,) = json.loads(raw)["tokens"]
            return {int(token): text.encode("utf-8", "replace")}
        return {}

    async def _models(self, awaited: Awaited) -> dict[str, Any]:
        """The server's list of models, empty without one."""
        status, headers, raw = await self._fetch("GET", "/v1/models", awaited)
        if status != 200 and status not in (401, 403):
            return {}
        found = self._value("/v1/models", status, headers, raw)
        return found if isinstance(found, dict) else {}

    async def _other(
        self, engine: str, listed: list[dict[str, Any]], awaited: Awaited
    ) -> ServerFacts:
        """What a server of another engine reports of itself."""
        entry, about = chosen_model(self.address, listed, self._model)
        version = None
        if path := VERSIONS.get(engine):
            status, _, raw = await self._fetch("GET", path, awaited)
            if status == 200:
                with suppress(ValueError, RecursionError):
                    version = json.loads(raw)
        version = version.get("version") if isinstance(version, dict) else None
        props = {"build_info": server_words(version, 80)} if isinstance(version, str) else {}
        return ServerFacts(
            self.address, engine, props, {"data": [entry]} if entry else {}, entry["id"], about
        )

    async def _routed(
        self,
        listed: list[dict[str, Any]],
        router: dict[str, Any],
        waiting: ReportWaiting,
        awaited: Awaited,
    ) -> ServerFacts:
        """What a router reports of one of its models, which it may have to load first."""
        entry, about = chosen_model(self.address, listed, self._model)
        name, state = entry["id"], model_state(entry)
        if state not in ("", "loaded", "sleeping") and router.get("models_autoload") is False:
            raise ServerError(
                f"{self.address} does not load the model {name[:80]} on request.",
                "Load it there, or start the router with --models-autoload.",
            )
        path = f"/props?model={quote(name, safe='')}"
        awaited.load(self.address, self.limits)
        while True:
            try:
                status, headers, raw = await self._fetch("GET", path, awaited, is_slow=True)
            finally:
                loading, awaited.loading = awaited.loading, None
            if not is_loading(status, raw):
                break
            awaited.loading = loading
            awaited.load(self.address, self.limits)
            await asyncio.sleep(AGAIN_S)
        props = self._value(path, status, headers, raw)
        if not isinstance(props, dict):
            raise foreign(self.address, path)
        return ServerFacts(
            self.address, props=props, models={"data": [entry]}, model=name, about=about
        )

    def _path(self, path: str) -> str:
        """A path with the chosen model of a router."""
        about = self._about
        if about is None or not about.model or not about.is_llama_server:
            return path
        return f"{path}{'&' if '?' in path else '?'}model={quote(about.model, safe='')}"

    def _replay(self, conversation: str | None) -> str:
        """The path to resume a lost stream."""
        return self._path(f"/v1/stream?conv_id={quote(conversation or '', safe='')}")

    async def _slots(self, awaited: Awaited, seconds: float | None) -> list[dict[str, Any]] | None:
        if self._about is not None and not self._about.is_llama_server:
            return None
        reply = await self._offered(self._path("/slots"), awaited, seconds)
        if not isinstance(reply, list):
            return None
        return [slot for slot in reply if isinstance(slot, dict)]

    async def _metrics(self, awaited: Awaited, seconds: float | None) -> tuple[str, str] | None:
        path = self._path("/metrics")
        status, headers, raw = await self._fetch("GET", path, awaited, seconds=seconds)
        if status in (404, 501) or "json" in headers.get("Content-Type", ""):
            return None
        if status != 200:
            raise refusal(self.address, "/metrics", status, raw)
        return raw.decode("utf-8", "replace"), headers.get("Process-Start-Time-Unix", "")

    async def _offered(self, path: str, awaited: Awaited, seconds: float | None = None) -> Any:
        """A JSON response, or None from a server without this endpoint."""
        status, headers, raw = await self._fetch("GET", path, awaited, seconds=seconds)
        return None if status in (404, 405, 501) else self._value(path, status, headers, raw)

    async def _json(self, method: str, path: str, awaited: Awaited, body: Any = None) -> Any:
        status, headers, raw = await self._fetch(method, path, awaited, body)
        return self._value(path, status, headers, raw)

    def _value(self, path: str, status: int, headers: Mapping[str, str], raw: bytes) -> Any:
        if status != 200:
            raise refusal(self.address, path, status, raw)
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            kind = headers.get("Content-Type", "").split(";")[0]
            raise foreign(self.address, path, kind) from error

    async def _fetch(
        self,
        method: str,
        path: str,
        awaited: Awaited,
        body: Any = None,
        *,
        seconds: float | None = None,
        is_slow: bool = False,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of a short response, with a time limit for the whole. is_slow:
        its headers may take as long as a stream's."""
        import httpx

        limit = self.limits.connect_timeout
        limit = limit if seconds is None else min(seconds, limit)
        head_s = self.limits.timeout if is_slow else None
        try:
            async with exchange(
                self._connected(), method, path, awaited, connect_s=limit, head_s=head_s, json=body
            ) as response:
                async with asyncio.timeout(limit):
                    raw = await read_body(response, _LARGEST_FACTS)
                return response.status_code, response.headers, raw
        except TimeoutError as error:
            what = f"the reply of {self.address}{path.partition('?')[0]}"
            raise Wait(what, limit, "--connect-timeout", perf_counter()).error from error
        except OverLong as error:
            raise foreign(self.address, path) from error
        except (httpx.TransportError, ssl.SSLError, OSError) as error:
            raise unreachable(self.address, error) from error

    # ---------------------------------------------------------------- streams

    async def _stream(
        self,
        request: int,
        path: str,
        content: bytes,
        inbox: Inbox,
        conversation: str | None,
        awaited: Awaited,
    ) -> None:
        def tell(kind: Any, **more: Any) -> None:
            inbox.put(ExchangeEvent(request, kind, perf_counter(), **more))

        try:
            http = self._connected()
            replay = self._replay(conversation)
            about = self.address, path, content, inbox, conversation, tell, self.limits, awaited
            await Reply(http, *about, replay).read()
            tell("done")
        except ServerError as error:
            tell("broke", reason=error.message, error=error)
        except asyncio.CancelledError:
            tell("broke", reason="The request was cancelled here.")
            # a named stream continues at the server when its reader leaves; what is cancelled
            # cannot await
            if conversation is not None:
                task = asyncio.get_running_loop().create_task(self._give_up(conversation))
                self._kept(task, self._goodbyes)
        except Exception as error:  # a reader must learn of the end in any case
            tell("broke", reason=f"The client failed: {type(error).__name__}: {error}.")
            raise

    @staticmethod
    def _kept(task: asyncio.Task[_T], tasks: set[asyncio.Task[_T]]) -> asyncio.Task[_T]:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def _give_up(self, conversation: str) -> None:
        with suppress(ServerError):
            await self._fetch("DELETE", self._replay(conversation), Awaited())
