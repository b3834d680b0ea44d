"""The proxy: a port that forwards other programs' requests to a server, and its responses back.

Bytes are forwarded unchanged and at once, in a thread with its own event loop. Where a client
streams generated text, the fields that show rounds are requested on its behalf and removed from
what it gets (`added_fields.py`); the queue has them. The queue's reader cannot delay a client.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from engine.errors import OptionError
from engine.observe.proxy.added_fields import REPLIES, FieldRemover, Reply, add_fields
from engine.observe.proxy.exchange_queue import ExchangeQueue, RecordedExchange
from engine.observe.proxy.request_checks import MAX_HEAD_BYTES, AllowedHosts, json_excess
from engine.observe.server.address import is_loopback, server_address, system_certificates
from engine.observe.server.errors import cut_short, unreachable
from engine.observe.server.reply import CONNECT_S

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("draftscope.proxy")

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_Headers = Iterable[tuple[bytes, bytes]]

MAX_PARSED = 32 * 2**20
"""Largest request that is parsed before it is forwarded, bytes; a larger one passes unparsed."""
_KEPT_OPEN_S = 75
"""How long a client's connection may be idle, seconds."""
_STOP_S = 1
_OF_ONE_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
_ABSOLUTE = re.compile(rb"http://([^/?#]*)([^#]*)", re.IGNORECASE)
ENDED = "The request was cancelled in Draftscope."


