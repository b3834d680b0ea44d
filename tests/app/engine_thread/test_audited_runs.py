"""Runs of the window are audited at their end, on the engine's thread."""

from __future__ import annotations

from typing import Any

from app.engine_thread.events import RunEnded, State, StateChanged
from app.engine_thread.jobs import OpenRequest, RunFlags, RunRequest
from app.engine_thread.opening import LocalEngine
from app.engine_thread.worker import EngineWorker
from app.trace_models.live_numbers import LiveNumbers
from app.window.run_progress import progress_text
from engine.options import RunOptions
from resources import DEMO_TARGET

N = 16


def played(flags: RunFlags, rounds: int | None) -> list[Any]:
    """The events of a run of N tokens, a prompt and N - 1 rounds."""
    events: list[Any] = []

    def post(event: Any) -> None:
        events.append(event)

    worker = EngineWorker(post, LocalEngine(), None)  # type: ignore[arg-type]
    try:
        worker.open(OpenRequest(DEMO_TARGET, (), "f32"))
        worker.start(RunRequest(("def f",), RunOptions(n_predict=N)), flags, rounds)
        ended = worker.finish()
        assert ended is not None
        ended.result(60)
    finally:
        assert worker.close(60)
    return events


def test_a_run_in_steps_does_not_pause_within_its_audit() -> None:
    flags = RunFlags()
    flags.shown.set()
    events = played(flags, N)
    (ended,) = [event for event in events if isinstance(event, RunEnded)]
    assert StateChanged(State.PAUSED) not in events
    assert ended.run.facts["audit"]["verdict"] == "agrees"
    assert ended.run.facts["stops"] == ["limit"]


def test_the_status_says_that_a_run_is_audited() -> None:
    flags = RunFlags()
    flags.shown.set()
    (run,) = [event.run for event in played(flags, None) if isinstance(event, RunEnded)]
    numbers = LiveNumbers(tokens=N, rounds=N)
    assert "plain decoding" not in progress_text(run, numbers)
    run.facts["audit"] = {"verdict": "going on"}
    assert "compared with plain decoding" in progress_text(run, numbers)
