"""From the start of a process to a window and to a token in it."""

from __future__ import annotations

import time
from statistics import median

from app.bench.child import run_child
from app.bench.figure import Figure

WINDOW_SECONDS = 1.0
TOKEN_SECONDS = 4.0


def measure_start(repeats: int) -> list[Figure]:
    """Medians of fresh processes."""
    window, token = [], []
    for _ in range(repeats):
        begun = time.monotonic()  # one clock for all processes
        seen = run_child("app.bench.started")
        window.append(seen["window"] - begun)
        token.append(seen["token"] - begun)
    name = "start"
    return [
        Figure(name, "to the visible window", median(window), "s", WINDOW_SECONDS),
        Figure(name, "to the first demo token", median(token), "s", TOKEN_SECONDS),
    ]
