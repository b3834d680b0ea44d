"""Where the program keeps its own files, whether it can, and locks on them that end with the
process that holds them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from PySide6.QtCore import QLockFile, QStandardPaths

DATA_VARIABLE = "DRAFTSCOPE_DATA_DIR"
"""Environment variable that names another data folder."""

_PROBE_BYTES = 4096


def data_folder() -> Path:
    """For log, crash note and autosaved traces. It need not exist, nor be possible."""
    location = QStandardPaths.StandardLocation.AppLocalDataLocation
    return Path(os.environ.get(DATA_VARIABLE) or QStandardPaths.writableLocation(location))


def unwritable(folder: Path) -> str:
    """Why a folder takes no files, in a sentence; empty if it does. It is made if it is missing."""
    try:
        folder.resolve().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))  # a full disk takes names, but no content
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}."
    return ""


def lock_path(path: Path) -> Path:
    """The lock file of a file or folder, next to it."""
    return path.with_name(f"{path.name}.lock")


def hold(path: Path) -> QLockFile | None:
    """Lock a file or folder until `unlock` or the end of the process; None if a living process
    holds it or the place takes no files."""
    lock = QLockFile(str(lock_path(path)))
    lock.setStaleLockTime(0)  # a lock is stale when its process is gone, however old it is
    return lock if lock.tryLock(0) else None


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock."""
    lock = hold(path)
    if lock is None:
        return True
    lock.unlock()
    return False
