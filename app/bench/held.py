"""An engine that stops between two rounds, for a picture of a run that is going on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.engine_thread.opening import open_engine

if TYPE_CHECKING:
    from engine.run import Run
    from engine.session import Session


class HeldEngine:
    """`open` opens sessions whose runs wait behind `n_rounds` rounds for `go_on`; None = never."""

    def __init__(self, n_rounds: int | None) -> None:
        self._n_rounds = n_rounds
        self._free = threading.Event()

    def go_on(self) -> None:
        """Let the rounds come again."""
        self._free.set()

    def open(
        self,
        target: Path,
        draft: Path | None,
        *,
        compute: str,
        progress: Callable[[int, int, str], None],
        cancelled: Callable[[], bool],
    ) -> Session:
        """`open_engine`, with runs that wait."""
        session = open_engine(
            target, draft, compute=compute, progress=progress, cancelled=cancelled
        )
        start = session.start
        setattr(session, "start", lambda *given: self._hold(start(*given)))  # noqa: B010
        return session

    def _hold(self, run: Run) -> Run:
        step, done = run.step, 0

        def step_or_wait() -> Any:
            nonlocal done
            if done == self._n_rounds:
                self._free.wait()
            done += 1
            return step()

        for name in ("step", "advance"):  # a wait between two rounds of `advance` hides the first
            setattr(run, name, step_or_wait)
        return run
