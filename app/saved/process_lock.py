"""Lock files that name the process that holds them; what a dead process held is free again."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QLockFile


def lock_path(path: Path) -> Path:
    """The lock file of a file or folder, beside it."""
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
