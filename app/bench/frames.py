"""What a frame costs while tokens stream into every view."""

from __future__ import annotations

import threading
import time

import numpy as np
from PySide6.QtCore import Qt

from app.bench.figure import Figure
from app.bench.pulse import Pulse
from app.bench.scene import settle, shown_window
from app.bench.synthetic import SyntheticRun
from app.engine_thread.feed import FRAME_MS
from app.shell.docks import TITLES
from app.shell.window import MainWindow
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

TOKENS_PER_SECOND = 2000
STALL_MS = 100.0
_STEP = 0.004
_SIZE = (2560, 1440)


class Writer:
    """Writes rounds from a thread of its own, so many tokens per second, as an engine does."""

    def __init__(self, run: SyntheticRun, tokens_per_second: float) -> None:
        self._run, self._speed = run, tokens_per_second
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name="writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        run, begun = self._run, time.perf_counter()
        first = run.n_emitted
        per_round = 2.6 * run.n_seqs
        while not self._stop.wait(_STEP):
            due = (time.perf_counter() - begun) * self._speed - (run.n_emitted - first)
            if due >= per_round:
                run.add(int(due / per_round))


def spread_out(window: MainWindow) -> None:
    """Every dock open beside the others, none behind a tab."""
    below, right = Qt.DockWidgetArea.BottomDockWidgetArea, Qt.DockWidgetArea.RightDockWidgetArea
    names = [name for name in TITLES if name not in ("model", "run")]
    half = len(names) // 2
    for area, along, column in (
        (below, Qt.Orientation.Horizontal, names[:half]),
        (right, Qt.Orientation.Vertical, names[half:]),
    ):
        for name in column:
            window.removeDockWidget(window.docks[name])
        for before, name in zip(("", *column), column, strict=False):
            if before:
                window.splitDockWidget(window.docks[before], window.docks[name], along)
            else:
                window.addDockWidget(area, window.docks[name])
    for name in TITLES:
        window.docks[name].show()


def measure_frames(seconds: float) -> list[Figure]:
    """Stream for so long into a window with all docks in sight."""
    store = TraceStore()
    run = SyntheticRun(store, n_seqs=2)
    with shown_window(*_SIZE) as window:
        spread_out(window)
        settle(0.5)
        window.feed.show_run(RunRef(store, run.run_id))
        window.feed.start()
        pulse, writer = Pulse(window), Writer(run, TOKENS_PER_SECOND)
        writer.start()
        settle(0.5)  # what is made once, at the first rows
        pulse.start()
        begun, first = time.perf_counter(), run.n_emitted
        settle(seconds)
        speed = (run.n_emitted - first) / (time.perf_counter() - begun)
        pulse.stop()
        writer.stop()
        window.feed.stop()
    frames = 1e3 * pulse.frames(FRAME_MS / 1e3)
    wall, cpu = (1e3 * gaps for gaps in pulse.gaps())
    half, most = np.percentile(frames, (50, 95)).tolist()
    name = "frames"
    return [
        Figure(name, "tokens into all views", speed, "tokens/s"),
        Figure(name, "window's thread per frame, p50", half, "ms", FRAME_MS),
        Figure(name, "window's thread per frame, p95", most, "ms", FRAME_MS),
        Figure(name, "longest turn of the event loop", float(cpu.max()), "ms CPU", STALL_MS),
        Figure(name, "longest time without a beat", float(wall.max()), "ms", STALL_MS),
    ]