class Proxy:
    """A port that forwards everything to a server until it is stopped."""

    def __init__(
        self,
        server: str,
        queue: ExchangeQueue,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        adds_fields: bool = True,
    ) -> None:
        """Bind the port; connections made before `start` wait. port: 0 picks a free one.

        Raises OptionError for an invalid address and one that cannot be bound.
        """
        self._server, self._queue, self._adds_fields = _Server(server), queue, adds_fields
        self._listener = _listen(host, port)
        name, number = self._listener.getsockname()[:2]
        self._hosts = AllowedHosts(host, name, number)
        self.url = f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"
        """The address for clients."""
        self.is_local = is_loopback(name)
        """Whether only programs on this machine can connect."""
        if self._server.is_local and self._server.port == number:
            self._listener.close()
            raise OptionError(
                f"Port {number} is the server's own.", "Listen at another port than the server."
            )
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._begun = threading.Event()
        self._passing: dict[int, asyncio.Task[Any]] = {}
        """Tasks that forward responses, by the request's number in the queue."""
        self.error: Exception | None = None
        """The exception that ended the thread."""

    def start(self) -> None:
        """Start to forward."""
        self._thread.start()
        self._begun.wait()

    @property
    def is_running(self) -> bool:
        """Whether the proxy's thread is running."""
        return self._thread.is_alive()

    def abort(self, number: int) -> None:
        """End a request, by its number in the queue, for the client and at the server."""

        def cancel() -> None:
            if number in self._passing:
                self._passing[number].cancel()

        self._call(cancel)

    def stop(self) -> None:
        """Stop listening and close all connections; from any thread, and more than once."""

        def close() -> None:
            for connection in list(self._uvicorn.server_state.connections):
                connection.shutdown()
            for task in list(self._uvicorn.server_state.tasks):
                task.cancel()
            self._uvicorn.should_exit = True

        if self._begun.is_set():
            self._call(close)
            self._thread.join()
        self._listener.close()

    def _call(self, act: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(act)

    # -- in the proxy's thread -------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # an exception in a thread would not be seen
            self.error = error
        finally:
            self._begun.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(  # asyncio would print it, for example too many open files
            lambda _, context: log.info("%s: %r", context["message"], context.get("exception"))
        )
        import uvicorn

        from engine.observe.proxy.client_connection import ClientConnection

        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self._app,
                interface="asgi3",
                http=ClientConnection,
                h11_max_incomplete_event_size=2 * MAX_HEAD_BYTES,
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=100,  # it would repeat what the queue has
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=_KEPT_OPEN_S,
                timeout_graceful_shutdown=_STOP_S,
            )
        )
        async with _transport(self._server) as self._transport:
            self._begun.set()
            try:
                await self._uvicorn.serve(sockets=[self._listener])
            finally:
                # a client that came at the last moment may not have a connection yet
                if others := asyncio.all_tasks() - {asyncio.current_task()}:
                    await asyncio.wait(others, timeout=_STOP_S)
                for connection in list(self._uvicorn.server_state.connections):
                    if isinstance(connection.transport, asyncio.WriteTransport):
                        connection.transport.abort()  # clients that do not read

    async def _app(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        exchange = _Exchange(scope, receive, send)
        if refusal := exchange.refusal(self._hosts):
            await exchange.tell(*refusal)
            return
        passing = asyncio.ensure_future(self._pass(exchange))
        leaving = asyncio.ensure_future(exchange.client_left())
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if exchange.has_ended:
                await asyncio.wait({passing})
        finally:
            for task in (passing, leaving):
                task.cancel()
            await asyncio.wait({passing, leaving})
            if passing.cancelled():
                await exchange.tell(503, ENDED)
            elif failure := passing.exception():
                log.error("the proxy failed", exc_info=failure)
                await exchange.break_off(500, f"Forwarding the request failed: {failure!r:.200}.")
            if exchange.recording is not None:
                self._passing.pop(exchange.recording.number, None)
                exchange.recording.end("left")  # unless its end is recorded

    async def _pass(self, exchange: _Exchange) -> None:
        import httpx

        try:
            request = await self._request(exchange)
            response = await self._transport.handle_async_request(request)
        except _ClientLeftError:
            return
        except httpx.TransportError as error:
            await exchange.break_off(502, unreachable(self._server.address, error).message)
            return
        try:
            await self._reply(exchange, response)
        finally:
            await response.aclose()

    async def _request(self, exchange: _Exchange) -> httpx.Request:
        """The request to the server."""
        import httpx

        headers = [
            (name, value)
            for name, value in _end_to_end(exchange.headers)
            if name not in (b"host", b"expect")  # the server's own; answered here
        ]
        content: bytes | AsyncIterator[bytes] | None = None
        form = exchange.reply_form
        if form is None:
            content = exchange.body() if exchange.has_body else None
        else:
            body, is_whole = await exchange.read(MAX_PARSED)
            too_large = f"is larger than {MAX_PARSED >> 20} MiB"
            if is_whole:
                adds_to = form if self._adds_fields and exchange.can_be_added_to else None
                body, exchange.added, too_large = await asyncio.to_thread(_parsed, body, adds_to)
            exchange.recording = self._queue.request(
                exchange.path, b"{}" if too_large else body, bool(exchange.added), too_large
            )
            if exchange.recording is not None:
                task = asyncio.current_task()
                assert task is not None
                self._passing[exchange.recording.number] = task
            if exchange.added:
                replaced = (b"content-length", b"accept-encoding")
                headers = [each for each in headers if each[0] not in replaced]
                headers.append((b"accept-encoding", b"identity"))
            content = body if is_whole else exchange.body(body)
        return httpx.Request(
            exchange.method,
            self._server.origin,
            headers=headers,
            content=content,
            extensions={
                "target": self._server.prefix + exchange.target,
                "timeout": {"connect": CONNECT_S},
            },
        )

    async def _reply(self, exchange: _Exchange, response: httpx.Response) -> None:
        import httpx

        if not 200 <= response.status_code < 600:
            await exchange.break_off(502, f"The server answered {response.status_code}.")
            return
        kind = response.headers.get("content-type", "")
        encoding = response.headers.get("content-encoding", "identity")
        remover = None
        if exchange.reply_form and exchange.added and kind.startswith("text/event-stream"):
            remover = FieldRemover(exchange.reply_form, exchange.added)
        if encoding != "identity":
            remover = None
        recording = exchange.recording
        if recording is not None:
            told = {"content-type": kind, "content-encoding": encoding}
            recording.head(response.status_code, told)
        has_length = remover is None and "transfer-encoding" not in response.headers
        headers = [
            (name, value)
            for name, value in _end_to_end(response.headers.raw)
            if has_length or name.lower() != b"content-length"
        ]
        await exchange.begin(response.status_code, headers)
        try:
            async for piece in response.aiter_raw():
                if recording is not None:
                    recording.data(piece)
                passed = piece if remover is None else remover.feed(piece)
                if passed:
                    await exchange.go_on(passed)
        except httpx.TransportError:
            await exchange.go_on(b"" if remover is None else remover.rest())
            await exchange.break_off(502, cut_short(self._server.address).message)
            return
        if recording is not None:
            recording.end("done")
        await exchange.end(b"" if remover is None else remover.rest())


def _parsed(body: bytes, adds_to: Reply | None) -> tuple[bytes, tuple[str, ...], str]:
    """The body with added fields, their names, and why it is not recorded; runs in a thread."""
    if too_large := json_excess(body):
        return body, (), too_large
    return *(add_fields(adds_to, body) if adds_to else (body, ())), ""


class _ClientLeftError(Exception):
    """A client closed its connection in the middle of its request."""


class _Exchange:
    """A client's request and its response."""

    def __init__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        self._receive, self._send = receive, send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        query: bytes = scope["query_string"]
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        self._hosts = [value for name, value in self.headers if name == b"host"]
        if absolute := _ABSOLUTE.fullmatch(self.target):  # absolute form (RFC 9112, section 3.2.2)
            self._hosts.append(absolute[1])
            self.target = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
            self.path = unquote(self.target.partition(b"?")[0].decode("ascii"))
        names = {name for name, _ in self.headers}
        self.has_body = not names.isdisjoint((b"content-length", b"transfer-encoding"))
        self.reply_form = REPLIES.get(self.path) if self.method == "POST" else None
        self.can_be_added_to = names.isdisjoint(
            # a kept stream is resumed at a byte offset, so its bytes must stay as sent
            (b"content-encoding", b"x-conversation-id")
        )
        self.added: tuple[str, ...] = ()
        self.recording: RecordedExchange | None = None
        self._is_read = asyncio.Event()
        self._has_begun = self.has_ended = False
        if not self.has_body:
            self._is_read.set()

    def refusal(self, hosts: AllowedHosts) -> tuple[int, str] | None:
        """Status and message for a request that is not forwarded; None if it is."""
        if self.method == "CONNECT" or self.target[:1] not in (b"/", b"*"):
            return 501, "This port forwards requests to one server only."
        for host in self._hosts:  # HTTP/1.0 may do without, but browsers do not speak it
            if fault := hosts.fault(host.decode("latin-1")):
                return fault
        asked = [value.lower() for name, value in self.headers if name == b"upgrade"]
        if any(b"websocket" in value for value in asked):
            return 501, "WebSocket connections are not forwarded, only plain HTTP requests."
        return None

    async def body(self, begin: bytes = b"") -> AsyncIterator[bytes]:
        """The request's body as it arrives. Raises _ClientLeftError."""
        if begin:
            yield begin
        while not self._is_read.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeftError
            if not message.get("more_body"):
                self._is_read.set()
            if message.get("body"):
                yield message["body"]

    async def read(self, limit: int) -> tuple[bytes, bool]:
        """The body, and whether it is complete within `limit` bytes."""
        read = bytearray()
        async for piece in self.body():
            read += piece
            if len(read) > limit:
                break
        return bytes(read), self._is_read.is_set() and len(read) <= limit

    async def client_left(self) -> None:
        """Returns when the client has closed its connection, or the reply has ended."""
        await self._is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin the response."""
        self._has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def go_on(self, piece: bytes) -> None:
        """Forward a piece of the response; returns when the client's connection takes more."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self, piece: bytes) -> None:
        """The last piece."""
        self.has_ended = True
        await self._send({"type": "http.response.body", "body": piece, "more_body": False})

    async def break_off(self, status: int, sentence: str) -> None:
        """Fail the request; a response that has started is left unterminated."""
        if self.recording is not None:
            self.recording.end("broke", sentence)
        await self.tell(status, sentence)

    async def tell(self, status: int, sentence: str) -> None:
        """Send an error of our own, in a server's format, if no response has started."""
        if self._has_begun:
            return
        from engine.observe.proxy.client_connection import error_body

        body = error_body(status, sentence)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self.begin(status, headers)
        await self.end(body)


class _Server:
    """The address of a server."""

    def __init__(self, url: str) -> None:
        self.address = server_address(url)
        parts = urlsplit(self.address)
        self.host, self.scheme = parts.hostname or "", parts.scheme
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.prefix = parts.path.encode()
        self.is_local = is_loopback(self.host)


def listening_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, or of PORT alone for this machine. Raises OptionError."""
    host, _, port = text.strip().rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 2**16):
        raise OptionError(
            f"{text[:80]!r} is not an address to listen at.", "Write it like 127.0.0.1:8081."
        )
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OptionError."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(256)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OptionError(
            f"Cannot listen at {host[:80]}:{port}: {why}.",
            "Choose another address or port; port 0 is any free one.",
        ) from error
    return listener


def _transport(server: _Server) -> httpx.AsyncHTTPTransport:
    """Connections to a server: one per request, so that none turns out to be closed when used."""
    import httpx

    through = None
    if not server.is_local and not proxy_bypass(server.host):
        through = getproxies().get(server.scheme) or getproxies().get("all")
    return httpx.AsyncHTTPTransport(
        verify=system_certificates(),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        proxy=through,
    )


def _end_to_end(headers: _Headers) -> list[tuple[bytes, bytes]]:
    """The headers without hop-by-hop ones."""
    headers = list(headers)
    named = {
        each.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for each in value.split(b",")
    }
    return [pair for pair in headers if pair[0].lower() not in _OF_ONE_HOP | named]
