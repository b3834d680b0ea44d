"""What the window's thread does while tokens stream into every view, and while a trace opens."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from PySide6.QtCore import QObject, Qt, QTimer

from app.engine_thread.feed import FRAME_MS
from app.window.dock_area import LAYOUTS, TITLES, Pages
from app.window.window import MainWindow
from engine.trace.export import export_csv
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.bench.window.figure import Figure
from tests.bench.window.scene import settle, shown_window, wait_until
from tests.bench.window.synthetic import SyntheticRun, trace_of

_BEAT_MS = 5
TOKENS_PER_SECOND = 2000
STALL_MS = 100.0
_STEP = 0.004
_FRAMES_SIZE = (2560, 1440)
OPENING_SECONDS = 3.0


class Pulse(QObject):
    """A timer of 5 ms; a beat that comes late shows how long the event loop was busy.

    At every beat two clocks are noted: wall time, and the CPU time of this thread, which other
    programs on the machine do not lengthen.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._beats: list[tuple[float, float]] = []
        self._timer = QTimer(self)
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.setInterval(_BEAT_MS)
        self._timer.timeout.connect(self._beat)

    def start(self) -> None:
        """Forget earlier beats and begin."""
        self._beats.clear()
        self._beat()
        self._timer.start()

    def stop(self) -> None:
        """Note the clocks once more and end."""
        self._timer.stop()
        self._beat()

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """Wall and CPU seconds from each beat to the next, float64 [beats - 1] each."""
        clocks = np.diff(np.array(self._beats), axis=0)
        return clocks[:, 0], clocks[:, 1]

    def frames(self, seconds: float) -> np.ndarray:
        """CPU seconds of the thread in spans of `seconds` or just over, float64 [spans]."""
        cut: list[float] = []
        begun, used = self._beats[0]
        for at, cpu in self._beats[1:]:
            if at - begun >= seconds:
                cut.append(cpu - used)
                begun, used = at, cpu
        return np.array(cut)

    def _beat(self) -> None:
        self._beats.append((time.perf_counter(), time.thread_time()))


class RoundWriter:
    """A thread that writes rounds of a synthetic run at a given speed, as an engine would."""

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
    """Lay out all docks side by side, so that every view is drawn."""
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
        for pages in window.docks[name].findChildren(Pages):
            pages.set_stack(True)


def measure_frames(seconds: float) -> list[Figure]:
    """Stream tokens for this many seconds into a window that shows all docks."""
    store = TraceStore()
    run = SyntheticRun(store, n_seqs=2)
    with shown_window(*_FRAMES_SIZE) as window:
        spread_out(window)
        settle(0.5)
        window.feed.show_run(RunRef(store, run.run_id))
        window.feed.start()
        pulse, writer = Pulse(window), RoundWriter(run, TOKENS_PER_SECOND)
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


def measure_opening(n_rows: int) -> list[Figure]:
    """Export a synthetic trace of at least n_rows rows, then open it in the window."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "trace"
        store = trace_of(n_rows)
        export_csv(store, folder)
        written = store.size()
        del store
        with shown_window() as window:
            pulse = Pulse(window)
            pulse.start()
            begun = time.perf_counter()
            window.sessions.open(folder)
            wait_until(lambda: window.bridge.trace_folder == folder)
            read = time.perf_counter()
            wait_until(lambda: _shown(window))
            shown = time.perf_counter()
            pulse.stop()
    cpu = 1e3 * pulse.gaps()[1]
    name = "open"
    return [
        Figure(name, "rows", written, "rows"),
        Figure(name, "read", read - begun, "s"),
        Figure(name, "until the views show it", shown - begun, "s", OPENING_SECONDS),
        Figure(name, "longest turn of the event loop", float(cpu.max()), "ms CPU"),
    ]


_ROUNDS = 600
_SIZES = ((1280, 800), (1920, 1080), (1500, 900))


def measure_layouts() -> list[Figure]:
    """Change the layout and the size of a window with a run of 600 rounds."""
    store = TraceStore()
    run = SyntheticRun(store, n_seqs=1)
    run.add(_ROUNDS)
    figures = []
    with shown_window(*_SIZES[0]) as window:
        window.feed.show_run(RunRef(store, run.run_id))
        settle(1.0)
        layouts = [f"view.layout_{name}" for name in LAYOUTS]
        pulse = Pulse(window)
        changes = {name: window.actions_by_id[name].trigger for name in (*layouts, layouts[0])}
        for name, change in changes.items():
            pulse.start()
            change()
            settle(0.7)
            pulse.stop()
            most = float(1e3 * pulse.gaps()[1].max())
            figures.append(Figure("layouts", name, most, "ms CPU", STALL_MS))
        for wide, high in (*_SIZES[1:], _SIZES[0]):
            pulse.start()
            window.resize(wide, high)
            settle(0.7)
            pulse.stop()
            most = float(1e3 * pulse.gaps()[1].max())
            figures.append(Figure("layouts", f"{wide} x {high}", most, "ms CPU", STALL_MS))
    return figures


def _shown(window: MainWindow) -> bool:
    """Whether the text shows the last token of every sequence."""
    store, areas = window.bridge.store, window.tokens.areas
    n_shown = sum(len(area.stream) for area in areas.values() if area.stream is not None)
    return n_shown == len(store.tokens)
