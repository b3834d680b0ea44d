"""The clock of the campaigns runs while somebody looks at it, and is while no one does."""

from __future__ import annotations

import os
import signal

import pytest

from tests.torture import awake


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the wall clock says, to be changed."""
    said = [1000.0]
    monkeypatch.setattr(awake.time, "monotonic", lambda: said[-1])
    awake.now()
    return said


def test_looks_that_are_near_count_whole(seconds: list[float]) -> None:
    start = awake.now()
    for _ in range(50):
        seconds.append(seconds[-1] + awake.LOOK_S)
        awake.now()
    assert awake.now() - start == pytest.approx(50 * awake.LOOK_S)


def test_a_hole_counts_a_second(seconds: list[float]) -> None:
    start = awake.now()
    seconds.append(seconds[-1] + 600)
    assert awake.now() - start == 1.0
    assert awake.now() - start == 1.0


def test_a_forked_process_looks_at_the_same_clock(seconds: list[float]) -> None:
    start = awake.now()
    child = os.fork()
    if not child:
        seconds.append(seconds[-1] + 0.5)
        awake.now()
        os._exit(0)
    os.waitpid(child, 0)
    seconds.append(seconds[-1] + 0.5)
    assert awake.now() - start == 0.5


def test_two_processes_that_look_at_once_do_not_turn_it_back():
    begin = awake.now()
    if not (child := os.fork()):
        while True:
            awake.now()
    try:
        times = [awake.now() for _ in range(1_200_000)]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert min(times) > begin - 0.5
