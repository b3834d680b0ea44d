"""Uncaught errors of any thread reach one log; a hard crash leaves a note for the next start."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import qWarning

from app.saved.errors import ErrorCatcher, log


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def catcher(tmp_path: Path, told: list[str]) -> Iterator[ErrorCatcher]:
    catcher = ErrorCatcher(tmp_path, told.append)
    catcher.install()
    yield catcher
    catcher.uninstall()


def test_hooks_are_given_back(tmp_path: Path) -> None:
    before = (sys.excepthook, threading.excepthook, sys.unraisablehook)
    handlers = list(log.handlers)
    catcher = ErrorCatcher(tmp_path, print)
    catcher.install()
    assert sys.excepthook != before[0]
    catcher.uninstall()
    assert (sys.excepthook, threading.excepthook, sys.unraisablehook) == before
    assert log.handlers == handlers


def test_errors_of_this_and_other_threads(catcher: ErrorCatcher, told: list[str]) -> None:
    try:
        raise ValueError("here")
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)

    def fail() -> None:
        raise KeyError("there")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert told == ["ValueError: here", "KeyError: 'there'"]
    text = "\n".join(catcher.recent_lines())
    assert "Traceback" in text
    assert "in fail" in text


def test_errors_that_nothing_can_raise_are_logged(catcher: ErrorCatcher, told: list[str]) -> None:
    class Grave:
        def __del__(self) -> None:
            raise OSError("late")

    grave = Grave()
    del grave
    assert any("late" in line for line in catcher.recent_lines())
    assert told == []


def test_qt_messages_and_the_file(catcher: ErrorCatcher, tmp_path: Path) -> None:
    qWarning("from Qt")
    log.info("from Python")
    assert [line.split(" ", 2)[2] for line in catcher.recent_lines()] == [
        "WARNING Qt: from Qt",
        "INFO from Python",
    ]
    assert "from Qt" in (tmp_path / "draftscope.log").read_text(encoding="utf-8")


def test_keyboard_interrupt_is_no_error(catcher: ErrorCatcher, told: list[str]) -> None:
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert told == []


def test_clean_end_leaves_no_crash_file(tmp_path: Path) -> None:
    catcher = ErrorCatcher(tmp_path, print)
    catcher.install()
    catcher.uninstall()
    assert ErrorCatcher(tmp_path, print).last_crash == ""


def test_each_process_has_its_own_crash_note(tmp_path: Path) -> None:
    """A second window neither takes the first one's note for a crash nor spoils it."""
    first = ErrorCatcher(tmp_path, print)
    first.install()
    (note,) = tmp_path.glob("crash-*.log")
    note.write_text("of the first", encoding="utf-8")
    second = ErrorCatcher(tmp_path, print)
    assert second.last_crash == ""
    second.install()
    assert len(list(tmp_path.glob("crash-*.log"))) == 2
    second.uninstall()
    assert note.read_text(encoding="utf-8") == "of the first"
    first.uninstall()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("crash")]


def test_hard_crash_is_told_at_the_next_start(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path;"
        "from app.saved.errors import ErrorCatcher;"
        "ErrorCatcher(Path(sys.argv[1]), print).install(); os.kill(os.getpid(), signal.SIGSEGV)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "Segmentation fault" in ErrorCatcher(tmp_path, print).last_crash
    assert ErrorCatcher(tmp_path, print).last_crash == "", "given once"


def test_log_lines_are_bounded(catcher: ErrorCatcher) -> None:
    for i in range(1000):
        log.log(logging.INFO, "line %d", i)
    lines = catcher.recent_lines()
    assert len(lines) == 200
    assert lines[-1].endswith("line 999")
