"""Kernel checks in the window: a wrong adapter is found, its error drawn, its command copied."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFileDialog
from pytestqt.qtbot import QtBot

from app.__main__ import main
from app.panels.lab.conform_view import ConformView
from app.window.window import MainWindow
from engine.conform.checks import CHECKS
from engine.conform.runner import Outcome
from tests.engine.conform.test_runner import ADAPTER
from tests.support.window_acts import messages


def shown(window: MainWindow, qtbot: QtBot) -> ConformView:
    window.docks.enter("conform")
    view = window.findChild(ConformView)
    assert view is not None
    qtbot.waitUntil(view.isVisible)
    return view


def cells(view: ConformView) -> list[str]:
    items = [view.grid.item(0, i) for i in range(view.grid.columnCount())]
    return [item.text() if item else "" for item in items]


def test_a_wrong_kernel_is_found_and_its_error_drawn(
    window: MainWindow, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my_kernel.py"
    path.write_text(ADAPTER.replace("[n - 1]", "[max(0, n - 2)]").replace("BODY", "pass"))
    view = shown(window, qtbot)
    assert not view.button.isEnabled()
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *_a, **_k: (str(path), ""))
    qtbot.mouseClick(view.browse, Qt.MouseButton.LeftButton)
    assert view.target.text() == f"{path}:Adapter"
    view.target.setText(f"{path}:adapter")
    qtbot.mouseClick(view.button, Qt.MouseButton.LeftButton)
    assert view.button.text() == "Stop"
    qtbot.waitUntil(lambda: view.button.text() != "Stop", timeout=60_000)
    assert len(cells(view)) == len(CHECKS)
    assert cells(view)[0] == "FAIL"
    assert cells(view)[CHECKS.index("repeat")] == "ok"
    assert cells(view)[CHECKS.index("trees")] == "–"
    view.grid.setCurrentCell(0, 0)
    assert "stale-column" in view.words.text()
    assert view.plot.isVisible()
    qtbot.mouseClick(view.copy, Qt.MouseButton.LeftButton)
    copied = QGuiApplication.clipboard().text()
    assert copied.startswith("draftscope conform ")
    assert copied.endswith("--checks depths --seed 1")
    view.grid.setCurrentCell(0, CHECKS.index("repeat"))
    assert "passed" in view.words.text()
    assert not view.plot.isVisible()


def test_stop_ends_the_checks_and_an_error_is_shown(
    window: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    view = shown(window, qtbot)
    path = tmp_path / "slow.py"
    path.write_text(ADAPTER.replace("BODY", "time.sleep(600)"))
    view.target.setText(f"{path}:adapter")
    qtbot.keyClick(view.target, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: view.button.text() == "Stop")
    qtbot.mouseClick(view.button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: view.button.text() != "Stop", timeout=60_000)
    assert view.headline.text().endswith(" before it was stopped, 0 failed")
    view.target.setText("nothing.whl")
    qtbot.mouseClick(view.button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: view.button.text() != "Stop")
    assert "nothing.whl" in view.headline.text()
    assert any("nothing.whl" in text for text in messages(window))
    view.target.setText("no-such-package")
    qtbot.mouseClick(view.button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: view.button.text() != "Stop")
    (message,) = messages(window)
    assert "no-such-package" in message


def test_infinite_errors_are_drawn_as_high_as_the_plot(window: MainWindow, qtbot: QtBot) -> None:
    view = shown(window, qtbot)
    view.plot.show_errors((0.5, float("inf")), ())
    assert np.allclose(view.plot._bars.opts["height"], [0.5, 0.55])
    assert "inf" in view.plot.tip(1.0, 0.1)
    assert view.plot.tip(7.0, 0.1) == ""


def test_a_kernel_that_needs_a_gpu_is_named(window: MainWindow, qtbot: QtBot) -> None:
    view = shown(window, qtbot)
    view.begin("causal_conv1d")
    view.add(Outcome("causal_conv1d_update", "conv", "", (), 0.0, needs="needs a CUDA device: x"))
    assert cells(view)[0] == "n/a"
    view.grid.setCurrentCell(0, 0)
    assert view.words.text() == "causal_conv1d_update: not checked, needs a CUDA device: x."
    busy = Outcome("causal_conv1d_fn", "conv", CHECKS[1], (), 9.0, needs="machine busy")
    view.add(busy)
    assert view.grid.item(1, 1).text() == "n/a"
    view.end()
    assert view.headline.text() == "causal_conv1d: 0 checks, 0 failed"


def test_without_a_plot_the_grid_has_all_the_room(window: MainWindow, qtbot: QtBot) -> None:
    view = shown(window, qtbot)
    view.begin("mine.py:adapter")
    view.add(Outcome("mine", "kda", CHECKS[0], (), 1.0))
    view.end()
    qtbot.waitUntil(lambda: view.grid.height() == view.grid.parentWidget().height())
    view.grid.setCurrentCell(0, 0)
    line = view.fontMetrics().height()
    qtbot.waitUntil(lambda: 0 < view.words.visibleRegion().boundingRect().height() < 3 * line)
    below = view.words.parentWidget().height()
    assert below < 3 * line
    assert view.grid.height() > view.grid.parentWidget().height() - below - 2 * line


def test_checks_of_the_command_line_are_opened_and_shown(
    window: MainWindow, qtbot: QtBot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel, written = tmp_path / "my_kernel.py", tmp_path / "checks.json"
    kernel.write_text("def adapter(shape, memory):\n    raise RuntimeError('no such op')\n")
    assert main(["conform", f"{kernel}:adapter", "--checks", "depths,batch", "--json"]) == 1
    written.write_text(capsys.readouterr().out)
    view = shown(window, qtbot)
    window.opened_results.open(written)
    qtbot.waitUntil(lambda: view.grid.rowCount() == 1)
    assert view.headline.text() == f"{kernel}:adapter: 2 checks, 2 failed"
    assert [text for text in cells(view) if text != "–"] == ["FAIL", "FAIL"]
    assert "crash" in view.words.text()
    view.copy.click()
    assert str(kernel) in QGuiApplication.clipboard().text()


def test_an_altered_file_of_checks_is_refused_with_its_place(
    window: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    written = tmp_path / "checks.json"
    head = '{"kind": "draftscope conform", "version": 1, "argument": "x.py:f", "checks": '
    for checks, said in (("[3]", "[0]"), ("[", "is not JSON"), ("[{}]", "kernel")):
        written.write_text(f"{head}{checks}" + "}")
        window.opened_results.open(written)
        qtbot.waitUntil(lambda said=said: any(said in text for text in messages(window)))
