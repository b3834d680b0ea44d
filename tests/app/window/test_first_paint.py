"""What comes after the first painting is there afterwards, and nothing else has moved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from PySide6.QtCore import QRect
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.saved.settings import Settings
from app.window.dock_area import TITLES
from app.window.window import MainWindow
from tests.support.fake_session import FakeEngine

ROOT = Path(__file__).parents[3]

_PAINTS = """
import json, sys
from PySide6.QtCore import QSettings
from PySide6.QtWidgets import QApplication
QSettings.setPath(QSettings.Format.IniFormat, QSettings.Scope.UserScope, sys.argv[1])
app = QApplication([])
from app.engine_thread.bridge import Bridge
from app.window.gui import FirstPaint
from app.saved.settings import Settings
from app.window.window import MainWindow
from app.window.menus import TitleButton
window = MainWindow(Bridge(), Settings(), whole=False)
def painted():
    heavy = [name for name in ("pyqtgraph", "torch", "gguf") if name in sys.modules]
    window.complete()
    names = window.panels.plots.views
    empty = [name for name in names if window.docks.view(name) is None]
    buttons = [button.isVisible() for button in window.docks["rollback"].findChildren(TitleButton)]
    print(json.dumps([heavy, list(names), empty, "pyqtgraph" in sys.modules, buttons]))
    window.close()
FirstPaint(window).done.connect(painted)
window.show()
app.exec()
"""

_SHOWS = """
import sys
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication
from app.window.gui import run_window
app = QApplication([])
def look():
    window = next(w for w in app.topLevelWidgets() if w.objectName() == "main")
    print(window.isVisible(), "torch" in sys.modules)
    window.close()
QTimer.singleShot(0, look)
print(run_window([], [], False))
"""


def test_window_is_visible_before_torch_is_imported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SHOWS],
        cwd=ROOT,
        env={
            **os.environ,
            "QT_QPA_PLATFORM": "offscreen",
            "XDG_DATA_HOME": str(tmp_path),
            "XDG_CONFIG_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split()[:2] == ["True", "False"], done.stderr
    assert done.stdout.split()[-1] == "0"


def test_the_first_painting_waits_for_no_plot(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PAINTS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout) == [[], ["rollback", "ring"], [], True, [True]]


def places(window: MainWindow) -> dict[str, QRect]:
    """Of the docks in sight; Qt puts those after another tab anywhere outside."""
    QApplication.processEvents()
    every = {name: window.docks[name].geometry() for name in TITLES}
    return {name: place for name, place in every.items() if window.rect().contains(place)}


def test_completing_moves_no_dock(qtbot: QtBot, engine: FakeEngine) -> None:
    def bridge() -> Bridge:
        return Bridge(engine)

    found, windows = [], []
    for whole in (True, False):
        window = MainWindow(bridge(), Settings(), whole=whole)
        qtbot.addWidget(window)
        window.show()
        qtbot.waitExposed(window)
        QApplication.processEvents()
        if not whole:
            assert window.docks["rollback"].widget() is None
            window.complete()
        windows.append(window)
        found.append(places(window))
    for window in windows:  # only now, for closing keeps the layout for the next window
        window.close()
    assert found[0] == found[1]
    assert {"model", "run", "rollback", "memory"} <= set(found[0])
