"""The thread of a client's connections: no request is left when it ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from engine.observe.server.network_thread import serve


def test_what_is_asked_while_it_ends_is_cancelled() -> None:
    started: Future[asyncio.AbstractEventLoop] = Future()
    thread = threading.Thread(target=serve, args=(started,), daemon=True)
    thread.start()
    loop, requests = started.result(10), []

    def ask_and_end() -> None:
        requests.append(loop.create_task(asyncio.sleep(60)))
        loop.stop()

    loop.call_soon_threadsafe(ask_and_end)
    thread.join(10)
    assert not thread.is_alive() and requests[0].cancelled()
