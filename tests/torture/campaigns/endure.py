"""The same work again and again: neither memory, threads, files nor objects grow, nor time."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PySide6.QtWidgets import QApplication

from app.__main__ import main
from app.engine_thread.events import State
from app.engine_thread.jobs import CompareRequest
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.options import RunOptions, SpecOptions
from tests.support.foreign_traces import export_real_trace
from tests.support.golden_files import DATA
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.real_window import RealWindow

_MODELS = [
    DATA / f"{name}.gguf" for name in ("qwen35-c-v2x-mtp-f32", "qwen3-f-f32", "lfm2-a-tied-f32")
]
_WARM, _MEASURED = 3, 8
_MEMORY = 24 << 20
"""Growth over the measured rounds that fragments of memory explain."""
_OBJECTS = 4000
_SLOWER = 2.5


def _draw(random: np.random.Generator, number: int) -> Case:
    if number % 3 == 2:
        acts = random.choice(list(_COMMANDS), int(random.integers(1, 4))).tolist()
        return {"where": "command", "acts": acts}
    return {
        "where": "window",
        "acts": random.choice(list(_ACTS), int(random.integers(2, 6))).tolist(),
    }


def _play(case: Case, folder: Path) -> Figures:
    if case["where"] == "command":
        return _measured([lambda act=act: _command(act, folder) for act in case["acts"]])
    export_real_trace(folder / "trace")
    real = RealWindow(folder)
    real.window.open_model(_MODELS[0])
    _ready(real)

    def act(name: str) -> Callable[[], None]:
        def do() -> None:
            _ACTS[name](real, folder)
            _forget(real)

        return do

    try:
        figures = _measured([act(name) for name in case["acts"]])
        real.check()
    finally:
        real.close()
    return figures


def _measured(acts: list[Callable[[], None]]) -> Figures:
    """All acts some times to warm up, then more often: what has grown between the two."""
    times = []
    start = _held()
    for i in range(_WARM + _MEASURED):
        if i == _WARM:
            start = _held()
        begun = time.thread_time()
        for act in acts:
            act()
        times.append(time.thread_time() - begun)
    memory, objects, threads, files = (b - a for a, b in zip(start, _held(), strict=True))
    assert threads <= 0, f"{threads} threads more"
    assert files <= 0, f"{files} files more"
    assert memory < _MEMORY, f"{memory >> 10} KiB more after {_MEASURED} rounds"
    assert objects < _OBJECTS, f"{objects} objects more after {_MEASURED} rounds"
    early, late = (float(np.median(part)) for part in (times[_WARM : _WARM + 3], times[-3:]))
    assert late < _SLOWER * early + 0.05, f"{early:.3f} s at first, {late:.3f} s in the end"
    return {"rounds": len(times), "grown_kib_max": memory >> 10, "objects_max": objects}


def _held() -> tuple[int, int, int, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    n_files = len(os.listdir("/proc/self/fd"))
    return (
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(gc.get_objects()),
        threading.active_count(),
        n_files,
    )


def _ready(real: RealWindow) -> None:
    real.until(lambda: real.window.bridge.state is State.READY, "the engine", 60.0)


def _forget(real: RealWindow) -> None:
    """Close what was opened; what runs leave in the trace is little."""
    bridge = real.window.bridge
    bridge.hide_trace()
    bridge.opened = []
    real.until(lambda: not bridge.reading and not bridge.exporting, "reading and writing")
    for _ in range(5):
        real.events()


def _run(real: RealWindow, _: Path) -> None:
    options = RunOptions(n_predict=20, n_ctx=96, spec=SpecOptions(("ngram-simple",), n_max=3))
    real.window.bridge.start(["x y x y"], options)
    _ready(real)


def _compare(real: RealWindow, _: Path) -> None:
    options = RunOptions(n_predict=6, n_ctx=64)
    lanes = (NOISE_LANE, LaneSpec.parse("planes"))
    real.window.bridge.compare(CompareRequest(("x y",), options, lanes, (1, 0, 2)))
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
        real.window.set_theme(theme)
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


def _prepare() -> None:
    import app.shell.window  # noqa: F401


CAMPAIGN = Campaign(
    "endure",
    "Nothing grows beyond what the trace holds, and nothing slows down.",
    _draw,
    _play,
    _prepare,
    seconds=240.0,
    n_bytes=2**31,
)
