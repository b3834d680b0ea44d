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
from tests.torture.run_sums import check_same
from tests.torture.trace_steps import apply, draw, real_store, real_trace


def _draw(random: np.random.Generator, number: int) -> Case:
    """Three of eight are as they were written."""
    if number % 8 == 7:
        names = sorted(others().keys() - set(_REFUSED))
        return {"base": names[number // 8 % len(names)], "steps": []}
    if number % 4 == 3:
        base, steps = draw_others(random)
        return {"base": base, "steps": steps}
    if number % 4 == 0:
        return {"base": "", "steps": []}
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


_REFUSED = ("captured-target.gguf", "README.md", "inprocess.json.gz", "unusual-replies.json")
"""They lie with the captures and are none."""
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
            assert case["steps"], "a whole file is not recognised"
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
    if not case["steps"]:
        what = "; ".join(banner.message for banner in said)
        assert opened, f"a whole one is refused: {what}"
        if not case["base"]:
            check_same(real.window.bridge.store, real_store())
    kind = "opened_of_others" if case["base"] else "opened_of_ours"
    return {"opened": opened, kind: opened, "refused": not opened, "blocked_s_max": real.blocked_s}


def _prepare() -> None:
    draw(np.random.default_rng(0), gently=False), real_trace(), others()
    import app.window.window  # noqa: F401


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
    n_least=16,
    stalled_s=1.5,
)
