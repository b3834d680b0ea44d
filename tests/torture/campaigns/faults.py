"""Anything that may fail fails once, while the program does anything: it and its runs go on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from app.engine_thread.events import RunRequest, State
from app.engine_thread.jobs.engine import StartComparison, StartRun
from app.engine_thread.jobs.files import ExportTrace
from engine.options import RunOptions, SpecOptions
from engine.session import Session
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from tests.support.golden_files import DATA
from tests.support.scripted_server import ScriptedServer
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.fault import DECODING, ERRORS, STAGES, Fault
from tests.torture.idle_acts import ACTS, IdleWindow
from tests.torture.real_window import RealWindow
from tests.torture.tuning import first_text, tune_under

_MODEL = DATA / "qwen35-c-v2x-mtp-f32.gguf"
_SETTLED = (State.READY, State.INSPECTED, State.EMPTY)
_IDLE = "idle"


def every_place() -> list[tuple[str, str]]:
    """What the program does, and what fails meanwhile: all there are, doings in turn."""
    stages = STAGES | {f"{_IDLE}: {name}": act.stages for name, act in ACTS.items()}
    most = max(map(len, stages.values()))
    return [(doing, own[i]) for i in range(most) for doing, own in stages.items() if i < len(own)]


def _draw(random: np.random.Generator, number: int) -> Case:
    places = every_place()
    doing, stage = places[number % len(places)]
    is_rare = doing.startswith(_IDLE) or stage not in DECODING
    most = random.choice([1, 1, 3] if is_rare else [1, 4, 40])
    return {
        "stage": stage,
        "error": str(random.choice(list(ERRORS))),
        "at": int(random.integers(int(most))),
        "doing": doing,
        "rollback": str(random.choice(["planes", "replay", "checkpoint"])),
    }


@contextmanager
def _served(doing: str) -> Iterator[ScriptedServer | None]:
    """A server, if one is observed."""
    if doing == "observing":
        with ScriptedServer("mtp") as server:
            yield server
    else:
        yield None


_shown: list[RealWindow] = []
"""The window of this process, once a case has made it."""


def _play(case: Case, folder: Path) -> Figures:
    doing, at = case["doing"], case["at"]
    fault = Fault(case["stage"], case["error"], at)
    if doing == "tuning":
        tune_under(fault, _MODEL, folder)
        return {"struck": fault.struck, doing: 1}
    real = _window(folder)
    options = _options(case)
    if doing.startswith(_IDLE):
        made = _fail_idle(real, doing.partition(": ")[2], fault, folder, options)
    else:
        made = _fail_run(real, doing, fault, folder, options)
    _stop(real, options)
    _go_on(real, options, folder)
    return {"struck": fault.struck, "runs": made, doing.partition(":")[0]: 1}


def _window(folder: Path) -> RealWindow:
    """The window of this process, with a model."""
    if not _shown:
        _shown.append(RealWindow(Path(tempfile.mkdtemp(dir=os.path.dirname(folder)))))
        _shown[0].window.open_model(_MODEL)
    real = _shown[0]
    real.until(lambda: real.window.bridge.state is State.READY, "a model", 60.0)
    return real


def _options(case: Case) -> RunOptions:
    return RunOptions(
        n_predict=24, spec=SpecOptions(("draft-mtp",), n_max=3), rollback=case["rollback"], n_ctx=96
    )


def _fail_idle(real: RealWindow, name: str, fault: Fault, folder: Path, options: RunOptions) -> int:
    """An act without a run: it says that it failed, and the next time it does not."""
    for _ in range(2):
        _go_on(real, options, folder)
    stored = real.window.bridge.session_store
    idle = IdleWindow(real, folder, _MODEL, options.rollback)
    if before := ACTS[name].after:
        assert idle.do(before), f"it fails without a fault: {before}"
    known = list(stored.runs)
    with fault:
        worked = idle.do(name)
    assert worked or fault.struck, f"it fails without a fault: {name}"
    assert not (worked and fault.struck), f"nothing is said of the fault: {name}"
    real.window.banners.clear()
    assert idle.do(name), f"it works no longer: {name}"
    idle.leave()
    _have_ends(stored, len(known))
    assert list(stored.runs)[: len(known)] == known, "runs are lost"
    return _runs(real) - len(known)


def _fail_run(real: RealWindow, doing: str, fault: Fault, folder: Path, options: RunOptions) -> int:
    """A run: it has an end, and those before it are kept. Returns how many were started."""
    bridge = real.window.bridge
    with _served(doing) as server:
        if server is not None:
            real.window.control.connect_server(server.url)
            real.until(lambda: bridge.server is not None and bridge.can_start, "a server", 40.0)
        before = _runs(real)
        with fault:
            _do(doing, real, options, folder)
            real.until(lambda: bridge.state in _SETTLED, f"the end of {doing}", 40.0)
            real.until(lambda: not bridge.exporting, "the end of the export")
        assert bridge.state is State.READY, f"the window is left {bridge.state.value}"
        stored = bridge.session_store
        _have_ends(stored, before)
        assert _runs(real) >= before, "runs are lost"
        made = _runs(real) - before
        if server is not None:
            n_loaded = real.n_loaded
            real.window.open_model(_MODEL)
            real.until(lambda: real.n_loaded > n_loaded and bridge.can_start, "the model", 60.0)
    return made


def _have_ends(stored: TraceStore, before: int) -> None:
    for run_id in list(stored.runs)[before:]:
        assert "stops" in stored.runs[run_id], f"run {run_id} has no end"


def _go_on(real: RealWindow, options: RunOptions, folder: Path) -> None:
    """The next run ends as it should, and everything can be exported."""
    bridge = real.window.bridge
    stored, n = bridge.session_store, _runs(real)
    bridge.ask(StartRun(["x y x y"], options))
    real.until(lambda: bridge.state is State.READY and _runs(real) > n, "the next run", 40.0)
    last = stored.runs[list(stored.runs)[-1]]
    assert last["stops"] == ["limit"], f"the next run ends by {last['stops']}"
    bridge.ask(ExportTrace(stored, folder / "after"))
    real.until(lambda: not bridge.exporting, "the export")
    assert open_trace(folder / "after").runs.keys() == stored.runs.keys()
    real.check()
    real.window.banners.clear()


def _stop(real: RealWindow, options: RunOptions) -> None:
    """A run that is stopped has the engine's end, one for each sequence."""
    bridge, n = real.window.bridge, _runs(real)
    bridge.ask(StartRun(["x y x y", "y x"], options, 2))
    real.until(lambda: bridge.state is State.PAUSED and _runs(real) > n, "a pause", 40.0)
    bridge.stop()
    real.until(lambda: bridge.state in _SETTLED, "the end of a run that is stopped")
    runs = bridge.session_store.runs
    stops = runs[list(runs)[-1]].get("stops")
    assert stops == ["stopped"] * 2, f"a run that is stopped ends by {stops}"


