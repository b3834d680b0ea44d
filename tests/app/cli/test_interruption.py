"""Signals that come at the wrong moment: what was recorded is written all the same."""

from __future__ import annotations

import os
import signal

import pytest

from app.cli.output import SIGNALS, Interrupted, on_signal, signals_wait


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_for_what_is_written(number: int) -> None:
    written: list[int] = []
    by_starter = signal.signal(number, signal.SIG_DFL)  # nohup ignores one of them
    before = [signal.getsignal(each) for each in SIGNALS]

    def write() -> None:
        with on_signal(written.append), signals_wait():
            os.kill(os.getpid(), number)
            written.append(-1)

    with pytest.raises(Interrupted) as ended:
        write()
    assert written == [-1], "the outer handler had nothing to do"
    assert ended.value.status == 128 + number
    assert [signal.getsignal(each) for each in SIGNALS] == before
    signal.signal(number, by_starter)


def test_without_a_signal_nothing_ends() -> None:
    with signals_wait():
        pass


def test_an_error_of_what_is_written_comes_first() -> None:

    def write() -> None:
        with signals_wait():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("disk")

    with pytest.raises(ValueError, match="disk"):
        write()
