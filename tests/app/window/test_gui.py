"""Cyclic collection happens on the window's thread while the collector is in charge."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.window import gui
from app.window.gui import Collector
from engine.long_work import collections_wait


class Loop:
    """Garbage that only a cyclic collection removes; it notes the thread that did so."""

    died_on: str = ""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        Loop.died_on = threading.current_thread().name


@pytest.fixture
def running(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(gui, "YOUNG_MS", 10)
    running = Collector()
    running.start()
    qtbot.waitUntil(lambda: gc.get_freeze_count() > 0)
    yield running
    running.stop()
    assert gc.isenabled()


def test_garbage_of_another_thread_dies_here(running: Collector, qtbot: QtBot) -> None:
    refs: list[weakref.ref[Loop]] = []

    def litter() -> None:
        loop = Loop()
        refs.append(weakref.ref(loop))
        del loop
        many = [[] for _ in range(100_000)]  # young enough and enough for automatic collection
        del many

    thread = threading.Thread(target=litter, name="elsewhere")
    thread.start()
    thread.join()
    assert refs[0]() is not None
    qtbot.waitUntil(lambda: refs[0]() is None)
    assert Loop.died_on == threading.main_thread().name


def test_nothing_is_collected_while_a_file_is_read(running: Collector, qtbot: QtBot) -> None:
    with collections_wait():
        loop = weakref.ref(Loop())
        qtbot.wait(50)
        assert loop() is not None
    qtbot.waitUntil(lambda: loop() is None)


def test_automatic_collection_is_off_only_meanwhile(running: Collector) -> None:
    assert not gc.isenabled()
    running.stop()
    assert gc.isenabled()


@pytest.mark.parametrize("period", ["YOUNG_MS", "FULL_MS"])
def test_what_was_imported_is_not_looked_through(
    qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, period: str
) -> None:
    monkeypatch.setattr(gui, period, 10)
    collector = Collector()
    before = weakref.ref(Loop())
    collector.start()
    qtbot.waitUntil(lambda: gc.get_freeze_count() > 0)
    assert before() is not None
    later = weakref.ref(Loop())
    qtbot.waitUntil(lambda: later() is None)
    collector.stop()
    assert gc.get_freeze_count() == 0


def test_pyside_reads_no_source_of_what_is_imported_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_later.py").write_text('"""PySide6"""')
    __import__("imported_later")
    ignored = -1  # 0 where the name is found in the source
    assert sys.modules["shibokensupport.feature"].pyside_feature_dict["imported_later"] == ignored
