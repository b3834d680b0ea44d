"""The network thread of a server's client: its loop, requests in its hand, look-ups of hosts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

from engine.observe.server.reply import Awaited

_T = TypeVar("_T")


class Sent(Generic[_T]):
    """A request in hand of the client's thread. Calling it ends it, here and at the server; what
    arrives afterwards is of no use. awaited: what it waits for, up to the headers of a stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: list[asyncio.Task[_T]] = []
        self._is_ended = False
        self.awaited = Awaited()

    def begin(self, task: asyncio.Task[_T]) -> None:
        """Only on the client's thread."""
        self._task.append(task)

    def __call__(self, after_s: float = 0.0) -> None:
        """after_s: for so long, what is on its way may still come."""
        if not self._is_ended:  # to be cancelled twice would disturb what cleans up
            self._is_ended = True
            with suppress(RuntimeError):  # the client was closed
                self._loop.call_soon_threadsafe(
                    lambda: self._loop.call_later(after_s, self._task[0].cancel)
                )


class Question(Sent[_T]):
    """A short request and its answer, which is a CancelledError if it was ended before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.answer: Future[_T] = Future()

    def begin(self, task: asyncio.Task[_T]) -> None:
        super().begin(task)
        task.add_done_callback(lambda task: _settle(self.answer, task))

    def is_done(self, seconds: float) -> bool:
        """Whether it is answered, waiting so long for that."""
        with suppress(TimeoutError, CancelledError):
            self.answer.exception(max(0.0, seconds))
        return self.answer.done()


def serve(started: Future[asyncio.AbstractEventLoop]) -> None:
    """What the thread does. It makes its loop itself: no signal interrupts it half-way."""
    try:
        loop = asyncio.new_event_loop()
        loop.set_default_executor(_DaemonThreads())
    except OSError as error:  # no more files may be open
        started.set_exception(error)
        return
    started.set_result(loop)
    loop.run_forever()
    for task in asyncio.all_tasks(loop):  # asked for while the client was closed
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


class _DaemonThreads(ThreadPoolExecutor):
    """Looks up names of hosts. A look-up cannot be cancelled, and no end of the program may wait
    for one: each has a thread that nothing joins."""

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        found: Future[_T] = Future()

        def work() -> None:
            found.set_running_or_notify_cancel()
            try:
                found.set_result(fn(*args, **kwargs))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=work, name="host name", daemon=True).start()
        return found


def _settle(answer: Future[_T], task: asyncio.Task[_T]) -> None:
    """Give the end of a task to the thread that waits for it."""
    if task.cancelled():
        answer.cancel()
    elif error := task.exception():
        answer.set_exception(error)
    else:
        answer.set_result(task.result())
