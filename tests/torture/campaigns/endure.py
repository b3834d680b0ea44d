"""The same work again and again: neither memory, threads, files nor objects grow, nor time."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PySide6.QtWidgets import QApplication

from app.__main__ import main
from app.engine_thread.events import RunRequest, State
from app.engine_thread.jobs.engine import StartComparison, StartRun
from engine import run_checkpoints
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.options import ROLLBACK_POLICIES, Prompt, RunOptions, SpecOptions
from engine.session import Session
from tests.support.foreign_traces import export_real_trace
from tests.support.golden_files import DATA
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.real_window import RealWindow

_MODELS = [
    DATA / f"{name}.gguf" for name in ("qwen35-c-v2x-mtp-f32", "qwen3-f-f32", "lfm2-a-tied-f32")
]
_WARM = 3
_ROUNDS = {"engine": 24, "command": 20, "window": 14}
_MALLOC = {"engine": 16 << 10, "command": 32 << 10, "window": 96 << 10}
_MOST = {
    "bytes resident": 512 << 10,
    "blocks of Python": 1000,
    "objects": 500,
    "threads": 0.4,
    "files": 0.4,
    "temporary files": 0.4,
}
"""Growth per round and act that is not a leak: a trace keeps what its runs did, Qt what it
painted."""
_SLOWER = 2.5


def _draw(random: np.random.Generator, number: int) -> Case:
    """A run is among what is repeated, whatever else is."""
    where = list(_ROUNDS)[number % len(_ROUNDS)]
    others = {"engine": _POLICIES, "command": _COMMANDS, "window": _ACTS}[where]
    more = str(random.choice([name for name in others if name != "run"]))
    return {"where": where, "acts": ["run", more]}


def _play(case: Case, folder: Path) -> Figures:
    where = case["where"]
    if where == "engine":
        session = Session.open(_MODELS[0], compute="f32")
        return _measured([lambda act=act: _decode(session, act) for act in case["acts"]], where)
    if where == "command":
        return _measured([lambda act=act: _command(act, folder) for act in case["acts"]], where)
    export_real_trace(folder / "trace")
    run_checkpoints.MOST_BYTES = 1 << 20  # reached while all gets warm
    real = RealWindow(folder)
    real.window.open_model(_MODELS[0])
    _ready(real)

    def act(name: str) -> Callable[[], None]:
        def do() -> None:
            _ACTS[name](real, folder)
            _forget(real)

        return do

    try:
        figures = _measured([act(name) for name in case["acts"]], where)
        real.check()
    finally:
        real.close()
    return figures


def _measured(acts: list[Callable[[], None]], where: str) -> Figures:
    """All acts again and again: how what is held grows from round to round, once all is warm."""
    times, held = [], []
    for _ in range(_WARM + _ROUNDS[where]):
        begun = time.thread_time()
        for act in acts:
            act()
        times.append(time.thread_time() - begun)
        held.append(_held())
    figures: Figures = {"rounds": len(times)}
    for name, most in {**_MOST, "bytes of malloc": _MALLOC[where]}.items():
        slope = _slope([one[name] for one in held[_WARM:]]) / len(acts)
        figures[f"{name.replace(' ', '_')}_max"] = slope
        assert slope <= most, f"{slope:,.1f} more {name} per round and act"
    early, late = (float(np.median(part)) for part in (times[_WARM : _WARM + 5], times[-5:]))
    assert late < _SLOWER * early + 0.05, f"{early:.3f} s at first, {late:.3f} s in the end"
    return figures


def _slope(values: list[float]) -> float:
    """The median of the slopes between any two (Theil and Sen): rare steps do not count."""
    y = np.array(values, float)
    i, j = np.triu_indices(len(y), 1)
    return float(np.median((y[j] - y[i]) / (j - i)))


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


_LIBC = ctypes.CDLL(None)
_LIBC.mallinfo2.restype = _MallInfo


def _held() -> dict[str, float]:
    gc.collect()
    _LIBC.malloc_trim(0)
    info, page = _LIBC.mallinfo2(), os.sysconf("SC_PAGE_SIZE")
    n_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes of malloc": info.uordblks + info.hblkhd,
        "bytes resident": n_pages * page,
        "blocks of Python": sys.getallocatedblocks(),
        "objects": len(gc.get_objects()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
    }


def _decode(session: Session, rollback: str) -> None:
    """A short run without a window; "run" is one with the usual rollback."""
    spec = SpecOptions(("draft-mtp", "ngram-simple"), n_max=3)
    policy = "planes" if rollback == "run" else rollback
    run = session.start(
        [Prompt((5, 6, 5, 6))], RunOptions(n_predict=6, spec=spec, n_ctx=64, rollback=policy)
    )
    while run.step():
        pass


def _ready(real: RealWindow) -> None:
    real.until(lambda: real.window.bridge.state is State.READY, "the engine", 60.0)


def _forget(real: RealWindow) -> None:
    """Close what was opened; what runs leave in the trace is little."""
    bridge = real.window.bridge
    bridge.hide_trace()
    bridge.opened = {}
    real.until(lambda: not bridge.reading and not bridge.exporting, "reading and writing")
    for _ in range(5):
        real.events()


def _run(real: RealWindow, _: Path) -> None:
    options = RunOptions(n_predict=20, n_ctx=96, spec=SpecOptions(("ngram-simple",), n_max=3))
    real.window.bridge.ask(StartRun(["x y x y"], options))
    _ready(real)


def _compare(real: RealWindow, _: Path) -> None:
    options = RunOptions(n_predict=6, n_ctx=64)
    lanes = (NOISE_LANE, LaneSpec.parse("planes"))
    real.window.bridge.ask(
        StartComparison(RunRequest(("x y",), options, lanes=lanes, draft_accept=(1, 0, 2)))
    )
    _ready(real)


def _models(real: RealWindow, _: Path) -> None:
    for model in (_MODELS[1], _MODELS[2], _MODELS[0]):
        n = real.n_loaded
        real.window.open_model(model)
        real.until(lambda n=n: real.n_loaded > n, "a model")
        _ready(real)


def _trace(real: RealWindow, folder: Path) -> None:
    real.window.sessions.open(folder / "trace")
    real.until(lambda: not real.window.bridge.reading, "reading")
    real.until(lambda: real.window.bridge.trace_folder is not None, "the trace")


def _themes(real: RealWindow, _: Path) -> None:
    for theme in ("dark", "light"):
        real.window.appearance.set_theme(theme)
        real.events()


def _layouts(real: RealWindow, _: Path) -> None:
    for action in [
        a for a in real.window.actions_by_id if a.objectName().startswith("view.layout_")
    ]:
        action.trigger()
        real.events()


def _looks(real: RealWindow, _: Path) -> None:
    real.look_at_all()
    QApplication.processEvents()


_ACTS = {
    "run": _run,
    "compare": _compare,
    "models": _models,
    "trace": _trace,
    "themes": _themes,
    "layouts": _layouts,
    "looks": _looks,
}
_POLICIES = ("run", *ROLLBACK_POLICIES)
_COMMANDS = {
    "info": ["info", "MODEL"],
    "tokenize": ["tokenize", "MODEL", "x y"],
    "run": ["run", "MODEL", "-p", "x y x y", "-n", "12", "--spec-type", "draft-mtp"],
    "compare": ["compare", "MODEL", "-p", "x y", "-n", "6", "--lane", "ring"],
    "trace": ["run", "MODEL", "-p", "x y", "-n", "6", "--trace", "OUT"],
    "refused": ["run", "nothing.gguf", "-p", "x"],
}


def _command(name: str, folder: Path) -> None:
    words = {"MODEL": str(_MODELS[0]), "OUT": str(folder / "out")}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = main([words.get(word, word) for word in _COMMANDS[name]])
    assert status == (name == "refused"), f"{name} ends with {status}"
    gc.unfreeze()  # what a command keeps for ever ends with its process


def _prepare() -> None:
    import app.window.window  # noqa: F401


CAMPAIGN = Campaign(
    "endure",
    "Nothing grows beyond what the trace holds, and nothing slows down.",
    _draw,
    _play,
    _prepare,
    seconds=240.0,
    n_bytes=2**31,
    n_least=3,
    stalled_s=2.5,
)
