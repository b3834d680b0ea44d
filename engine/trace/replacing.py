"""Atomic replacement of a folder: a crash at any moment leaves a complete one.

The new folder is written next to its target as `.NAME.draftscope-PID-….part` and becomes `.new`
when it is complete; the target becomes `.old` while the new one moves in, and then `.gone`. So at
every moment the target itself, `.new` or `.old` is complete, and `recover` finds it: the next
export to the same place calls it, and so does any reader that looks for the remains of a killed
process. Nothing else next to a target is touched, and only a trace's own files are deleted.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.files import synced

_STAGE = re.compile(r"\.(?P<name>.+)\.draftscope-(?P<pid>\d+)-[0-9a-f]{8}\.(part|new|old|gone)")
_PART, _NEW, _OLD, _GONE = ".part", ".new", ".old", ".gone"

_mine: set[str] = set()
"""Stages that this process is working on, without suffixes."""


@contextmanager
def replacing(
    folder: Path, check: Callable[[Path], None], ours: Callable[[Path], set[str]]
) -> Iterator[Path]:
    """A new folder next to `folder` that replaces it when the body succeeds; otherwise it is
    removed.

    check: raises for a target that may not be replaced; called when the new one is complete. ours:
    names of the files in a folder that may be deleted.
    """
    folder = where_links_lead(folder)
    made = [parent for parent in folder.parents if not parent.exists()]
    stem = _stem(folder)
    part, new, old = (folder.with_name(stem + ending) for ending in (_PART, _NEW, _OLD))
    _mine.add(stem)
    try:
        recover(folder, ours)
        part.mkdir(parents=True)
        yield part
        check(folder)
        for path in part.iterdir():
            synced(path)
        part.rename(new)
        if folder.exists():
            shutil.copymode(folder, new)
            _swap(new, folder, old)
            _remove(old, folder, ours)
        else:
            new.rename(folder)
    except BaseException:
        for stage in (part, new):
            shutil.rmtree(stage, ignore_errors=True)
        with suppress(OSError):
            for parent in made:
                parent.rmdir()
        raise
    finally:
        _mine.discard(stem)


def where_links_lead(folder: Path) -> Path:
    """The resolved path of a folder, so that links stay links. Raises OSError."""
    found = Path(os.path.realpath(folder))
    if found.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return found


def check_room(folder: Path, names: Iterable[str]) -> None:
    """Raise OSError if `replacing` could not write files of these names; leaves nothing over."""
    folder = where_links_lead(folder)
    part = folder.with_name(_stem(folder) + _PART)
    made = [each for each in (part, *part.parents) if not each.exists()]
    try:
        part.mkdir(parents=True)
        longest = part / max(names, key=len)
        longest.touch()
        longest.unlink()
    finally:
        for each in made:
            with suppress(OSError):
                each.rmdir()


def _stem(folder: Path) -> str:
    """A stage's name without its suffix."""
    return f".{folder.name}.draftscope-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _swap(new: Path, folder: Path, old: Path) -> None:
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise


def recover(folder: Path, ours: Callable[[Path], set[str]]) -> None:
    """Restore a folder whose replacement was killed, and remove the remains.

    Raises OSError.
    """
    folder = where_links_lead(folder)
    if not folder.parent.is_dir():
        return
    stages = [path for path in folder.parent.iterdir() if target_of(path) == folder]
    stages = [path for path in stages if not _is_at_work(path)]
    for ending in (_NEW, _OLD):  # if both exist, the new one was about to move in
        for stage in stages:
            if stage.suffix == ending and not folder.exists():
                stage.rename(folder)
    for stage in filter(Path.exists, stages):
        if stage.suffix in (_OLD, _GONE):
            _remove(stage, folder, ours)
        else:
            shutil.rmtree(stage, ignore_errors=True)


def target_of(path: Path) -> Path | None:
    """The folder that a stage was to replace; None for any other path."""
    found = _STAGE.fullmatch(path.name)
    return None if found is None else path.with_name(found["name"])


def _is_at_work(stage: Path) -> bool:
    """Whether the process that made a stage may still need it."""
    found = _STAGE.fullmatch(stage.name)
    assert found is not None
    if int(found["pid"]) == os.getpid():
        return stage.stem in _mine
    return is_alive(int(found["pid"]))


def is_alive(pid: int) -> bool:
    """Whether a process may still run."""
    if os.name != "posix":  # where signal 0 would end it
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


def _remove(old: Path, folder: Path, ours: Callable[[Path], set[str]]) -> None:
    """Delete the files of a trace; others move to the folder that replaced it, or stay if the name
    is taken there."""
    with suppress(OSError):
        names = ours(old)
        gone = old.with_suffix(_GONE)
        if old != gone:
            old.rename(gone)
        for path in gone.iterdir():
            if path.name in names:
                path.unlink()
            elif folder.is_dir() and not (folder / path.name).exists():
                path.rename(folder / path.name)
        gone.rmdir()
