"""Where unexpected errors go: one log in memory and on disk, and a note of hard crashes."""

from __future__ import annotations

import faulthandler
import logging
import logging.handlers
import os
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from PySide6.QtCore import QLockFile, QMessageLogContext, QtMsgType, qInstallMessageHandler

from app.saved.folders import hold, is_held, lock_path

_QT_LEVELS = {
    QtMsgType.QtDebugMsg: logging.DEBUG,
    QtMsgType.QtInfoMsg: logging.INFO,
    QtMsgType.QtWarningMsg: logging.WARNING,
    QtMsgType.QtCriticalMsg: logging.ERROR,
    QtMsgType.QtFatalMsg: logging.CRITICAL,
}
_LOG_FILE_BYTES = 1_000_000
_LINES_KEPT = 200

log = logging.getLogger("draftscope")


class ErrorCatcher:
    """Sends every uncaught exception and Qt message to the log while it is installed.

    folder: where `draftscope.log` and a crash note of this process are written, if it takes them.
    `on_error(summary)` is called, possibly on another thread, for each uncaught exception.
    `last_crash` is the stack dump of earlier processes that died hard, else empty; it is given
    once. Notes of processes that live are left alone.
    """

    def __init__(self, folder: Path, on_error: Callable[[str], None]) -> None:
        with suppress(OSError):
            folder.resolve().mkdir(parents=True, exist_ok=True)
        self._crash_path = folder / f"crash-{os.getpid()}-{uuid.uuid4().hex[:8]}.log"
        self._crash_lock: QLockFile | None = None
        self._on_error = on_error
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._handlers = _make_handlers(folder / "draftscope.log", self._lines)
        self._crash_file: TextIO | None = None
        self.last_crash = _take_crashes(folder)

    def install(self) -> None:
        """Take over the hooks; `uninstall` gives them back."""
        for handler in self._handlers:
            log.addHandler(handler)
        log.setLevel(logging.INFO)
        self._hooks = (sys.excepthook, threading.excepthook, sys.unraisablehook)
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread
        sys.unraisablehook = self._unraisable
        self._qt_handler = qInstallMessageHandler(_log_qt_message)
        self._crash_lock = hold(self._crash_path)  # first: a note without a lock is a dead one's
        try:
            self._crash_file = self._crash_path.open("w", encoding="utf-8")
        except OSError as error:
            log.warning("no crash would be noted: %s", error)
        else:
            faulthandler.enable(self._crash_file)

    def uninstall(self) -> None:
        """A clean end: restore the hooks and remove the crash file."""
        faulthandler.disable()
        if self._crash_file is not None:
            self._crash_file.close()
            with suppress(OSError):
                self._crash_path.unlink(missing_ok=True)
        if self._crash_lock is not None:
            self._crash_lock.unlock()
        qInstallMessageHandler(self._qt_handler)
        sys.excepthook, threading.excepthook, sys.unraisablehook = self._hooks
        for handler in self._handlers:
            log.removeHandler(handler)
            handler.close()

    def recent_lines(self) -> list[str]:
        """The last lines of the log, oldest first."""
        return list(self._lines)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        log.error("uncaught exception", exc_info=(kind, error, trace))
        if not issubclass(kind, KeyboardInterrupt):
            self._on_error(f"{kind.__name__}: {error}")

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            self._uncaught(args.exc_type, args.exc_value, args.exc_traceback)

    def _unraisable(self, args: Any) -> None:
        log.error(
            "%s: %r", args.err_msg or "ignored exception", args.object, exc_info=args.exc_value
        )


def _make_handlers(path: Path, lines: deque[str]) -> list[logging.Handler]:
    handlers: list[logging.Handler] = [
        _LogFile(path, maxBytes=_LOG_FILE_BYTES, backupCount=1, encoding="utf-8", delay=True),
        _LineHandler(lines),
        logging.StreamHandler(),
    ]
    handlers[-1].setLevel(logging.ERROR)  # a terminal sees what went wrong, not every Qt notice
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handlers


class _LogFile(logging.handlers.RotatingFileHandler):
    """What cannot be written is still in memory, so a full disk is not reported at every
    line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _LineHandler(logging.Handler):
    def __init__(self, lines: deque[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))


def _log_qt_message(kind: QtMsgType, context: QMessageLogContext, message: str) -> None:
    log.log(_QT_LEVELS.get(kind, logging.WARNING), "Qt: %s", message)


def _take_crashes(folder: Path) -> str:
    """The notes that dead processes left, each of which is removed, the newest first."""
    notes: list[tuple[float, str]] = []
    for path in folder.glob("crash-*.log"):
        if is_held(path):
            continue
        try:
            note = (path.stat().st_mtime, path.read_text(encoding="utf-8", errors="replace"))
            path.unlink()
        except OSError:  # another window was faster, or the file is not ours to read
            continue
        lock_path(path).unlink(missing_ok=True)
        notes.append(note)
    return "\n\n".join(text.strip() for _, text in sorted(notes, reverse=True) if text.strip())
