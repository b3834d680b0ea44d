"""Runs of the window are audited at their end, on the engine's thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.jobs.engine import OpenModel, StartRun
from app.engine_thread.opening import LocalEngine
from app.trace_models.run_facts import LiveNumbers
from app.window.run_status import progress_text
from engine.analysis.findings.audit import audit_sentence
from engine.audit import run_audit
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
    qtbot.waitUntil(lambda: bridge.state is State.READY, timeout=60_000)
    assert bridge.close(60)
    return states, ended.args[0]


def test_a_run_in_steps_does_not_pause_within_its_audit(qtbot: QtBot) -> None:
    states, run = played(qtbot, N)
    assert states[-2:] == [State.AUDITING, State.READY]
    assert run.facts["audit"]["verdict"] == "agrees"
    assert run.facts["stops"] == ["limit"]


def test_the_status_says_that_a_run_is_audited(qtbot: QtBot) -> None:
    _, run = played(qtbot, None)
    numbers = LiveNumbers(tokens=N, rounds=N)
    assert "plain decoding" not in progress_text(run, numbers)
    run.facts["audit"] = {"verdict": "going on"}
    assert "comparing with plain decoding" in progress_text(run, numbers)


@pytest.fixture
def bridge(qtbot: QtBot) -> Iterator[Bridge]:
    bridge = Bridge(LocalEngine())
    bridge.ask(OpenModel(DEMO_TARGET, compute="f32"))
    qtbot.waitUntil(lambda: bridge.state is State.READY, timeout=60_000)
    yield bridge
    assert bridge.close(60)


def _endless(*_: object) -> Iterator[None]:
    while True:
        yield


@pytest.fixture
def audited(bridge: Bridge, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> Bridge:
    """With a run that is audited without an end."""
    monkeypatch.setattr(run_audit, "SHARE_IN_BACKGROUND", 1e6)
    monkeypatch.setattr(run_audit.RunAudit, "_pass", _endless)
    bridge.ask(StartRun(["def f"], RunOptions(n_predict=N)))
    qtbot.waitUntil(lambda: bridge.state is State.AUDITING, timeout=60_000)
    return bridge


def test_a_new_run_ends_an_audit_at_once(audited: Bridge, qtbot: QtBot) -> None:
    first, states = audited.live, []
    audited.state_changed.connect(states.append)
    assert first is not None and audited.can_start and audited.has_run
    audited.ask(StartRun(["import"], RunOptions(n_predict=4096), rounds=2))
    qtbot.waitUntil(lambda: audited.state is State.PAUSED, timeout=60_000)
    assert states == [State.READY, State.RUNNING, State.PAUSED]
    second = audited.live
    assert second is not None and second != first
    assert first.ended and first.facts["stops"] == ["limit"]
    assert audit_sentence(first.facts) == "Audit stopped"
    assert audited.request_of(second) is not None
    assert audit_sentence(second.facts).startswith("Not audited because")
    audited.stop()
    qtbot.waitUntil(lambda: audited.state is State.READY, timeout=60_000)


def test_stop_ends_an_audit(audited: Bridge, qtbot: QtBot) -> None:
    audited.stop()
    qtbot.waitUntil(lambda: audited.state is State.READY, timeout=60_000)
    assert audited.live is not None
    assert audit_sentence(audited.live.facts) == "Audit stopped"
