"""Unexpected errors: a log in memory and on disk with notes of hard crashes; and a round of a run
as Markdown for an issue report."""

from __future__ import annotations

import faulthandler
import json
import logging
import logging.handlers
import math
import os
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
from PySide6.QtCore import QLockFile, QMessageLogContext, QtMsgType, qInstallMessageHandler

from app.saved.settings import hold, is_held, lock_path
from app.trace_models.run_notes import FACT
from app.trace_models.run_rows import Position
from engine.trace.csv_fields import escape_piece
from engine.trace.facts import RunFacts
from engine.trace.run_ref import RunRef
from engine.trace.store import Table, TraceStore
from engine.trace.timings import summary

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
    """Logs every uncaught exception and Qt message while installed.

    folder: of `draftscope.log` and this process's crash note, if writable. `on_error(summary)` is
    called, possibly on another thread, for each uncaught exception. `last_crash` is the stack dump
    of earlier processes that crashed, else empty; it is reported once. Notes of running processes
    are left alone.
    """

    def __init__(self, folder: Path, on_error: Callable[[str], None]) -> None:
        with suppress(OSError):
            Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)
        self._crash_path = folder / f"crash-{os.getpid()}-{uuid.uuid4().hex[:8]}.log"
        self._crash_lock: QLockFile | None = None
        self._on_error = on_error
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._handlers = _make_handlers(folder / "draftscope.log", self._lines)
        self._crash_file: TextIO | None = None
        self.last_crash = _take_crashes(folder)

    def install(self) -> None:
        """Install the hooks; `uninstall` restores them."""
        for handler in self._handlers:
            log.addHandler(handler)
        log.setLevel(logging.INFO)
        self._hooks = (sys.excepthook, threading.excepthook, sys.unraisablehook)
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread
        sys.unraisablehook = self._unraisable
        self._qt_handler = qInstallMessageHandler(_log_qt_message)
        self._crash_lock = hold(self._crash_path)  # first: a note without a lock has no process
        try:
            self._crash_file = self._crash_path.open("w", encoding="utf-8")
        except OSError as error:
            log.warning("no crash would be noted: %s", error)
        else:
            faulthandler.enable(self._crash_file)

    def uninstall(self) -> None:
        """A clean exit: restore the hooks and remove the crash file."""
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
    handlers[-1].setLevel(logging.ERROR)  # a terminal shows errors, not every Qt notice
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handlers


class _LogFile(logging.handlers.RotatingFileHandler):
    """Unwritable lines are still in memory, so a full disk is not reported for every line."""

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
    """Notes of dead processes, newest first; each is removed."""
    notes: list[tuple[float, str]] = []
    for path in folder.glob("crash-*.log"):
        if is_held(path):
            continue
        try:
            note = (path.stat().st_mtime, path.read_text(encoding="utf-8", errors="replace"))
            path.unlink()
        except OSError:  # another window was faster, or the file is unreadable
            continue
        lock_path(path).unlink(missing_ok=True)
        notes.append(note)
    return "\n\n".join(text.strip() for _, text in sorted(notes, reverse=True) if text.strip())


_TOKEN_COLUMNS = ("pos", "kind", "token_id", "draft_index", "draft_p", "target_p", "target_rank")
_SEVERITIES = ("error", "warning", "info")
_MOST_FINDINGS = 20
_OF_OTHERS = ("requests", "told_timings", "observed_findings", "columns")
"""Facts of other engines' runs that hold prompts, or appear elsewhere in the report."""


def round_in_question(run: RunRef, cursor: Position | None) -> tuple[int, int] | None:
    """The round and sequence of a report: the cursor's, that of the most severe error or warning,
    or the last one; None for a run without rounds."""
    if cursor is not None and cursor.run == run:
        return cursor.round, cursor.seq_id
    store, run_id = run.store, run.run_id
    findings = [f for f in _rows(store.findings, run_id=run_id) if f["round"] is not None]
    findings.sort(key=lambda f: _SEVERITIES.index(f["severity"]))
    if findings and findings[0]["severity"] != "info":
        return findings[0]["round"], findings[0]["seq_id"] or 0
    rounds = _rows(store.rounds, run_id=run_id)
    return (rounds[-1]["round"], rounds[-1]["seq_id"]) if rounds else None


