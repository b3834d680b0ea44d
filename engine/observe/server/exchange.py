"""One request to a server up to the headers of its reply, within limits of time and size."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from engine.observe.server.errors import encoded, long_head, unreachable
from engine.observe.server.limits import Awaited, Wait

if TYPE_CHECKING:
    import httpcore
    import httpx

MOST_HEAD_BYTES = 96 << 10
"""Of the headers of a reply, together with all interim replies (1xx) before it."""


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
    """Send a request; the reply's body is to be read with `aiter_raw`.

    connect_s: how long the connection may take, and without head_s everything until the context is
    left. head_s: how long the headers may take, from when the request was sent; the body then has
    no limit here. sent: as httpx takes it. Raises ServerError for a server that cannot be reached,
    is too slow, sends endless headers or an encoding that was not asked for, and what httpx raises
    while the body is read.
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
    """Raises ServerError for the headers of a reply whose body is encoded: nothing was asked for
    but the bytes as they are, and no decompressor runs on what a server sends."""
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise encoded(url, encoding)


class _Trace:
    """Follows a request from the connection to the headers, as httpcore tells of it."""

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
        """Have a connection read no endless headers: httpx itself skips interim replies without a
        limit."""
        read = stream.read

        async def limited(max_bytes: int, timeout: float | None = None) -> bytes:
            piece = await read(max_bytes, timeout)
            if self._is_in_head:
                self._room -= len(piece)
                if self._room < 0:
                    raise long_head(self._url)
            return piece

        stream.read = limited  # type: ignore[method-assign]
