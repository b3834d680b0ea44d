"""A client's connection: uvicorn's, extended to answer clients that half-close, to refuse ambiguous
heads, and to limit the time for a head and the number of connections."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.observe.proxy.request_checks import head_fault

MAX_CONNECTIONS = 256
HEAD_S = 30.0
"""Time limit for the head of a request, seconds."""
_LINGER_S = 2.0
"""How long the data of a refused client is still read, so that it gets to read the error,
seconds."""
_LOOK_S = 0.25
_PROBE_EVERY = 8
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def error_body(status: int, sentence: str) -> bytes:
    """An error body in llama-server's format."""
    error = {"code": status, "message": sentence, "type": "server_error"}
    return json.dumps({"error": error}).encode()


class ClientConnection(H11Protocol):
    """The protocol of one connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _is_refused = _is_half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self.refuse(503, f"More than {MAX_CONNECTIONS} connections are open.")
        else:
            self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers of the connection."""
        self._is_half_closed = False
        self._unset_keepalive_if_required()
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed data to h11, unless the client was refused."""
        if not self._is_refused:
            super().data_received(data)
            self._limit_head()

    def handle_events(self) -> None:
        """Check a head before h11 normalises it."""
        if self.conn.their_state is h11.IDLE and (found := head_fault(self.conn.trailing_data[0])):
            self.refuse(*found)
        elif not self._is_refused:
            super().handle_events()

    def _limit_head(self) -> None:
        """Start the timer of a head; a partial head does not extend it."""
        is_awaited = self.conn.their_state is h11.IDLE and not self._is_refused
        if is_awaited and self._head_timer is None:
            sentence = f"The request's headers did not arrive within {HEAD_S:.0f} seconds."
            self._head_timer = self.loop.call_later(HEAD_S, self.refuse, 408, sentence)
        elif not is_awaited and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that h11 cannot parse."""
        self.refuse(400, "This is not a valid HTTP request.")

    def refuse(self, status: int, sentence: str) -> None:
        """Send an error if no response has started, and close."""
        self._is_refused = True
        body = error_body(status, sentence)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        reason = HTTPStatus(status).phrase
        begin = h11.Response(status_code=status, headers=headers, reason=reason)
        with suppress(h11.LocalProtocolError):
            for event in (begin, h11.Data(body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # the response ends with the request
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._limit_head()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.abort)

    # -- clients that close their sending side ---------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open for a pending response that the client can still read."""
        cycle = self.cycle
        if self._is_refused or cycle is None or cycle.more_body or cycle.response_complete:
            return False
        if not self._is_half_closed:  # asyncio reports it again when reading resumes
            self._is_half_closed = True
            self._look_for_client()
        return True

    def on_response_complete(self) -> None:
        """A half-closed client sends no further request after its last response."""
        super().on_response_complete()
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()

    def _look_for_client(self, n: int = 1) -> None:
        """Close the connection once a half-closed client has closed its other half, too.

        TCP shows the difference only when something is sent: where the system's socket table is not
        available, an interim response is sent, which HTTP/1.1 clients skip.
        """
        if not self._is_half_closed:
            return
        own = self.transport.get_extra_info("socket")
        is_there = _peer_is_there(own)
        if is_there is False or own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        may_probe = self.scope["http_version"] == "1.1" and not self.cycle.response_started
        if is_there is None and n % _PROBE_EVERY == 0 and may_probe:
            probe = h11.InformationalResponse(status_code=100, headers=[])
            self.transport.write(self.conn.send(probe) or b"")
        self.loop.call_later(_LOOK_S, self._look_for_client, n + 1)

    def shutdown(self) -> None:
        """Shut down without waiting for a client that does not read."""
        if self.flow.write_paused:
            self.transport.abort()
        elif self.cycle is None or self.cycle.response_complete or self._is_refused:
            self.transport.close()
        else:
            self.cycle.keep_alive = False


def _peer_is_there(own: socket.socket) -> bool | None:
    """Whether a local program still has the other end of a connection open; None where the system
    does not report that."""
    number = str(os.fstat(own.fileno()).st_ino)
    for table in _TABLES:
        try:
            rows = [row.split() for row in table.read_text("ascii").splitlines()[1:]]
        except (OSError, ValueError):
            return None
        for _, local, remote, *_ in (row for row in rows if row[9] == number):
            inodes = [row[9] for row in rows if (row[1], row[2]) == (remote, local)]
            return inodes[0] != "0" if inodes else None
    return None
