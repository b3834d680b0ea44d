"""Traces, captures and records from anywhere, opened in the real window."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from engine.errors import DraftscopeError
from engine.observe.files.importing import recognise_file
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.foreign_steps import draw_others, others, write_other
from tests.torture.real_window import RealWindow
from tests.torture.trace_steps import apply, draw, real_trace


def _draw(random: np.random.Generator, number: int) -> Case:
    if number % 4 == 3:
        base, steps = draw_others(random)
        return {"base": base, "steps": steps}
    gently, n = bool(random.random() < 0.5), int(random.choice([1, 1, 2, 4]))
    return {"base": "", "steps": [draw(random, gently=gently) for _ in range(n)]}


def _write(case: Case, folder: Path) -> Path:
    """What is to be opened."""
    if case["base"]:
        return write_other(case["base"], case["steps"], folder)
    target = folder / "trace"
    shutil.copytree(real_trace(), target)
    for step in case["steps"]:
        apply(step, target)
    return target


_shown: list[RealWindow] = []
"""The window of this process, once a case has made it."""


def _play(case: Case, folder: Path) -> Figures:
    if case["base"] and case["base"] not in others():
        return {"not_here": 1}
    if not _shown:
        _shown.append(RealWindow(Path(tempfile.mkdtemp(dir=os.path.dirname(folder)))))
    real = _shown[0]
    path = _write(case, folder)
    if case["base"]:
        try:
            known = recognise_file(path)
        except DraftscopeError:
            known = None
        if not known:
            return {"refused": 1, "not_recognised": 1}
    real.blocked_s, n = 0.0, real.n_read
    real.window.sessions.open(path)
    real.until(lambda: real.n_read > n, "the end of reading")
    opened = real.window.bridge.trace_folder == path
    if opened:
        real.look_at_all()
    real.check()
    said = [b for b in real.window.banners.banners if b.severity == "error"]
    assert opened or said, "it is neither open nor refused"
    kind = "opened_of_others" if case["base"] else "opened_of_ours"
    return {"opened": opened, kind: opened, "refused": not opened, "blocked_s_max": real.blocked_s}


def _shares(figures: Figures) -> Figures:
    """How much gets past the readers."""
    return figures | {"opened_share": figures.get("opened", 0) / max(1, figures["cases"])}


def _prepare() -> None:
    draw(np.random.default_rng(0), gently=False), real_trace(), others()
    import app.shell.window  # noqa: F401


CAMPAIGN = Campaign(
    "trace",
    "A sentence, or a trace on show: alive, blocked 2 s at most, within 1 GiB.",
    _draw,
    _play,
    _prepare,
    seconds=60.0,
    n_bytes=2**30,
    batch=10,
    share=1.5,
    derive=_shares,
)
