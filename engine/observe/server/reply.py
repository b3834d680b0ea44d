"""A reply of a server: read whole, or as a stream over several connections if need be."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from engine.errors import ServerError
from engine.observe.server.errors import cut_short, foreign, is_loading, refusal, unreachable
from engine.observe.server.exchange import exchange
from engine.observe.server.inbox import Inbox
from engine.observe.server.limits import Awaited, TimeLimits

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
"""How long a connection, or the answer to a question about the server, may take, seconds."""
RESUME_S = 5.0
"""How long a lost stream is looked for at a server that does not answer, seconds."""
AGAIN_S = 0.25
"""Between two questions to a server that is not ready, seconds."""
_LARGEST_ERROR = 2**20
_CONVERSATION = "X-Conversation-Id"

Tell = Callable[..., None]


class Reply:
    """A stream that is read to its end, over several connections if need be."""

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
    ) -> None:
        self._http, self._address = http, address
        self._inbox, self._tell = inbox, tell
        self._path, self._content, self._conversation = path, content, conversation
        self._limits, self._awaited = limits, awaited
        self._gathered: list[bytes] = []
        self._n_read = 0
        self._has_begun = False

    async def read(self) -> None:
        """Raises ServerError where it is refused or breaks for good."""
        while not await self._ask():
            self._awaited.load(self._address, self._limits)
            await asyncio.sleep(AGAIN_S)

    async def _ask(self) -> bool:
        """Send the request and read the reply; False: the server is not ready yet."""
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
                        return False
                    self._tell("head", status=response.status_code, headers=dict(response.headers))
                    raise refusal(self._address, self._path, response.status_code, raw)
                self._awaited.loading = None
                self._has_begun = True
                self._tell("head", status=200, headers=dict(response.headers))
                kind = response.headers.get("Content-Type", "").split(";")[0]
                if kind != "text/event-stream":
                    raise foreign(self._address, self._path, kind)
                await self._pass_on(response)
        except (httpx.TransportError, ssl.SSLError, OSError) as error:
            if not self._has_begun:
                raise unreachable(self._address, error) from error
            await self._resume(cut_short(self._address))
        return True

    async def _resume(self, lost: ServerError) -> None:
        """Read on behind a broken connection, again and again. Raises `lost` if that cannot be."""
        import httpx

        if self._conversation is None:
            raise lost
        self._tell("lost", reason=lost.message)
        until = perf_counter() + RESUME_S
        while perf_counter() < until:
            place = {"conv_id": self._conversation, "from": str(self._n_read)}
            seconds, before = until - perf_counter(), self._n_read
            try:
                async with exchange(
                    self._http,
                    "GET",
                    "/v1/stream",
                    Awaited(),
                    connect_s=seconds,
                    head_s=seconds,
                    params=place,
                ) as response:
                    if response.status_code == 200:
                        self._tell("resumed")
                        await self._pass_on(response)
                        return
                    raw = await self._error_body(response)
                    if not is_loading(response.status_code, raw):
                        raise lost  # started again, or it kept too little
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
        """What an error says, as far as it comes soon."""
        try:
            async with asyncio.timeout(self._limits.connect_timeout):
                return await read_body(response, _LARGEST_ERROR, cut=True)
        except TimeoutError:
            return b""

    async def _pass_on(self, response: httpx.Response) -> None:
        """Put the body into the inbox; what one read of the connection brought is one piece."""
        loop = asyncio.get_running_loop()
        try:
            async for piece in response.aiter_raw():
                if not self._gathered:
                    loop.call_soon(self._hand_over)  # runs once this task waits for more
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
    """A short reply that is none."""


async def read_body(response: httpx.Response, most: int, *, cut: bool = False) -> bytes:
    """A whole reply. most: bytes; a longer one is cut there, or raises OverLong."""
    raw = bytearray()
    async for piece in response.aiter_raw():
        raw += piece
        if len(raw) > most:
            if cut:
                break
            raise OverLong
    return bytes(raw)
