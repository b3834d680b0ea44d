"""A data folder that takes no files: the window starts, says so, and works without saving."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QSettings
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.jobs.files import ExportTrace
from app.saved.autosave import saved_folders
from app.saved.errors import ErrorCatcher, log
from app.saved.settings import DATA_VARIABLE, Settings, data_folder, unwritable
from app.window.window import MainWindow
from tests.support.fake_session import FakeEngine
from tests.support.window_acts import messages, trigger, wait

ROOT = Path(__file__).parents[3]


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A folder that cannot be: below a regular file. (Rights do not stop root.)"""
    (tmp_path / "file").write_text("x")
    return tmp_path / "file" / "data"


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_folder_says_why_it_takes_nothing(
    tmp_path: Path, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unwritable(tmp_path / "new" / "folder") == ""
    assert list((tmp_path / "new" / "folder").iterdir()) == [], "and nothing is left of the trial"
    assert unwritable(nowhere) == f"{nowhere} cannot be written: Not a directory."
    assert "cannot be written: File exists." in unwritable(nowhere.parent)
    monkeypatch.setenv(DATA_VARIABLE, str(nowhere))
    assert data_folder() == nowhere, "no other place is taken without a word"
    monkeypatch.setattr("app.saved.settings.tempfile.TemporaryFile", no_room)
    assert unwritable(tmp_path).endswith("cannot be written: No space left on device.")


@pytest.mark.parametrize("failing", ["folder", "full", "read-only"])
def test_errors_are_caught_without_a_file(
    tmp_path: Path,
    nowhere: Path,
    failing: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if failing != "folder":
        fails = no_room if failing == "full" else read_only
        monkeypatch.setattr(Path, "open", fails)
        monkeypatch.setattr(Path, "mkdir", fails)
        monkeypatch.setattr(logging.FileHandler, "_open", fails)
    told: list[str] = []
    catcher = ErrorCatcher(nowhere if failing == "folder" else tmp_path, told.append)
    assert catcher.last_crash == ""
    catcher.install()
    try:
        log.info("a line")
        sys.excepthook(ValueError, ValueError("odd"), None)
    finally:
        catcher.uninstall()
    assert told == ["ValueError: odd"]
    assert any("a line" in line for line in catcher.recent_lines())
    assert "Logging error" not in capsys.readouterr().err, "no one can do anything about each line"


def test_what_was_left_is_nothing_where_nothing_can_be_read(nowhere: Path) -> None:
    assert saved_folders(nowhere / "autosave") == []


def test_settings_that_are_not_kept_say_so(nowhere: Path) -> None:
    QSettings.setPath(QSettings.Format.IniFormat, QSettings.Scope.UserScope, str(nowhere))
    settings = Settings()
    assert settings.note.endswith("draftscope.ini cannot be written.")
    settings.theme = "dark"
    assert settings.theme == "dark", "for as long as the window is open"


def test_the_window_works_and_says_so(
    make_window: Callable[..., MainWindow],
    engine: FakeEngine,
    nowhere: Path,
    model_file: Path,
    qtbot: QtBot,
) -> None:
    window = make_window(Bridge(engine), nowhere)
    window.sessions.open_library()
    said = f"warning: {nowhere} cannot be written: Not a directory."
    assert messages(window)[0].startswith(said)
    window.open_model(model_file)
    wait(qtbot, window, State.READY)
    assert messages(window)[0].startswith(said), "it stays"
    trigger(window, "run.start")
    wait(qtbot, window, State.READY)
    autosave = window.sessions.autosave
    assert autosave is not None
    autosave.save()
    (told,) = messages(window)
    assert "error: The runs are not saved." in told, "in place of the first, it says the same"
    trigger(window, "run.start")
    wait(qtbot, window, State.READY)
    assert messages(window) == [told], "it is said once, so it stays"
    autosave.saved.emit()
    assert messages(window) == []
    with qtbot.waitSignal(window.bridge.exported):
        window.bridge.ask(ExportTrace(window.bridge.store, nowhere.parent.parent / "out"))
    assert autosave.unexported() == [], "an export elsewhere still works"


START = """
    import json, os, sys
    from pathlib import Path
    from PySide6.QtCore import QTimer
    from app.window import gui

    class Window(gui.MainWindow):
        def complete(self):
            super().complete()
            QTimer.singleShot(100, self.tell)
        def tell(self):
            print(json.dumps([banner.message for banner in self.banners.banners]))
            self.close()
    gui.MainWindow = Window
    sys.exit(gui.run_window([], [], False))
"""


def test_the_program_starts(nowhere: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(START)],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "QT_QPA_PLATFORM": "offscreen",
            DATA_VARIABLE: str(nowhere),
            "XDG_CONFIG_HOME": str(nowhere),
            "HOME": str(nowhere),
        },
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert any(text.startswith(f"{nowhere} cannot be written") for text in said)
    assert any("draftscope.ini cannot be written" in text for text in said)
    assert "Traceback" not in done.stderr
