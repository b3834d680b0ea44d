"""The network thread of a server's client: its event loop, requests in flight, DNS look-ups."""

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
    """A request in flight in the client's thread. Calling it cancels the request, here and at the
    server; later data is dropped. awaited: what it waits for, up to the headers of a stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: list[asyncio.Task[_T]] = []
        self._is_ended = False
        self.awaited = Awaited()

    def begin(self, task: asyncio.Task[_T]) -> None:
        """Set the task; only in the client's thread."""
        self._task.append(task)

    def __call__(self, after_s: float = 0.0) -> None:
        """Cancel the request. after_s: how long data in flight may still arrive, seconds."""
        if not self._is_ended:  # a second cancel would disturb the clean-up
            self._is_ended = True
            with suppress(RuntimeError):  # the client was closed
                self._loop.call_soon_threadsafe(
                    lambda: self._loop.call_later(after_s, self._task[0].cancel)
                )


class Question(Sent[_T]):
    """A short request and its answer: a CancelledError if it was cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.answer: Future[_T] = Future()

    def begin(self, task: asyncio.Task[_T]) -> None:
        super().begin(task)
        task.add_done_callback(lambda task: _settle(self.answer, task))

    def is_done(self, seconds: float) -> bool:
        """Whether it is answered, after waiting up to `seconds`."""
        with suppress(TimeoutError, CancelledError):
            self.answer.exception(max(0.0, seconds))
        return self.answer.done()


def serve(started: Future[asyncio.AbstractEventLoop]) -> None:
    """The thread's main function. It creates its loop itself: no signal interrupts that
    half-way."""
    try:
        loop = asyncio.new_event_loop()
        loop.set_default_executor(_DaemonThreads())
    except OSError as error:  # too many open files
        started.set_exception(error)
        return
    started.set_result(loop)
    loop.run_forever()
    for task in asyncio.all_tasks(loop):  # started while the client was being closed
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


class _DaemonThreads(ThreadPoolExecutor):
    """DNS look-ups. They cannot be cancelled, and exiting the program must not wait for one: each
    has a thread that is not joined."""

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
    """Pass the result of a task to the thread that waits for it."""
    if task.cancelled():
        answer.cancel()
    elif error := task.exception():
        answer.set_exception(error)
    else:
        answer.set_result(task.result())
