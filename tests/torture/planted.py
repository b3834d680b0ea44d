"""A campaign with faults planted in it, for the test that the frame finds each of them.

As a program it plays it: python -m tests.torture.planted FOLDER, with a line of JSON for what was
found.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from tests.torture import children, heart
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.play import campaign_for

FAULTS = ("raises", "crashes", "exits", "hangs", "hoards", "leaves a process", "freezes")
_SECONDS, _GRACE_S, _STALLED_S = 1.5, 0.5, 0.5


def _draw(_: np.random.Generator, number: int) -> Case:
    """Every second case is as it should be, and in one of them all processes are stopped."""
    harmless = "is stopped" if number % (2 * len(FAULTS)) == 0 else ""
    step = FAULTS[number // 2 % len(FAULTS)] if number % 2 else harmless
    return {"steps": ["a", step], "settings": {"b": number}}


def _play(case: Case, folder: Path) -> Figures:
    (folder / "file").touch()
    for step in case["steps"]:
        if step == "raises":
            raise ValueError("planted")
        if step == "crashes":
            os.abort()
        if step == "exits":
            os._exit(0)
        if step == "hangs":
            time.sleep(60)
        if step == "hoards":
            np.ones(2**26)
        if step == "leaves a process":
            subprocess.Popen(["sleep", "60"])
        if step == "is stopped":
            threading.Thread(target=_beat, daemon=True).start()
            with heart.beating():
                _stop(2 * _SECONDS)
        if step == "freezes":
            with heart.beating():
                ctypes.PyDLL(None).usleep(1_000_000)  # a PyDLL keeps the interpreter's lock
    return {"steps": len(case["steps"]), "steps_max": len(case["steps"])}


def _beat() -> None:
    while True:
        heart.beat()
        time.sleep(heart.BEAT_MS / 1000)


def _stop(seconds: float) -> None:
    """Stop this process and the one that watches it for longer than a case may take."""
    stopped = (os.getppid(), os.getpid())
    waker = os.fork()
    if not waker:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in stopped:
                os.kill(process, number)
            time.sleep(seconds if number == signal.SIGSTOP else 0)
        os._exit(0)
    os.waitpid(waker, 0)


CAMPAIGN = Campaign(
    "planted",
    "Nothing is planted.",
    _draw,
    _play,
    seconds=_SECONDS,
    n_bytes=2**28,
    batch=2,
    stalled_s=_STALLED_S,
)

if __name__ == "__main__":
    children.GRACE_S = _GRACE_S
    folder = Path(sys.argv[1])
    n = 2 * len(FAULTS)  # as a seed, too: it begins with the first fault
    report = campaign_for(CAMPAIGN, n, 0, folder / "scratch", folder / "corpus", n)
    failures = list(report.failures.values())
    sys.stdout.write(json.dumps([report.line(), failures, report.broken()]) + "\n")