def issue_text(run: RunRef, cursor: Position | None, environment: Mapping[str, str]) -> str:
    """Processor, acceptance and speed in a line; then environment, model, effective options,
    figures, one round, and findings as Markdown.

    environment: of this machine; an opened trace's own one takes precedence.
    """
    store, run_id, facts = run.store, run.run_id, run.facts
    model = facts.model
    known = {"model", "options", "environment", "summary", FACT, *_OF_OTHERS}
    machine = facts.environment or environment
    figures = dict(facts.summary or summary(store, run_id))
    if facts.lane:  # lanes share their drafts and have no speed of their own
        figures = {name: one for name, one in figures.items() if "per_second" not in name}
    parts = [
        _headline(figures, machine),
        "### Environment",
        _bullets(machine),
        "### Model",
        _bullets(model) if model else "not recorded",
        "### Run",
        _bullets({k: v for k, v in facts.items() if k not in known}),
        "### Options in effect",
        _block(facts.pick("options")["options"] or _asked(facts)),
        "### Figures",
        _block(figures),
    ]
    place = round_in_question(run, cursor)
    if place is not None:
        parts += [f"### Round {place[0]}, sequence {place[1]}", _round(store, run_id, *place)]
    parts += ["### Findings", _findings(store, run_id)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(figures: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """The key figures, as far as known."""
    rate, drafted = figures.get("draft_acceptance_rate"), figures.get("draft_n")
    speed = figures.get("predicted_per_second")
    parts = []
    if processor := machine.get("processor"):
        parts.append(_line(str(processor)))
    if isinstance(rate, float) and math.isfinite(rate) and isinstance(drafted, int):
        parts.append(f"{rate:.1%} of {drafted:,} drafted tokens accepted")
    if isinstance(speed, float) and math.isfinite(speed):
        parts.append(f"{speed:.1f} tok/s")
    return ", ".join(parts)


def _asked(facts: RunFacts) -> list[Any]:
    """Settings of requests to another engine, without prompts."""
    return [request.settings for request in facts.requests or ()]


def _round(store: TraceStore, run_id: int, number: int, seq_id: int) -> str:
    key = {"run_id": run_id, "round": number, "seq_id": seq_id}
    rounds = _rows(store.rounds, **key)
    numbers = {
        name: value
        for row in rounds
        for name, value in row.items()
        if name not in key and value not in (None, "")
    }
    tokens = [
        [*(row[name] for name in _TOKEN_COLUMNS), _piece(store, row)]
        for row in _rows(store.tokens, **key)
    ]
    table = _table([*_TOKEN_COLUMNS, "text"], tokens) if tokens else ""
    return "\n\n".join(part for part in (_bullets(numbers), table) if part)


def _findings(store: TraceStore, run_id: int) -> str:
    rows = _rows(store.findings, run_id=run_id)
    lines = [
        f"- **{row['severity']}** {row['rule']}"
        + (f", round {row['round']}" if row["round"] is not None else "")
        + f": {_line(row['message'])} ({_line(row['evidence'])})"
        for row in rows[:_MOST_FINDINGS]
    ]
    if len(rows) > _MOST_FINDINGS:
        lines.append(f"- and {len(rows) - _MOST_FINDINGS} more")
    return "\n".join(lines) or "none"


def _rows(table: Table, **key: int) -> list[dict[str, Any]]:
    n = len(table)
    chosen = np.ones(n, bool)
    for name, value in key.items():
        chosen &= table.column(name, 0, n) == value
    return [table.row(i) for i in np.flatnonzero(chosen).tolist()]


def _piece(store: TraceStore, row: dict[str, Any]) -> str:
    """The bytes of a tokens row: its own, else those of its id."""
    piece = row["text"].encode() or store.pieces.get(row["token_id"], b"")
    text = escape_piece(piece).replace("`", "\\x60").replace("|", "\\|")
    return f"`{text}`" if text else ""


def _bullets(values: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {_shown(value)}" for name, value in values.items())


def _table(header: list[str], rows: list[list[Any]]) -> str:
    body = [[*(_shown(cell) for cell in row[:-1]), row[-1]] for row in rows]
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _block(value: Any) -> str:
    return f"```json\n{json.dumps(value, ensure_ascii=False, indent=1, default=str)}\n```"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return _line(str(value))


def _line(text: str) -> str:
    """One line that cannot break a list, a table or a code block."""
    return " ".join(text.split()).replace("|", "\\|").replace("```", "'''")
