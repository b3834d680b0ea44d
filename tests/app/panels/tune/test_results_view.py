"""Results in the window: opened, sorted, pointed at, and the traces after them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QFileDialog
from pytestqt.qtbot import QtBot

from app.engine_thread.jobs.files import ReadResults
from app.panels.tune.results_view import ResultsView
from app.window.window import MainWindow
from engine.experiments.results.table import trace_folder
from engine.trace.export import export_csv
from tests.support.counted_calls import calls_of, counted_calls
from tests.support.sweeps import write_results
from tests.support.timed_trace import timed_trace
from tests.support.window_acts import drop, job_ends, messages


def opened(window: MainWindow, qtbot: QtBot, path: Path) -> ResultsView:
    window.opened_results.open(path)
    view = window.panels.results
    qtbot.waitUntil(lambda: view.results is not None)
    qtbot.waitUntil(view.isVisible)
    return view


def rows_shown(view: ResultsView) -> list[str]:
    return [view.model.index(row, 0).data() for row in range(view.model.rowCount())]


def selected(view: ResultsView) -> list[str]:
    return sorted((i.data() for i in view.table.selectionModel().selectedRows()), key=int)


def test_a_file_is_chosen_sorted_and_pointed_at(
    window: MainWindow, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_results(tmp_path, 3, 8)
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *_a, **_k: (str(path), ""))
    window.actions_by_id["file.open_results"].trigger()
    view = window.panels.results
    qtbot.waitUntil(lambda: view.results is not None)
    assert view.headline.text() == "lengths"
    assert rows_shown(view) == [str(i) for i in range(1, 25)]
    header = view.table.horizontalHeader()
    speed = 3
    place = QPoint(header.sectionViewportPosition(speed) + 8, header.height() // 2)
    for expected in (["1", "2", "3"], ["24", "23", "22"]):
        qtbot.mouseClick(header.viewport(), Qt.MouseButton.LeftButton, pos=place)
        if rows_shown(view)[:3] != expected:  # the first click may sort downwards
            qtbot.mouseClick(header.viewport(), Qt.MouseButton.LeftButton, pos=place)
        assert rows_shown(view)[:3] == expected
        assert sorted(rows_shown(view)[-3:], key=int) == ["7", "14", "21"]  # those that failed
    # n_max 2 and seed 3 are job 12; job 12 is a point, too
    cell = view.grid.cell_box(3, 1).center().toPoint()
    qtbot.mouseClick(view.grid, Qt.MouseButton.LeftButton, pos=cell)
    assert selected(view) == ["12"]
    assert "n_max 2, seed 3: tok/s 12, 1 result" in view.grid.tip(3, 1)
    figures = view.pareto
    assert figures.nearest(10.0, 5.0) == 4  # predicted_n is 10 in all of them
    figures.row_chosen.emit(4)
    assert selected(view) == ["5"]


def test_a_double_click_opens_the_trace(window: MainWindow, qtbot: QtBot, tmp_path: Path) -> None:
    path = write_results(tmp_path, 2, 5)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE results SET has_trace = 1 WHERE number < 3")
        ((key,),) = file.execute("SELECT key FROM results WHERE number = 2")
    store, _, _ = timed_trace(4)
    export_csv(store, trace_folder(path, key))
    view = opened(window, qtbot, path)

    def double_click(row: int) -> None:
        place = view.table.visualRect(view.model.index(row, 0)).center()
        qtbot.mouseClick(view.table.viewport(), Qt.MouseButton.LeftButton, pos=place)
        qtbot.mouseDClick(view.table.viewport(), Qt.MouseButton.LeftButton, pos=place)

    double_click(0)
    assert messages(window) == [f"info: The trace of job 1 is not in {path.parent}."]
    double_click(6)
    assert messages(window)[-1] == "info: Job 7 has no trace: Job 7 failed."
    double_click(1)
    qtbot.waitUntil(lambda: window.bridge.trace is not None)
    assert window.bridge.trace_folder == trace_folder(path, key)
    qtbot.waitUntil(lambda: not window.bridge.reading)


def test_what_is_no_result_file_is_one_sentence(
    window: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    path = write_results(tmp_path, 1, 2)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE results SET predicted_n = 'many' WHERE number = 2")
    window.opened_results.open(path)
    qtbot.waitUntil(lambda: bool(messages(window)))
    (message,) = messages(window)
    assert message.startswith(f"error: {path}: row 2, predicted_n is not a number from 0")
    path.write_bytes(b"SQLite format 3\0" + bytes(200))
    window.opened_results.open(path)
    qtbot.waitUntil(lambda: "is not a result file" in "".join(messages(window)))
    assert window.panels.results.results is None


def test_what_a_file_says_at_length_is_cut(
    window: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    path = write_results(tmp_path, 1, 8)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE results SET error = 'a\nb' || hex(zeroblob(400000)) WHERE number = 7")
        file.execute("UPDATE facts SET value = hex(zeroblob(400000)) WHERE name = 'title'")
        file.execute(
            "UPDATE results SET settings = json_set(settings, '$.prompt', hex(zeroblob(400000)))"
        )
    view = opened(window, qtbot, path)
    assert len(view.headline.text()) < 100 and len(view.note.text()) < 300
    for row in (0, 6):
        tip = view.model.index(row, 0).data(Qt.ItemDataRole.ToolTipRole)
        assert len(tip) < 1000 and "\n" not in tip
    view.trace_asked.emit(6)
    (message,) = messages(window)
    assert message.startswith("info: Job 7 has no trace: a b000") and len(message) < 1000
    view.grab()


def test_dropped_read_again_and_empty(window: MainWindow, qtbot: QtBot, tmp_path: Path) -> None:
    path = write_results(tmp_path, 2, 2)
    assert drop(window, path)
    view = window.panels.results
    qtbot.waitUntil(lambda: view.results is not None)
    view.map_figure.setCurrentIndex(1)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("DELETE FROM results")
    view.again.click()
    qtbot.waitUntil(lambda: view.results is not None and view.results.n == 0)
    assert view.model.rowCount() == 0
    assert view.grid.shown is None
    assert view.note.text().startswith("0 of 4 jobs")
    view.grab()


def with_settings(path: Path, settings: Callable[[int], dict[str, Any]]) -> Path:
    """Results whose rows have other settings, by their place."""
    with closing(sqlite3.connect(path)) as file, file:
        for (number,) in file.execute("SELECT number FROM results").fetchall():
            file.execute(
                "UPDATE results SET settings = ? WHERE number = ?",
                (json.dumps(settings(number)), number),
            )
    return path


def map_words(view: ResultsView) -> tuple[str, ...]:
    return tuple(box.currentText() for box in (view.map_figure, view.map_x, view.map_y))


def test_the_map_is_over_n_max_and_p_min_until_another_pair_is_chosen(
    window: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    def settings(number: int) -> dict[str, Any]:
        return {
            "spec-type": "draft-mtp" if number % 2 else "draft-simple",
            "seed": number,
            "spec-draft-p-min": number % 2 / 2,
            "spec-draft-n-max": number % 3,
        }

    path = write_results(tmp_path, 3, 8)
    view = opened(window, qtbot, path)
    assert map_words(view) == ("tok/s", "n_max", "seed")
    with_settings(path, settings)
    with job_ends(qtbot, window.bridge, ReadResults):
        view.again.click()
    assert map_words(view) == ("tok/s", "n_max", "p_min")
    assert view.grid.shown is not None and view.grid.shown.values.shape == (2, 3)
    view.map_y.setCurrentIndex(view.map_y.findText("spec-type"))
    view.map_y.activated.emit(view.map_y.currentIndex())
    with job_ends(qtbot, window.bridge, ReadResults):
        view.again.click()
    assert map_words(view) == ("tok/s", "n_max", "spec-type")


def test_one_setting_that_varies_is_a_row_of_cells(
    window: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    view = opened(window, qtbot, write_results(tmp_path, 5, 1))
    assert map_words(view) == ("tok/s", "n_max", "nothing")
    assert view.grid.shown is not None and view.grid.shown.values.shape == (1, 5)
    assert "by" not in view.grid.accessibleDescription()
    assert view.grid.tip(0, 1) == "n_max 2: tok/s 2, 1 result"
    view.grab()


def test_one_result_is_shown(window: MainWindow, qtbot: QtBot, tmp_path: Path) -> None:
    view = opened(window, qtbot, write_results(tmp_path, 1, 1))
    assert view.model.rowCount() == 1
    assert view.grid.shown is None  # no setting varies
    assert view.pareto.front.tolist() == [0]
    view.grab()


def test_ten_thousand_rows_open_in_few_calls_each(
    window: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    path = write_results(tmp_path, 1, 1)
    with closing(sqlite3.connect(path)) as file, file:
        names = [row[1] for row in file.execute("PRAGMA table_info(results)")]
        (row,) = file.execute("SELECT * FROM results")
        first = dict(zip(names, row, strict=True))
        rng = np.random.default_rng(1)
        rows = [
            tuple(
                (
                    first
                    | {
                        "key": f"{i:016x}",
                        "number": i,
                        "settings": f'{{"spec-draft-n-max": {i % 16}, "seed": {i // 16}}}',
                        "predicted_per_second": float(rng.random()),
                        "memory_bytes": float(rng.random()) * 1e9,
                    }
                ).values()
            )
            for i in range(2, 10_001)
        ]
        marks = ", ".join("?" * len(names))
        file.executemany(f"INSERT INTO results VALUES ({marks})", rows)
    window.docks.reveal("results")
    with counted_calls() as count:
        view = opened(window, qtbot, path)
        view.grab()
    assert count.n < 60 * 10_000
    assert view.model.rowCount() == 10_000
    sort = calls_of(lambda: view.table.sortByColumn(3, Qt.SortOrder.DescendingOrder))
    assert sort < 100_000
