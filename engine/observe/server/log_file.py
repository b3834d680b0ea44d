"""The log file of a running server: followed as it grows, is truncated or replaced."""

from __future__ import annotations

import codecs
import os
import re
from contextlib import ExitStack
from io import SEEK_END
from pathlib import Path
from time import perf_counter, sleep
from typing import BinaryIO

from engine.errors import OptionError, TraceFileError
from engine.files import opened_file
from engine.observe.rounds.observed_run import ObservedRun
from engine.trace.store import LOOK_S

_QUIET_S = 0.2
_SETTLE_S = 2.0
"""How long a server is given to log what it has just done, seconds."""
_AT_ONCE = 4 * 2**20
_LONGEST_STARTUP = 2**20
_FIRST_TASK = re.compile(rb"\| task \d")


class LogFollower:
    """The new contents of a server's log, after what it logged at its start.

    Lines in between, of earlier requests, are skipped. Raises OptionError for an unreadable file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._closing = ExitStack()
        self._file = self._opened()  # kept open so that its inode is not reused
        begin = self._file.read(_LONGEST_STARTUP) or b""
        self._file.seek(0, SEEK_END)
        task = _FIRST_TASK.search(begin)
        end = begin.rfind(b"\n", 0, task.start() if task else len(begin)) + 1
        self._waiting = begin[:end].decode("utf-8", "replace")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def more(self) -> str:
        """What was appended since the last call, 4 MiB at most; empty while there is no file."""
        text, self._waiting = self._waiting, ""
        try:
            now, known = self._path.stat(), os.fstat(self._file.fileno())
            if (now.st_dev, now.st_ino) != (known.st_dev, known.st_ino):
                self._file = self._opened()
                self._decoder.reset()
            elif now.st_size < self._file.tell():  # another server has started a new file
                self._file.seek(0)
                self._decoder.reset()
            return text + self._decoder.decode(self._file.read(_AT_ONCE) or b"")
        except (OSError, OptionError):  # it is gone, or a pipe has replaced it
            return text

    def close(self) -> None:
        """Stop reading."""
        self._closing.close()

    def _opened(self) -> BinaryIO:
        """The current file; the previous one is closed."""
        with ExitStack() as opening:
            file = opening.enter_context(opened_file(self._path))
            self._closing.close()
            self._closing = opening.pop_all()
        return file


class JoinedLog:
    """A server's log, joined to the rounds of a run while it is observed.

    path: None without a log. unread: why it was not read to its end, and the remedy. Raises
    OptionError for an unreadable file.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = LogFollower(path) if path is not None else None
        self._looked = self._heard = 0.0
        self._over: float | None = None
        self.unread = ""

    def follow(self, run: ObservedRun) -> None:
        """Read new lines, unless the last look was just now."""
        if perf_counter() >= self._looked + LOOK_S:
            self._look(run)

    def is_settled(self, run: ObservedRun) -> bool:
        """Whether the log is complete; it is polled after the responses have ended, since the
        server writes it a moment later."""
        now = perf_counter()
        if self._over is None:
            self._over = self._heard = now
        if self._look(run):
            self._heard = now
        return self._file is None or now >= min(self._heard + _QUIET_S, self._over + _SETTLE_S)

    def finish(self, run: ObservedRun) -> None:
        """Wait for the end of the log, and stop reading."""
        while not self.is_settled(run):
            sleep(LOOK_S)
        self.end(run)

    def end(self, run: ObservedRun) -> None:
        """Read what is there, and stop."""
        self._look(run)
        if self._file is not None:
            self._file.close()
            self._file = None
            run.log_ended()

    def _look(self, run: ObservedRun) -> bool:
        """Read new lines; returns whether there were any."""
        self._looked = perf_counter()
        if self._file is None:
            return False
        text = self._file.more()
        try:
            run.log(text)  # an empty text, too: from the first look on, rows wait for it
        except TraceFileError as error:
            self._file.close()
            self._file, self.unread = None, str(error)
        return bool(text)
