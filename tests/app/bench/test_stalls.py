"""A hundred thousand tokens are on show and more arrive: no turn of the window's event loop does
work for all of them.

How long turns take is what `python -m tests.bench.window --only frames` measures; here calls are
counted, which a busy machine does not change.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from PySide6.QtCore import QTimer
from pytestqt.qtbot import QtBot

from app.window.window import MainWindow
from engine.trace.run_ref import RunRef
from tests.bench.window import window_thread
from tests.bench.window.synthetic import SyntheticRun
from tests.bench.window.window_thread import Pulse, spread_out
from tests.support.counted_calls import counted_calls
from tests.support.window_acts import settle

N_TOKENS = 100_000
MOST_CALLS = 200_000
"""Of one turn, a multiple of what it takes; one call for each token of each panel would be more."""
_ROUNDS, _REFILLS = 200, 12
_BEAT_MS, _REFILL_MS = 5, 20


@pytest.mark.slow
def test_no_turn_works_for_all_tokens_while_more_arrive(window: MainWindow, qtbot: QtBot) -> None:
    store = window.bridge.store
    run = SyntheticRun(store, n_seqs=2)
    window.resize(2000, 1200)
    spread_out(window)
    run.add(1)
    window.feed.show_run(RunRef(store, run.run_id))
    areas = window.tokens.areas

    def all_shown() -> bool:
        shown = sum(len(area.stream) for area in areas.values() if area.stream is not None)
        return shown == len(store.tokens)

    window.feed.start()
    while run.n_emitted < N_TOKENS:
        run.add(10 * _ROUNDS)
        qtbot.waitUntil(all_shown)
    settle(qtbot)
    beat, refill = QTimer(window), QTimer(window)
    beats: list[int] = []
    written = left = 0

    def write() -> None:
        nonlocal written, left
        before = count.n
        run.add(_ROUNDS)
        written += count.n - before
        left -= 1
        if not left:
            refill.stop()

    with counted_calls() as count:
        refill.timeout.connect(write)
        beat.timeout.connect(lambda: beats.append(count.n - written))
        left = _REFILLS
        beat.start(_BEAT_MS)
        refill.start(_REFILL_MS)
        qtbot.waitUntil(lambda: not left and all_shown())
        beat.stop()
    window.feed.stop()
    qtbot.waitUntil(lambda: window.plots.rollback.plot.n_rounds == run.n_rounds)
    assert len(beats) > 3
    most = max(after - before for before, after in pairwise(beats))
    assert most < MOST_CALLS


def test_the_pulse_sees_a_stall(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks that move only where the test says so."""
    clock = _Clocks()
    monkeypatch.setattr(window_thread, "time", clock)
    pulse, n_beats = Pulse(), []
    pulse._timer.timeout.connect(lambda: n_beats.append(1))
    pulse.start()
    for seconds in (0.0, 0.1, 0.0):
        clock.now += seconds
        n_beats.clear()
        qtbot.waitUntil(lambda: bool(n_beats))
    pulse.stop()
    wall, busy = pulse.gaps()
    assert busy.max() == pytest.approx(0.1) and wall.max() == pytest.approx(0.2)
    assert sorted(busy)[-2] == 0
    assert pulse.frames(0.02).sum() == pytest.approx(0.1)


class _Clocks:
    """The wall's clock goes twice as fast as the thread's."""

    now = 0.0

    def thread_time(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return 2 * self.now
