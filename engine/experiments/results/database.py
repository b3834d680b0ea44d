"""An SQLite file from anyone, opened so that reading it ends and stays small.

Nothing next to the file is read but a journal, which SQLite only looks at here; no text is longer
than 1 MiB; and what takes longer than some seconds is given up.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import thread_time

from engine.errors import TraceFileError
from engine.files import opened_file
from engine.gguf.binary import shorten

MOST_BYTES = 128 << 20
LONGEST_TEXT = 1 << 20
_MOST_S = 20.0
"""Of processor time."""
_LOCK_S = 3.0
_LOOK_EVERY = 10_000
"""Steps of SQLite's machine after which the time is looked at."""
_VERSIONS = slice(18, 20)
"""Where a file says whether it is written ahead to a log."""
_AGAIN = "Measure again, or name another file."


@contextmanager
def opened_for_reading(path: Path) -> Iterator[sqlite3.Connection]:
    """The file as it is at one moment, which begins with the first question.

    Raises TraceFileError for one that is too large or too slow to read, locked, damaged, or has
    files next to it that no writer leaves; also where reading it in the body does.
    """
    try:
        _check_files(path)
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=_LOCK_S)) as opened:
            _limit(opened)
            opened.execute("BEGIN")
            yield opened
    except OSError as error:
        raise TraceFileError(
            f"{path} cannot be read: {error.strerror or error}.", "Check the file and its rights."
        ) from error
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path} is damaged (a text is not UTF-8).", _AGAIN) from error
    except sqlite3.Error as error:
        raise _explained(path, error) from error


def _limit(opened: sqlite3.Connection) -> None:
    opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_TEXT)
    opened.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    opened.text_factory = bytes.decode  # the error names no text then
    end = thread_time() + _MOST_S  # a slow disk, or a machine that sleeps, is not its fault
    opened.set_progress_handler(lambda: thread_time() > end, _LOOK_EVERY)
    for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
        opened.execute(f"PRAGMA {pragma}")


def _check_files(path: Path) -> None:
    """Nothing that SQLite would open is anything but a file of a sensible size. Raises OSError."""
    with opened_file(path, TraceFileError) as file:
        head = file.read(100) or b""
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise TraceFileError(
                f"{path} is larger than {MOST_BYTES >> 20} MiB.", "Split the plan."
            )
    logs = [other for end in ("-wal", "-shm") if os.path.lexists(other := f"{path}{end}")]
    if logs or 2 in head[_VERSIONS]:
        beside = f" ({Path(logs[0]).name} lies next to it)" if logs else ""
        raise TraceFileError(
            f"{path} is kept with a write-ahead log{beside}, as no sweep keeps it.",
            f"Put it together with `sqlite3 {path.name} 'PRAGMA journal_mode = delete'`.",
        )
    journal = Path(f"{path}-journal")
    if os.path.lexists(journal) and not journal.is_file():
        raise TraceFileError(f"{journal} is not a file.", "Remove it.")


def _explained(path: Path, error: sqlite3.Error) -> TraceFileError:
    """What went wrong in SQLite, in words."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    said = shorten(str(error), 120)  # it may quote the file
    if code == sqlite3.SQLITE_INTERRUPT:
        return TraceFileError(f"{path} takes longer than {_MOST_S:.0f} s to read.", _AGAIN)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return TraceFileError(
            f"{path} is locked by another program.", "Wait for it, and read the file again."
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
        return TraceFileError(
            f"{path} was left in the middle of a write, or cannot be opened ({said}).",
            "Go on with the sweep that writes it, or check the rights of its folder.",
        )
    return TraceFileError(f"{path} is damaged ({said}).", _AGAIN)
