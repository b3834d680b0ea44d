"""Whatever an engine raises and wherever: the run has its end, the next command is served."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import to_builtins
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import RunRequest, State
from app.engine_thread.jobs.engine import OpenModel, StartComparison, StartRun
from app.engine_thread.jobs.judging import MeasureFidelity
from app.engine_thread.serving import ServerEngine
from app.engine_thread.status import EngineStatus
from app.engine_thread.worker import Change, EngineWorker
from engine.analysis.breaks import BreakRule
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.errors import DraftscopeError, OutOfMemoryError
from engine.options import RunOptions, SpecOptions
from tests.support.fake_session import FakeEngine
from tests.support.window_acts import job_ends

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "tests" / "data" / "qwen35-a-f32.gguf"
OPTIONS = RunOptions(spec=SpecOptions(types=("draft-mtp",)))
LANES = RunRequest(("p",), OPTIONS, lanes=(NOISE_LANE, LaneSpec.parse("planes")))
ERRORS = (
    RuntimeError("scripted"),
    OutOfMemoryError("scripted", "Do less."),
    MemoryError(),
    SystemExit(3),
)
Wait = Callable[[State], None]


@pytest.fixture
def bridge(qtbot: QtBot, engine: FakeEngine, model_file: Path) -> Iterator[Bridge]:
    """With a model in use."""
    bridge = Bridge(engine)
    bridge.ask(OpenModel(model_file))
    qtbot.waitUntil(lambda: bridge.state is State.READY)
    yield bridge
    engine.gate.set()
    assert bridge.close()


@pytest.fixture
def wait_for(qtbot: QtBot, bridge: Bridge) -> Wait:
    return lambda state: qtbot.waitUntil(lambda: bridge.state is state)


@pytest.fixture
def failed(bridge: Bridge) -> list[DraftscopeError]:
    told: list[DraftscopeError] = []
    bridge.failed.connect(told.append)
    return told


def pause(bridge: Bridge, wait_for: Wait) -> None:
    bridge.ask(StartRun(["p"], OPTIONS, rounds=2))
    wait_for(State.PAUSED)


def still_serves(bridge: Bridge, wait_for: Wait) -> None:
    """A whole run, with nothing left over from what failed."""
    bridge.ask(StartRun(["again"], OPTIONS))
    wait_for(State.READY)
    assert bridge.live is not None
    assert bridge.live.facts["stops"] == ["limit"]
    assert "error" not in bridge.live.facts


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("rounds", [None, 9], ids=["advance", "step"])
def test_a_round(
    bridge: Bridge,
    engine: FakeEngine,
    wait_for: Wait,
    failed: list[DraftscopeError],
    error: BaseException,
    rounds: int | None,
) -> None:
    engine.fail_at["round"] = error
    ended: list[object] = []
    bridge.run_ended.connect(ended.append)
    bridge.ask(StartRun(["p"], OPTIONS, rounds=rounds))
    wait_for(State.READY)
    run = bridge.live
    assert run is not None and ended == [run]
    assert len(failed) == 1
    assert run.facts["error"] == failed[0].message
    assert run.ended
    still_serves(bridge, wait_for)


@pytest.mark.parametrize("begun", [False, True])
def test_the_start(
    bridge: Bridge, engine: FakeEngine, wait_for: Wait, failed: list[DraftscopeError], begun: bool
) -> None:
    """It may fail before there is a run, or after its entry in the trace."""
    engine.fail_at["begun" if begun else "start"] = RuntimeError("scripted")
    bridge.ask(StartRun(["p"], OPTIONS))
    wait_for(State.READY)
    assert "scripted" in failed[0].message
    assert [(facts["stops"], facts["error"]) for facts in bridge.store.runs.values()] == [
        (["failed"], failed[0].message)
    ] * begun
    still_serves(bridge, wait_for)


def test_a_comparison_whose_second_lane_cannot_begin(
    bridge: Bridge, engine: FakeEngine, wait_for: Wait, failed: list[DraftscopeError]
) -> None:
    engine.fail_at["compare"] = OutOfMemoryError("No room for a lane.", "Compare fewer.")
    bridge.ask(StartComparison(LANES))
    wait_for(State.READY)
    assert [one.message for one in failed] == ["No room for a lane."]
    assert len(bridge.store.runs) == 2, "the reference lane and one more"
    for facts in bridge.store.runs.values():
        assert (facts["error"], facts["stops"]) == ("No room for a lane.", ["failed"])
    still_serves(bridge, wait_for)


Command = Callable[[Bridge, Path], object]
AFTER_PAUSE: dict[str, Command] = {
    "stop": lambda bridge, _: bridge.stop(),
    "open": lambda bridge, model: bridge.ask(OpenModel(model.with_name("other.gguf"))),
    "end": lambda bridge, _: bridge.end_run(),
}


@pytest.mark.parametrize("command", AFTER_PAUSE)
def test_the_stop_of_a_paused_run(
    bridge: Bridge,
    engine: FakeEngine,
    wait_for: Wait,
    failed: list[DraftscopeError],
    model_file: Path,
    command: str,
    qtbot: QtBot,
) -> None:
    pause(bridge, wait_for)
    run = bridge.live
    assert run is not None
    engine.fail_at["stop"] = RuntimeError("scripted")
    AFTER_PAUSE[command](bridge, model_file)
    qtbot.waitUntil(lambda: len(engine.opened) == 1 + (command == "open"))
    wait_for(State.READY)
    assert "scripted" in failed[0].message
    assert run.facts["error"] == failed[0].message
    assert run.facts["stops"] == ["failed"]
    still_serves(bridge, wait_for)


def test_the_stop_of_a_run_that_goes_on(
    bridge: Bridge, engine: FakeEngine, wait_for: Wait, failed: list[DraftscopeError], qtbot: QtBot
) -> None:
    engine.rounds = 10**9
    bridge.ask(StartRun(["p"], OPTIONS))
    qtbot.waitUntil(lambda: len(bridge.store.rounds) > 2)
    engine.fail_at["stop"] = RuntimeError("scripted")
    bridge.stop()
    wait_for(State.READY)
    assert bridge.live is not None
    assert bridge.live.facts["error"] == failed[0].message
    engine.rounds = 12
    still_serves(bridge, wait_for)


def test_a_round_and_then_the_stop_too(
    bridge: Bridge, engine: FakeEngine, wait_for: Wait, failed: list[DraftscopeError]
) -> None:
    engine.fail_at |= {"round": RuntimeError("first"), "stop": RuntimeError("second")}
    bridge.ask(StartRun(["p"], OPTIONS))
    wait_for(State.READY)
    assert ["first" in failed[0].message, "second" in failed[1].message] == [True, True]
    assert bridge.live is not None
    assert "first" in bridge.live.facts["error"]
    still_serves(bridge, wait_for)


@pytest.mark.parametrize("paused", [True, False])
def test_the_end_of_a_sequence(
    bridge: Bridge,
    engine: FakeEngine,
    wait_for: Wait,
    failed: list[DraftscopeError],
    qtbot: QtBot,
    paused: bool,
) -> None:
    engine.rounds = 10**9
    pause(bridge, wait_for)
    if not paused:
        bridge.resume()
    run = bridge.live
    assert run is not None
    engine.fail_at["cancel"] = RuntimeError("scripted")
    bridge.cancel_sequence(run, 0)
    wait_for(State.READY)
    assert run.ended
    assert run.facts["error"] == failed[0].message
    engine.rounds = 12
    still_serves(bridge, wait_for)


def test_a_sequence_of_another_run_is_never_ended(
    bridge: Bridge, engine: FakeEngine, wait_for: Wait, failed: list[DraftscopeError]
) -> None:
    pause(bridge, wait_for)
    before = bridge.live
    bridge.stop()
    wait_for(State.READY)
    pause(bridge, wait_for)
    assert before is not None and bridge.live is not None
    bridge.cancel_sequence(before, 0)
    bridge.cancel_sequence(bridge.live, 0)
    bridge.resume()
    wait_for(State.READY)
    assert engine.cancelled == [(0, 2)], "once, and of the run that goes on"


@pytest.mark.parametrize("stage", ["inspect", "open"])
@pytest.mark.parametrize("first", [True, False])
def test_opening(
    qtbot: QtBot, engine: FakeEngine, model_file: Path, stage: str, first: bool
) -> None:
    bridge = Bridge(engine)
    told: list[DraftscopeError] = []
    bridge.failed.connect(told.append)
    other = model_file.with_name("other.gguf")
    if not first:
        bridge.ask(OpenModel(other))
        qtbot.waitUntil(lambda: bridge.state is State.READY)
    engine.fail_at[stage] = RuntimeError("scripted")
    bridge.ask(OpenModel(model_file))
    qtbot.waitUntil(lambda: bool(told))
    rest = State.INSPECTED if stage == "open" else State.EMPTY
    qtbot.waitUntil(lambda: bridge.state is (rest if first else State.READY))
    shown = bridge.files
    if first and stage == "inspect":
        assert shown is None
    else:
        assert shown is not None
        assert shown.target == (model_file if first else other), "what can be used, or loaded"
    bridge.ask(OpenModel(model_file))
    qtbot.waitUntil(lambda: bridge.state is State.READY)
    assert bridge.close()


def test_the_model_before_cannot_be_let_go(
    bridge: Bridge, engine: FakeEngine, wait_for: Wait, failed: list[DraftscopeError], qtbot: QtBot
) -> None:
    assert bridge.files is not None
    other = bridge.files.target.with_name("other.gguf")
    engine.fail_at["close"] = RuntimeError("scripted")
    with qtbot.waitSignal(bridge.failed):
        bridge.ask(OpenModel(other))
    wait_for(State.READY)
    assert bridge.files.target == other
    still_serves(bridge, wait_for)


def test_measuring(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = Bridge()
    failed: list[DraftscopeError] = []
    bridge.failed.connect(failed.append)
    bridge.ask(OpenModel(MODEL))
    qtbot.waitUntil(lambda: bridge.state is State.READY)
    options = RunOptions(n_predict=2)
    bridge.ask(StartRun(["abc"], options))
    qtbot.waitUntil(lambda: bridge.state is State.READY)

    def measure(*_: object) -> None:
        raise RuntimeError("scripted")

    measured: list[MeasureFidelity] = []
    with monkeypatch.context() as patched:
        patched.setattr("engine.compare.divergence.measure_fidelity", measure)
        with job_ends(qtbot, bridge, MeasureFidelity):
            bridge.ask(MeasureFidelity("a text"), measured.append)
    qtbot.waitUntil(lambda: bridge.state is State.READY)
    assert "scripted" in failed[0].message
    assert [job.found for job in measured] == [None]
    with job_ends(qtbot, bridge, MeasureFidelity):
        assert bridge.ask(MeasureFidelity("a text"), measured.append)
        assert not bridge.ask(MeasureFidelity("a text")), "one after another"
    qtbot.waitUntil(lambda: bridge.state is State.READY)
    found = measured[1].found
    assert found is not None
    assert bridge.store.runs[0]["fidelity"] == to_builtins(found)
    bridge.ask(StartRun(["abc"], options))
    qtbot.waitUntil(lambda: bridge.state is State.READY)
    assert bridge.store.runs[1]["fidelity"] == to_builtins(found)
    assert bridge.store.runs[1]["stops"] == ["limit"]
    assert bridge.close()


def test_a_break_rule_that_fails(
    bridge: Bridge, wait_for: Wait, failed: list[DraftscopeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.set_break_rules([BreakRule.parse("depth >= 9")])

    def check(*_: object) -> None:
        raise RuntimeError("scripted")

    with monkeypatch.context() as patched:
        patched.setattr("app.engine_thread.worker.BreakWatch.check", check)
        bridge.ask(StartRun(["p"], OPTIONS))
        wait_for(State.READY)
    assert bridge.live is not None
    assert bridge.live.facts["error"] == failed[0].message
    assert bridge.live.facts["stops"] == ["stopped"], "the engine could still end it"
    still_serves(bridge, wait_for)


def test_the_models_that_were_in_use_are_let_go(
    bridge: Bridge, engine: FakeEngine, wait_for: Wait, qtbot: QtBot
) -> None:
    assert bridge.files is not None
    first, other = bridge.files.target, bridge.files.target.with_name("other.gguf")
    with qtbot.waitSignal(bridge.loaded):
        bridge.ask(OpenModel(other))
    wait_for(State.READY)
    assert engine.closed == [first]
    assert bridge.close()
    assert engine.closed == [first, other]


STUCK = """
    import json, sys, threading, time
    from pathlib import Path
    from PySide6.QtCore import QTimer
    from app.engine_thread import bridge, opening
    from app.engine_thread.jobs.engine import StartRun
    from app.window import gui
    from app.window.dialogs.files import QuitChoice
    from tests.support.fake_session import FakeEngine

    engine = FakeEngine()
    bridge.LocalEngine = lambda: engine
    bridge.CLOSE_TIMEOUT = 0.1
    bridge.Bridge.close.__defaults__ = (0.1,)
    class Window(gui.MainWindow):
        def complete(self):
            super().complete()
            self.open_model(Path("x.gguf"))
            QTimer.singleShot(0, self.go)
        def go(self):
            if not self.bridge.can_start:
                QTimer.singleShot(10, self.go)
            elif not engine.waits.is_set():
                engine.gate.clear()
                self.bridge.ask(StartRun(["p"], self.run_panel.options()))
                QTimer.singleShot(100, self.leave)
        def leave(self):
            self.sessions.quit_choice = QuitChoice.DISCARD
            self.close()
    gui.MainWindow = Window
    print(json.dumps("open"), flush=True)
    sys.exit(gui.run_window([], [], False))
"""


def test_a_window_over_an_engine_that_hangs_can_be_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STUCK)],
        cwd=ROOT,
        env={
            "PATH": "/usr/bin:/bin",
            "QT_QPA_PLATFORM": "offscreen",
            "DRAFTSCOPE_DATA_DIR": str(tmp_path / "data"),
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert json.loads(done.stdout) == "open"
    assert done.returncode == 0, done.stderr


def test_a_late_stop_says_nothing(engine: FakeEngine, model_file: Path) -> None:
    """Stop pressed twice: when the second one is served, the next run may have been asked for."""
    changes: list[Change] = []
    worker = EngineWorker(changes.append, engine, ServerEngine())
    worker.ask(OpenModel(model_file))
    worker.ask(StartRun(["p"], OPTIONS, rounds=1))
    for _ in range(2):
        last = worker.finish()
    assert last is not None
    last.result(timeout=60)
    assert worker.close(5)
    status, states = EngineStatus(), list[State]()
    status.state_changed.connect(states.append)
    for change in changes:
        change(status)
    assert states == [State.LOADING, State.READY, State.PAUSED, State.READY]
