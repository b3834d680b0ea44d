"""Figures that take fresh processes: starts of the window, and how it slows the engine down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from app.saved.settings import DATA_VARIABLE
from tests.bench.window.figure import Figure

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 300
WINDOW_SECONDS = 1.0
TOKEN_SECONDS = 4.0
SLOWDOWN_PERCENT = 5.0
_DEMO_RUN = "tests.bench.window.demo_run"


def run_child(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module that prints one JSON object as its last line, with settings and data of its
    own. Raises RuntimeError with what it said when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "XDG_CONFIG_HOME": folder,
            DATA_VARIABLE: str(Path(folder) / "data"),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"{module} ended with status {done.returncode}: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_start(repeats: int) -> list[Figure]:
    """Seconds from the start of a process to the painted window and to the first token, medians."""
    window, token = [], []
    for _ in range(repeats):
        begun = time.monotonic()  # one clock for all processes
        seen = run_child("tests.bench.window.started")
        window.append(seen["window"] - begun)
        token.append(seen["token"] - begun)
    name = "start"
    return [
        Figure(name, "to the visible window", median(window), "s", WINDOW_SECONDS),
        Figure(name, "to the first demo token", median(token), "s", TOKEN_SECONDS),
    ]


def measure_slowdown(pairs: int, n_predict: int) -> list[Figure]:
    """Run the demo without and with the window in turns, each in a fresh process.

    Two processes of one kind differ by several percent on a machine that others use, as much as
    the window takes: so each is the median of some runs (tests.bench.window.demo_run), and the
    median of the pairs is given with the quartiles of them, between which half of the pairs lie.
    """
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(pairs):
        # the order changes, so that a machine that warms up favours neither
        for window in (False, True) if pair % 2 == 0 else (True, False):
            arguments = ["-n", str(n_predict), *(["--window"] if window else [])]
            speeds[window].append(float(run_child(_DEMO_RUN, *arguments)["tokens_per_second"]))
    ratios = [alone / shown for alone, shown in zip(speeds[False], speeds[True], strict=True)]
    percent = [100 * (ratio - 1) for ratio in ratios]
    low, _, high = quantiles(percent, n=4, method="inclusive") if pairs > 1 else percent * 3
    name = "engine"
    return [
        Figure(name, "headless", median(speeds[False]), "tokens/s"),
        Figure(name, "with the window", median(speeds[True]), "tokens/s"),
        Figure(name, "slow-down", median(percent), "%", SLOWDOWN_PERCENT),
        Figure(name, "slow-down, lower quartile of the pairs", low, "%"),
        Figure(name, "slow-down, upper quartile of the pairs", high, "%"),
    ]
