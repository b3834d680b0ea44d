"""The log file of a server that runs: followed as it grows, is cut short or replaced."""

from __future__ import annotations

import codecs
import os
import re
from io import SEEK_END
from pathlib import Path
from stat import S_ISREG

from engine.errors import OptionError

_AT_ONCE = 4 * 2**20
_LONGEST_STARTUP = 2**20
_FIRST_TASK = re.compile(rb"\| task \d")


class LogFollower:
    """What a server writes into its log from now on, after what it wrote when it started.

    What lies between, requests of earlier times, is not read. Raises OptionError for a file that
    cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            if not S_ISREG(path.stat().st_mode):
                raise OptionError(
                    f"The log {str(path)[:80]} is no regular file.", "Name the file of --log-file."
                )
            self._file = path.open("rb")  # kept open, so that no other file gets its number
            begin = self._file.read(_LONGEST_STARTUP)
            self._file.seek(0, SEEK_END)
        except OSError as error:
            raise OptionError(
                f"The log {str(path)[:80]} cannot be read: {error.strerror}.",
                "Name the file of the server's --log-file.",
            ) from error
        task = _FIRST_TASK.search(begin)
        end = begin.rfind(b"\n", 0, task.start() if task else len(begin)) + 1
        self._waiting = begin[:end].decode("utf-8", "replace")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def more(self) -> str:
        """What was written since the last time, 4 MiB at most; nothing while there is no file."""
        text, self._waiting = self._waiting, ""
        try:
            now, known = self._path.stat(), os.fstat(self._file.fileno())
            if (now.st_dev, now.st_ino) != (known.st_dev, known.st_ino):
                new = self._path.open("rb")
                self._file.close()
                self._file = new
                self._decoder.reset()
            elif now.st_size < self._file.tell():  # begun anew by another server
                self._file.seek(0)
                self._decoder.reset()
            return text + self._decoder.decode(self._file.read(_AT_ONCE))
        except OSError:
            return text

    def close(self) -> None:
        """Read no more."""
        self._file.close()
