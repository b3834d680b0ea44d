"""Jobs: what the window asks for, from the request to what is different afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from app.engine_thread.events import CommandFailed, ProgressMade, failure, throttled
from engine.errors import Cancelled
from engine.progress import ReportProgress

if TYPE_CHECKING:
    from app.engine_thread.status import EngineStatus

Change = Callable[["EngineStatus"], object]
Post = Callable[[Change], None]
"""Has the window's thread make a change to its status, some time later."""


class Job:
    """One thing that is asked for, made anew each time. `run` works on another thread and keeps
    its results in the job; everything else is called on the window's thread."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.then: Callable[[Any], object] | None = None
        """Called with the job after `on_finish`."""

    def may_start(self, status: EngineStatus) -> bool:
        """Whether it makes sense in the present state; it is ignored otherwise."""
        return True

    def on_ask(self, status: EngineStatus) -> None:
        """Change what is different as soon as it is asked for."""

    def on_progress(self, status: EngineStatus, progress: ProgressMade) -> None:
        """Show how far it is."""
        status.progress.emit(progress)

    def on_finish(self, status: EngineStatus) -> None:
        """Take over its results. Called however it ended: they are None if it did not succeed."""

    def finish(self, status: EngineStatus) -> None:
        """Leave it: `on_finish`, then the caller's `then`."""
        self.on_finish(status)
        if self.then is not None:
            self.then(self)
        status.finished.emit(self)

    def progress(self, post: Post) -> ReportProgress:
        """The function that `run` reports its progress with."""
        return throttled(lambda made: post(lambda status: self.on_progress(status, made)))


class SideJob(Job):
    """A job on a thread of its own, whatever the engine does: it reads and writes traces."""

    has_progress = False
    """Whether the window shows how far it is, with a way to cancel it."""
    is_awaited = False
    """Whether closing waits for it: the user asked for a file."""
    failed: CommandFailed | None = None
    """What went wrong, if anything did."""

    def run(self, progress: ReportProgress) -> None:
        """Do it. May raise anything; Cancelled once `cancelled` is set."""
        raise NotImplementedError

    def start(
        self, ended: Callable[[SideJob], None], progress: ReportProgress = lambda *_: None
    ) -> None:
        """Begin; `ended` is called on the job's thread, however it ends."""
        self._thread = threading.Thread(
            target=self._work, args=(ended, progress), name=type(self).__name__, daemon=True
        )
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the end; False if it did not come in `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self, ended: Callable[[SideJob], None], progress: ReportProgress) -> None:
        try:
            self.run(progress)
        except Cancelled:
            pass
        except BaseException as error:  # a thread's exceptions reach no caller
            self.failed = failure(error)
        ended(self)

    def finish(self, status: EngineStatus) -> None:
        """Show what went wrong first."""
        if self.failed is not None:
            status.failed.emit(self.failed)
        super().finish(status)
