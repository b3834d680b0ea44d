"""A reply of a server: read whole, or as a stream over several connections if need be."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from engine.errors import ServerError
from engine.observe.server.errors import cut_short, foreign, is_loading, refusal, unreachable
from engine.observe.server.inbox import Inbox

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
    """A reply that is read to its end, over several connections if need be."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        address: str,
        path: str,
        content: bytes,
        inbox: Inbox,
        conversation: str | None,
        tell: Tell,
    ) -> None:
        self._http, self._address = http, address
        self._inbox, self._tell = inbox, tell
        self._path, self._content, self._conversation = path, content, conversation
        self._n_read = 0
        self._has_begun = False

    async def read(self) -> None:
        """Raises ServerError where it is refused or breaks for good."""
        while not await self._ask():
            await asyncio.sleep(AGAIN_S)

    async def _ask(self) -> bool:
        """Send the request and read the reply; False: the server is not ready yet."""
        import httpx

        headers = {"Content-Type": "application/json"}
        if self._conversation is not None:
            headers[_CONVERSATION] = self._conversation
        try:
            async with self._http.stream(
                "POST", self._path, content=self._content, headers=headers, timeout=_patience()
            ) as response:
                kind = response.headers.get("Content-Type", "").split(";")[0]
                if response.status_code != 200:
                    raw = await read_body(response, _LARGEST_ERROR, cut=True)
                    if is_loading(response.status_code, raw):
                        return False
                    self._tell("head", status=response.status_code, headers=dict(response.headers))
                    raise refusal(self._address, self._path, response.status_code, raw)
                self._has_begun = True
                self._tell("head", status=200, headers=dict(response.headers))
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
            try:
                async with self._http.stream(
                    "GET", "/v1/stream", params=place, timeout=_patience()
                ) as response:
                    if response.status_code == 200:
                        self._tell("resumed")
                        before = self._n_read
                        try:
                            await self._pass_on(response)
                            return
                        finally:
                            if self._n_read > before:
                                until = perf_counter() + RESUME_S
                    raw = await read_body(response, _LARGEST_ERROR, cut=True)
                    if not is_loading(response.status_code, raw):
                        raise lost  # started again, or it kept too little
            except (httpx.TransportError, ssl.SSLError, OSError):
                pass
            await asyncio.sleep(AGAIN_S)
        raise lost

    async def _pass_on(self, response: httpx.Response) -> None:
        is_plain = not response.headers.get("Content-Encoding")
        if not is_plain:  # against our wish: places in it cannot be told to the server
            self._conversation = None
        pieces = response.aiter_raw() if is_plain else response.aiter_bytes()
        async for piece in pieces:
            self._n_read += len(piece)
            self._tell("data", data=piece)
            while self._inbox.is_full:
                await asyncio.sleep(0.01)


class OverLong(Exception):  # noqa: N818 - becomes a ServerError with the path
    """A short reply that is none."""


async def read_body(response: httpx.Response, most: int, *, cut: bool = False) -> bytes:
    """A whole reply. most: bytes; a longer one is cut there, or raises OverLong."""
    raw = bytearray()
    async for piece in response.aiter_bytes():
        raw += piece
        if len(raw) > most:
            if cut:
                break
            raise OverLong
    return bytes(raw)


def _patience() -> httpx.Timeout:
    """A prompt may take minutes before the first token comes."""
    import httpx

    return httpx.Timeout(CONNECT_S, read=None)
