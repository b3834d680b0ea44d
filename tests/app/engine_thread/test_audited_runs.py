"""Runs of the window are audited at their end, on the engine's thread."""

from __future__ import annotations

from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.jobs.open_model import OpenModel
from app.engine_thread.jobs.start_run import StartRun
from app.trace_models.live_numbers import LiveNumbers
from app.window.run_status import progress_text
from engine.options import RunOptions
from engine.trace.run_ref import RunRef
from resources import DEMO_TARGET

N = 16


def played(qtbot: QtBot, rounds: int | None) -> tuple[list[State], RunRef]:
    """The states and the run of N tokens, a prompt and N - 1 rounds."""
    bridge, states = Bridge(), list[State]()
    bridge.ask(OpenModel(DEMO_TARGET, compute="f32"))
    qtbot.waitUntil(lambda: bridge.state is State.READY, timeout=60_000)
    bridge.state_changed.connect(states.append)
    with qtbot.waitSignal(bridge.run_ended, timeout=60_000) as ended:
        bridge.ask(StartRun(["def f"], RunOptions(n_predict=N), rounds))
    assert bridge.close(60)
    return states, ended.args[0]


def test_a_run_in_steps_does_not_pause_within_its_audit(qtbot: QtBot) -> None:
    states, run = played(qtbot, N)
    assert State.PAUSED not in states
    assert run.facts["audit"]["verdict"] == "agrees"
    assert run.facts["stops"] == ["limit"]


def test_the_status_says_that_a_run_is_audited(qtbot: QtBot) -> None:
    _, run = played(qtbot, None)
    numbers = LiveNumbers(tokens=N, rounds=N)
    assert "plain decoding" not in progress_text(run, numbers)
    run.facts["audit"] = {"verdict": "going on"}
    assert "compared with plain decoding" in progress_text(run, numbers)
