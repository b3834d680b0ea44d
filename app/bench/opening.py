"""How long a long trace takes from the request to the views."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from app.bench.figure import Figure
from app.bench.pulse import Pulse
from app.bench.scene import shown_window, spin
from app.bench.synthetic import trace_of
from app.shell.window import MainWindow
from engine.trace.export import export_csv

GOAL_SECONDS = 3.0


def measure_opening(n_rows: int) -> list[Figure]:
    """Export a made-up trace, then open it in the window."""
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
            spin(lambda: window.bridge.trace_folder == folder)
            read = time.perf_counter()
            spin(lambda: _shown(window))
            shown = time.perf_counter()
            pulse.stop()
    cpu = 1e3 * pulse.gaps()[1]
    name = "open"
    return [
        Figure(name, "rows", written, "rows"),
        Figure(name, "read", read - begun, "s"),
        Figure(name, "until the views show it", shown - begun, "s", GOAL_SECONDS),
        Figure(name, "longest turn of the event loop", float(cpu.max()), "ms CPU"),
    ]


def _shown(window: MainWindow) -> bool:
    """Whether the text shows the last token of every sequence."""
    store, areas = window.bridge.store, window.tokens.areas
    n_shown = sum(len(area.stream) for area in areas.values() if area.stream is not None)
    return n_shown == len(store.tokens)
