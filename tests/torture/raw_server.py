"""A server that sends bytes as they are, valid HTTP or not, on a thread for each connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class Asked:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class RawServer:
    """Calls answer(request, connection) for each request; the connection is closed after it.

    received: all requests. url: where it listens. stop closes all connections, too.
    """

    def __init__(self, answer: Callable[[Asked, socket.socket], None]) -> None:
        self._answer = answer
        self.received: list[Asked] = []
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        for link in (self._listener, *self._open):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def __enter__(self) -> RawServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                self._open.append(link)
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with suppress(OSError), link:
            asked = _read(link)
            if asked is not None:
                self.received.append(asked)
                self._answer(asked, link)


def _read(link: socket.socket) -> Asked | None:
    with link.makefile("rb") as lines:
        words = lines.readline().decode("latin-1").split()
        if len(words) < 2:
            return None
        asked = Asked(words[0], words[1])
        while (line := lines.readline().strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            asked.headers[name.strip().lower()] = value.strip()
        if "chunked" in asked.headers.get("transfer-encoding", ""):
            while n := int(lines.readline().split(b";")[0] or b"0", 16):
                asked.body += lines.read(n)
                lines.readline()
        else:
            asked.body = lines.read(int(asked.headers.get("content-length", "0")))
    return asked


def reply(
    body: bytes, kind: str = "application/json", *headers: str, status: str = "200 OK"
) -> bytes:
    """A whole reply, which says that the connection is closed."""
    head = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines = [*head, "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def chunk(body: bytes) -> bytes:
    """A piece of a body that is sent in chunks."""
    return b"%x\r\n%s\r\n" % (len(body), body)
