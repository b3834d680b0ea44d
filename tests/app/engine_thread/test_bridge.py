"""The bridge with a scripted engine: order of states, cancelling, failing, closing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import shiboken6
from pytestqt.qtbot import QtBot

from app.engine_thread import events
from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.jobs.engine import OpenModel, StartRun
from app.engine_thread.jobs.files import ExportTrace
from engine.errors import Cancelled, DraftscopeError
from engine.options import RunOptions, SpecOptions
from engine.trace.store import TraceStore
from tests.support.fake_session import TENSORS, FakeEngine
from tests.support.window_acts import job_ends

OPTIONS = RunOptions(spec=SpecOptions(types=("draft-mtp",)))


class Watcher:
    """Everything that a bridge says, in order."""

    def __init__(self, bridge: Bridge) -> None:
        self.states: list[State] = []
        self.events: list[object] = []
        bridge.state_changed.connect(self.states.append)
        bridge.progress.connect(lambda *made: self.events.append(made))
        for signal in (bridge.failed, bridge.loaded, bridge.inspected):
            signal.connect(self.events.append)

    def of(self, kind: type) -> list[object]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def bridge(qtbot: QtBot, engine: FakeEngine) -> Iterator[Bridge]:
    bridge = Bridge(engine)
    yield bridge
    engine.gate.set()
    assert bridge.close()


@pytest.fixture
def wait_for(qtbot: QtBot, bridge: Bridge) -> Callable[[State], None]:
    return lambda state: qtbot.waitUntil(lambda: bridge.state is state)


def test_loading_goes_through_inspection_and_counts_bytes(
    bridge: Bridge, model_file: Path, wait_for: Callable[[State], None]
) -> None:
    seen = Watcher(bridge)
    bridge.ask(OpenModel(model_file))
    wait_for(State.READY)
    assert seen.states == [State.LOADING, State.READY]
    assert isinstance(seen.events[0], events.OpenedFiles), "metadata comes before the weights"
    progress = seen.of(tuple)
    assert progress
    assert all(p[1] == TENSORS for p in progress if isinstance(p, tuple))
    assert bridge.compute == "f32"


def test_the_engine_lives_on_its_own_thread(
    bridge: Bridge, engine: FakeEngine, model_file: Path, wait_for: Callable[[State], None]
) -> None:
    bridge.ask(OpenModel(model_file))
    wait_for(State.READY)
    bridge.ask(StartRun(["one two"], OPTIONS))
    wait_for(State.READY)
    assert engine.threads == {"engine_0"}


def test_a_run_goes_into_the_store_and_runs_accumulate(
    bridge: Bridge, engine: FakeEngine, model_file: Path, wait_for: Callable[[State], None]
) -> None:
    bridge.ask(OpenModel(model_file))
    wait_for(State.READY)
    store = bridge.store
    for expected in (0, 1):
        bridge.ask(StartRun(["one two"], OPTIONS))
        assert bridge.state is State.RUNNING, "at once, so that a second press does nothing"
        bridge.ask(StartRun(["again"], OPTIONS))
        wait_for(State.READY)
        assert bridge.live is not None and bridge.live.run_id == expected
    assert bridge.store is store
    assert sorted(store.runs) == [0, 1]
    assert len(store.rounds) == 2 * engine.rounds


def test_nothing_of_a_run_before_is_kept_to_run_it_again(
    bridge: Bridge, model_file: Path, qtbot: QtBot, wait_for: Callable[[State], None]
) -> None:
    bridge.ask(OpenModel(model_file))
    wait_for(State.READY)
    job = StartRun(["one two"], OPTIONS)
    bridge.ask(job)
    wait_for(State.READY)
    left, ref = weakref.ref(job), job.ref
    assert ref is not None
    del job
    bridge.ask(StartRun(["three"], OPTIONS))  # the newest is held by the thread
    wait_for(State.READY)

    def is_gone() -> bool:
        gc.collect()
        return left() is None

    qtbot.waitUntil(is_gone)
    again = bridge.again(ref)
    assert again.request.texts == ("one two",) and again is not bridge.again(ref)


def test_the_first_round_waits_until_the_run_is_on_show(
    bridge: Bridge, model_file: Path, wait_for: Callable[[State], None]
) -> None:
    bridge.ask(OpenModel(model_file))
    wait_for(State.READY)
    sizes: list[int] = []

    def show(_: object) -> None:
        time.sleep(0.05)  # as a window that has much to do
        sizes.append(bridge.store.size())

    bridge.run_started.connect(show)
    bridge.ask(StartRun(["one two"], OPTIONS))
    wait_for(State.READY)
    assert bridge.live is not None and bridge.live.facts["stops"] == ["limit"]
    assert sizes == [0], "nothing was decoded while the window was busy with the run's beginning"


def test_pause_step_resume_stop(
    bridge: Bridge, engine: FakeEngine, model_file: Path, wait_for: Callable[[State], None]
) -> None:
    engine.rounds = 10_000
    bridge.ask(OpenModel(model_file))
    wait_for(State.READY)
    bridge.ask(StartRun(["p"], OPTIONS))
    bridge.pause()
    wait_for(State.PAUSED)
    paused_at = len(bridge.store.rounds)
    time.sleep(0.05)
    assert len(bridge.store.rounds) == paused_at, "nothing moves while paused"
    bridge.resume(rounds=1)
    wait_for(State.PAUSED)
    assert len(bridge.store.rounds) <= paused_at + 1
    bridge.resume(rounds=3)
    wait_for(State.PAUSED)
    stepped = len(bridge.store.rounds)
    assert stepped >= paused_at + 3
    bridge.resume()
    wait_for_rows(bridge, stepped + 5)
    bridge.stop()
    wait_for(State.READY)
    assert bridge.can_start


def wait_for_rows(bridge: Bridge, n: int) -> None:
    deadline = time.monotonic() + 60
    while len(bridge.store.rounds) < n:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_one_round_from_the_start_pauses_after_the_prompt(
    bridge: Bridge, model_file: Path, wait_for: Callable[[State], None]
) -> None:
    bridge.ask(OpenModel(model_file))
    wait_for(State.READY)
    bridge.ask(StartRun(["p"], OPTIONS, rounds=1))
    wait_for(State.PAUSED)
    assert bridge.store.tokens.texts("kind") == ["prompt", "target"]


def test_stop_pressed_while_a_step_is_about_to_pause_is_not_lost(
    bridge: Bridge, engine: FakeEngine, model_file: Path, wait_for: Callable[[State], None]
) -> None:
    bridge.ask(OpenModel(model_file))
    wait_for(State.READY)
    bridge.ask(StartRun(["p"], OPTIONS, rounds=1))
    rows = threading.Event()
    while not bridge.store.tokens:  # the worker is past its last look at the flags, or about to be
        rows.wait(0.001)
    rows.wait(0.02)
    bridge.stop()
    wait_for(State.READY)


def test_cancelled_load_without_a_session_leaves_the_map(
    bridge: Bridge, engine: FakeEngine, model_file: Path, wait_for: Callable[[State], None]
) -> None:
    engine.gate.clear()
    bridge.ask(OpenModel(model_file))
    wait_for(State.LOADING)
    bridge.cancel()
    wait_for(State.INSPECTED)
    assert bridge.files is not None
    assert not bridge.can_start


def test_cancelled_load_keeps_the_session_in_use(
    bridge: Bridge, engine: FakeEngine, model_file: Path, wait_for: Callable[[State], None]
) -> None:
    bridge.ask(OpenModel(model_file))
    wait_for(State.READY)
    engine.gate.clear()
    bridge.ask(OpenModel(model_file.with_name("other.gguf")))
    wait_for(State.LOADING)
    bridge.cancel()
    wait_for(State.READY)
    assert bridge.files is not None
    assert bridge.files.target == model_file
    engine.gate.set()
    bridge.ask(StartRun(["still works"], OPTIONS))
    wait_for(State.READY)
    assert len(bridge.store.rounds) > 0


def test_the_second_of_two_opens_wins(
    bridge: Bridge, engine: FakeEngine, model_file: Path, qtbot: QtBot
) -> None:
    engine.gate.clear()
    bridge.ask(OpenModel(model_file))
    other = model_file.with_name("other.gguf")
    bridge.ask(OpenModel(other))
    engine.gate.set()
    qtbot.waitUntil(lambda: bridge.state is State.READY)
    assert [opened[0] for opened in engine.opened] == [other]


def test_bad_file_is_a_failure_and_nothing_more(
    bridge: Bridge, tmp_path: Path, qtbot: QtBot
) -> None:
    seen = Watcher(bridge)
    bridge.ask(OpenModel(tmp_path / "letter.txt"))
    qtbot.waitUntil(lambda: bool(seen.of(DraftscopeError)))
    failed = seen.of(DraftscopeError)[0]
    assert isinstance(failed, DraftscopeError)
    assert failed.message == "letter.txt: byte 0: no GGUF file."
    assert failed.remedy == "Choose another."
    assert bridge.state is State.EMPTY


def test_failing_engine_keeps_the_trace_and_can_run_again(
    bridge: Bridge, engine: FakeEngine, model_file: Path, wait_for: Callable[[State], None]
) -> None:
    seen = Watcher(bridge)
    engine.fail_round = 5
    bridge.ask(OpenModel(model_file))
    wait_for(State.READY)
    bridge.ask(StartRun(["p"], OPTIONS))
    wait_for(State.READY)
    assert "scripted failure" in str(seen.of(DraftscopeError)[0])
    assert len(bridge.store.rounds) == 5
    engine.fail_round = None
    bridge.ask(StartRun(["p"], OPTIONS))
    wait_for(State.READY)
    assert bridge.live is not None and bridge.live.run_id == 1


def test_every_model_keeps_its_own_trace(
    bridge: Bridge, model_file: Path, wait_for: Callable[[State], None], qtbot: QtBot
) -> None:
    other = model_file.with_name("other.gguf")
    stores = []
    for path in (model_file, other, model_file, other):
        with qtbot.waitSignal(bridge.loaded):
            bridge.ask(OpenModel(path))
        wait_for(State.READY)
        assert (bridge.live is None) is (len(stores) < 2), "its newest run, if it had any"
        bridge.ask(StartRun(["p"], OPTIONS))
        wait_for(State.READY)
        stores.append(bridge.store)
    assert stores[:2] == stores[2:]
    assert [(runs.model, runs.store) for runs in bridge.recorded] == [
        ("model", stores[0]),
        ("other", stores[1]),
    ]
    assert [len(runs.store.runs) for runs in bridge.recorded] == [2, 2]
    assert [runs.store.runs[1]["model"]["name"] for runs in bridge.recorded] == [
        "model.gguf",
        "other.gguf",
    ]


def test_close_while_running_ends_the_thread_in_time(
    qtbot: QtBot, engine: FakeEngine, model_file: Path
) -> None:
    before = set(threading.enumerate())
    engine.rounds = 10**9
    bridge = Bridge(engine)
    bridge.ask(OpenModel(model_file))
    qtbot.waitUntil(lambda: bridge.state is State.READY)
    bridge.ask(StartRun(["p"], OPTIONS))
    assert bridge.close(timeout=60)
    assert set(threading.enumerate()) <= before


def test_close_tells_when_the_engine_does_not_stop(
    qtbot: QtBot, engine: FakeEngine, model_file: Path
) -> None:
    bridge = Bridge(engine)
    bridge.ask(OpenModel(model_file))
    qtbot.waitUntil(lambda: bridge.state is State.READY)
    engine.gate.clear()
    bridge.ask(StartRun(["p"], OPTIONS))
    qtbot.waitUntil(engine.waits.is_set)
    assert not bridge.close(timeout=0.05)
    engine.gate.set()
    assert bridge.close(timeout=60)


class _Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_progress_is_thinned_out_but_its_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = _Clock(), list[tuple[int, int, str]]()
    monkeypatch.setattr(events, "time", clock)
    report = events.throttled(lambda *made: seen.append(made))
    for done in range(10_001):
        clock.now += events.PROGRESS_PERIOD / 200
        report(done, 10_000, "x")
    assert len(seen) == pytest.approx(10_000 / 200, abs=2)
    assert seen[-1] == (10_000, 10_000, "x")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "There is not enough memory for this."),
        (ValueError("odd"), "The engine failed: ValueError: odd."),
    ],
)
def test_every_error_becomes_a_sentence_and_a_remedy(error: Exception, message: str) -> None:
    failed = events.failure(error)
    assert failed.message == message
    assert failed.remedy.endswith(".")


def test_export_that_is_cancelled_says_only_that_it_ended(
    bridge: Bridge, tmp_path: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export_csv(
        store: TraceStore, folder: Path, *, cancelled: Callable[[], bool], **_: object
    ) -> None:
        while not cancelled():
            time.sleep(0.001)
        raise Cancelled

    monkeypatch.setattr("app.engine_thread.jobs.files.export_csv", export_csv)
    exported: list[object] = []
    bridge.exported.connect(exported.append)
    bridge.ask(ExportTrace(bridge.store, tmp_path / "out"))
    assert bridge.exporting
    with job_ends(qtbot, bridge, ExportTrace):
        bridge.cancel()
    assert not exported
    assert not bridge.exporting


def test_an_export_has_an_end_whatever_is_raised_in_it(
    bridge: Bridge, tmp_path: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export_csv(*_: object, **__: object) -> None:
        raise GeneratorExit

    monkeypatch.setattr("app.engine_thread.jobs.files.export_csv", export_csv)
    failed: list[DraftscopeError] = []
    bridge.failed.connect(failed.append)
    with job_ends(qtbot, bridge, ExportTrace):
        bridge.ask(ExportTrace(bridge.store, tmp_path / "out"))
    assert [one.message for one in failed] == ["The engine failed: GeneratorExit: ."]
    assert not bridge.exporting


def test_a_job_that_outlives_the_window_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr("app.engine_thread.jobs.files.export_csv", lambda *_, **__: goes_on.wait())
    ended: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    bridge = Bridge(FakeEngine())
    job = ExportTrace(bridge.store, tmp_path / "out")
    bridge.ask(job)
    bridge.close(timeout=0.01)
    shiboken6.delete(bridge)
    goes_on.set()
    assert job.join(60)
    assert ended == []
