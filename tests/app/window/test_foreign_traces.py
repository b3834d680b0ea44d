"""Traces that come from anywhere, in the real window: what opens is shown, in little memory."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QAbstractItemModel, QAbstractListModel, Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QAbstractItemView, QApplication, QDockWidget, QLabel, QWidget
from pytestqt.qtbot import QtBot

from app.engine_thread.jobs.files import ReadTrace
from app.window.window import MainWindow
from engine.errors import TraceFileError
from engine.trace.export import SESSION_FILE
from engine.trace.records import TABLES
from tests.support.foreign_traces import (
    DAMAGES,
    JUNK,
    columns,
    damaged,
    export_real_trace,
    facts,
    is_refused,
    keep_only,
    opened,
    read_rows,
    replaced,
    without_tables,
    write_rows,
)
from tests.support.window_acts import job_ends, messages

pytestmark = pytest.mark.shares_window

ROOM = 1 << 30


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "trace"
    export_real_trace(folder)
    return folder


@contextmanager
def bounded() -> Iterator[None]:
    """Little more memory than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def show(qtbot: QtBot, window: MainWindow, folder: Path) -> None:
    """Open a trace and look at every view of it."""
    window.resize(1400, 900)
    with bounded():
        with job_ends(qtbot, window.bridge, ReadTrace, timeout=60_000):
            window.sessions.open(folder)
        for dock in window.findChildren(QDockWidget):
            dock.show()
            dock.raise_()
            QApplication.processEvents()
            dock.widget().grab()
        for plot in (window.panels.plots.rollback, window.panels.plots["ring"]):
            plot.plot.show_all()
            for unit in ("token", "time", "round"):
                plot.plot.set_unit(unit)
                QApplication.processEvents()


# what no column of numbers takes is refused before a view sees it
PASSING = set(DAMAGES) - {"beyond the largest", "beyond all integers", "a word"}


@pytest.mark.parametrize("damage", sorted(PASSING))
@pytest.mark.thinned(6)
def test_damage_that_opens_is_shown(
    real: Path, tmp_path: Path, window: MainWindow, qtbot: QtBot, damage: str
) -> None:
    """Of every column, the damage that a reader lets pass: all columns with it in one trace."""
    folder = tmp_path / "trace"
    shutil.copytree(real, folder)
    for table in TABLES:
        alone = tmp_path / table
        shutil.copytree(real, alone)
        keep_only(alone, table)
        rows = read_rows(real, table)
        for _, column, name in (found for found in columns() if found[0] == table):
            tried = damaged(rows, name, column, damage)
            write_rows(alone, table, tried)
            if not isinstance(opened(alone), TraceFileError):
                rows = tried
        write_rows(folder, table, rows)
    show(qtbot, window, folder)
    assert window.bridge.trace_folder == folder
    assert not [text for text in messages(window) if text.startswith("error")]


def test_damaged_facts_that_open_are_shown(
    real: Path, tmp_path: Path, window: MainWindow, qtbot: QtBot, pytestconfig: pytest.Config
) -> None:
    """Every fact replaced by something else, where a reader lets it pass; with --all twice."""
    folder = tmp_path / "trace"
    shutil.copytree(real, folder)
    session = json.loads((real / SESSION_FILE).read_text("utf-8"))
    runs = without_tables(session)
    for first in range(1 + pytestconfig.getoption("all")):
        changed = session
        for i, place in enumerate(facts(session), start=first * 5):
            junk = JUNK[i % len(JUNK)]
            if not is_refused(tmp_path, replaced(runs, place, junk)):
                changed = replaced(changed, place, junk)
        (folder / SESSION_FILE).write_text(json.dumps(changed), "utf-8")
        show(qtbot, window, folder)
        assert window.bridge.trace_folder == folder
        assert not [text for text in messages(window) if text.startswith("error")]
        window.bridge.close_trace()


MARKED_UP = "<b>bold</b><img src='x.png'>"


def test_nothing_of_a_trace_is_taken_for_markup(
    real: Path, tmp_path: Path, window: MainWindow, qtbot: QtBot
) -> None:
    """Labels and tool tips show markup as it is written, and name characters that turn text."""
    folder = tmp_path / "trace"
    shutil.copytree(real, folder)
    session = json.loads((real / SESSION_FILE).read_text("utf-8"))
    runs = without_tables(session)
    for place in facts(session):
        tried = replaced(runs, place, f"{MARKED_UP}\u202e")
        if isinstance(_at(runs, place), str) and not is_refused(tmp_path, tried):
            runs = tried
    changed = session | {"runs": runs["runs"]}
    (folder / SESSION_FILE).write_text(json.dumps(changed), "utf-8")
    rows = read_rows(real, "findings")
    write_rows(
        folder,
        "findings",
        [rows[0], *([MARKED_UP if x in ("r", "m", "e") else x for x in row] for row in rows[1:])],
    )
    show(qtbot, window, folder)
    tips = [widget.toolTip() for widget in window.findChildren(QWidget)]
    tips += [action.toolTip() for action in window.findChildren(QAction)]
    for view in window.findChildren(QAbstractItemView):
        tips += list(_tips(view.model()))
    assert sum("bold" in tip for tip in tips) > 3
    for tip in tips:
        assert MARKED_UP not in tip or not Qt.mightBeRichText(tip), tip
        assert "\u202e" not in tip, tip
    labels = [label for label in window.findChildren(QLabel) if "bold" in label.text()]
    assert labels
    for label in labels:
        assert label.textFormat() is Qt.TextFormat.PlainText, label.text()
    assert "\u202e" not in window.windowTitle()


def _at(value: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _tips(model: QAbstractItemModel | None) -> Iterator[str]:
    """Of every cell and every heading."""
    tip, sides = Qt.ItemDataRole.ToolTipRole, (Qt.Orientation.Horizontal, Qt.Orientation.Vertical)
    if model is None or isinstance(model, QAbstractListModel):  # whose columns Qt keeps to itself
        return
    for row in range(min(model.rowCount(), 50)):
        for column in range(model.columnCount()):
            yield str(model.index(row, column).data(tip) or "")
    for side in sides:
        n = model.columnCount() if side is sides[0] else min(model.rowCount(), 50)
        for section in range(n):
            yield str(model.headerData(section, side, tip) or "")