def _runs(real: RealWindow) -> int:
    return len(real.window.bridge.session_store.runs)


def _do(doing: str, real: RealWindow, options: RunOptions, folder: Path) -> None:
    bridge = real.window.bridge
    if doing == "comparing":
        bridge.ask(StartComparison(_comparison(options)))
    elif doing == "exporting":
        bridge.ask(StartRun(["x y x y"], options))
        bridge.ask(ExportTrace(bridge.session_store, folder / "meanwhile"))
    else:
        bridge.ask(StartRun(["x y x y"], options, 2 if doing == "paused" else None))
    if doing == "paused":
        real.until(lambda: bridge.state is not State.RUNNING, "a pause", 40.0)
        bridge.resume()
    if doing == "stepping":
        bridge.pause()
        real.until(lambda: bridge.state is not State.RUNNING, "a pause", 40.0)
        for _ in range(50):
            bridge.resume(1)
            real.until(lambda: bridge.state is not State.RUNNING, "a step", 40.0)


@cache
def _comparison(options: RunOptions) -> RunRequest:
    from engine.compare.lane_spec import NOISE_LANE, LaneSpec

    lanes = (NOISE_LANE, LaneSpec.parse(options.rollback))
    return RunRequest(("x y x y",), options, lanes=lanes)


def _prepare() -> None:
    import app.window.window  # noqa: F401

    Session.open(_MODEL, compute="f32")
    first_text(_MODEL)


CAMPAIGN = Campaign(
    "faults",
    "The program answers, every run has an end, the next one succeeds, the trace is kept.",
    _draw,
    _play,
    _prepare,
    seconds=120.0,
    n_bytes=2**30,
    batch=10,
    n_least=10,
    stalled_s=2.5,
)
