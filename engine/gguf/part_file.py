"""Files of a model: reading or mapping them, and detecting changes on disk."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary, finalize

import numpy as np

from engine.errors import ModelFileError

DAMAGED = "The file is incomplete or damaged: download or copy it again."
WRITTEN, REPLACED = "written", "replaced"
"""Changes of a file: written in place, or replaced by another one under its name."""
_READ = 2 << 20
"""Most bytes per read: destination pages that the system has just cleared are then still in the
processor's cache. Reads of 64 MiB took twice the time into huge pages (Xeon, family 6 model
207)."""
_LATER = "Open it again when it is complete."
# changes of these update st_ctime but not the content
_OF_ENTRY = "st_mode", "st_uid", "st_gid", "st_nlink"


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What changes with a file: size in bytes, time of the last change, number on its disk.

    ctime_ns: the time that the system recorded; mtime_ns can be set by anyone.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """The stamp of a file from its entry on the disk."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


class PartFile:
    """A file that stays open until `close`, or while mapped bytes are in use.

    stamp: as it was when opened. n_bytes: its size then.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError for a file that is absent, empty, not regular or unreadable."""
        self.path: Final = path
        try:
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                raise ModelFileError(
                    path, "", "this is a folder", "Choose or convert a file in it."
                )
            if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its other end
                raise ModelFileError(path, "", "not a regular file", "Choose a GGUF file.")
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            where = "" if path.parent == Path() else f" in {str(path.parent)[-80:]}"
            raise ModelFileError(
                path, "", f"no such file{where}", "Check the path, or choose the file again."
            ) from None
        except PermissionError:
            raise ModelFileError(
                path, "", "no permission to read it", "Change the file's permissions."
            ) from None
        except (OSError, ValueError) as error:
            raise ModelFileError(
                path, "", f"cannot be opened ({_reason(error)})", "Check the path and the disk."
            ) from None
        finalize(self, self._file.close)
        self._opened = os.fstat(self._file.fileno())
        self.stamp: Final = FileStamp.of(self._opened)
        self.n_bytes: Final = self.stamp.size
        self._map: _Mapping | None = None
        self._ahead: PrivateCopy | None = None
        self._is_written = self._is_copied = False
        if not self.n_bytes:
            self.close()
            raise ModelFileError(path, "byte 0", "the file is empty", DAMAGED)

    @property
    def is_mapped(self) -> bool:
        """Whether bytes of the file itself are in use, or may be requested."""
        return self._map is not None

    def read(self, offset: int, into: memoryview) -> None:
        """Fill all of `into`. Raises ModelFileError if the file has become too short or its disk
        fails."""
        done = 0
        try:
            self._file.seek(offset)
            while done < len(into):
                step = _READ - (offset + done) % _READ
                n = self._file.readinto(into[done : done + step])
                if not n:
                    raise self._changed()
                done += n
        except OSError as error:
            raise ModelFileError(
                self.path, f"byte {offset + done}", f"cannot be read ({_reason(error)})",
                "Check the disk.",
            ) from error  # fmt: skip

    def mapped(self) -> mmap.mmap:
        """The whole file, read-only; it stays mapped while views are in use. After each use
        `check_mapped` tells whether it could be read.

        Raises ModelFileError if it cannot be mapped.
        """
        if self._map is None:
            self.check_unchanged()  # mmap would map a file that has become shorter
            try:
                self._map = _Mapping(self._file.fileno(), self.n_bytes, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ModelFileError(
                    self.path, "file", f"cannot be mapped ({_reason(error)})", "Use --no-mmap."
                ) from error
            self._map.path = self.path
            _guard(self._map)
        return self._map

    def read_ahead(self, spans: Sequence[tuple[int, int]]) -> None:
        """Start to fill the copy with these byte ranges, ascending; once."""
        if self._ahead is None:
            with suppress(OSError):  # no memory: the reader will report it
                self._ahead = PrivateCopy(self.n_bytes)
                self._ahead.fill(self._file.fileno(), spans)

    def copy(self) -> PrivateCopy:
        """Memory for a copy, for one reader; the first one gets what was read ahead. Raises
        OSError."""
        ahead, self._is_copied = None if self._is_copied else self._ahead, True
        return ahead or PrivateCopy(self.n_bytes)

    def close(self) -> None:
        """Close it, unless mapped bytes are in use."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:  # views of it are still in use
                return
            if self._map.guard:
                self._map.guard()
            self._map = None
        self._file.close()

    # -- changes on disk -------------------------------------------------------------------

    def change(self) -> str:
        """WRITTEN, REPLACED, or empty if the file is the opened one or was removed, which is
        harmless while it is open. Costs one system call, or two if it was replaced or removed."""
        if self._is_written:
            return WRITTEN
        try:
            there: os.stat_result | None = os.stat(self.path)
        except (OSError, ValueError):
            there = None
        is_other = there is not None and not os.path.samestat(there, self._opened)
        now = there
        if there is None or is_other:
            now = None if self._file.closed else os.fstat(self._file.fileno())
        if now is not None and _last_change(now) != _last_change(self._opened):
            is_same_entry = there is not None and not is_other
            self._is_written = _is_written(self._opened, now, is_same_entry)
            self._opened = now
        return WRITTEN if self._is_written else REPLACED if is_other else ""

    def check_unchanged(self) -> None:
        """Raises ModelFileError if the file was written to since it was opened."""
        if self.change() == WRITTEN:
            raise self._changed()

    def check_whole(self) -> None:
        """Raises ModelFileError if mapped bytes are beyond the file's present end: reading them
        would end the process where that cannot be caught."""
        if self._map is not None and self._map.size() < self.n_bytes:
            raise self._map.error()

    def check(self) -> None:
        """Raises ModelFileError if mapped bytes have changed since the file was opened.

        A replaced or removed file is still available to mappings.
        """
        if self._map is not None and (self._map.is_struck or self.change() == WRITTEN):
            raise self.has_changed()

    def has_changed(self) -> ModelFileError:
        """The error for a changed file."""
        return ModelFileError(
            self.path, "file", "has changed since it was opened", "Open it again."
        )

    def _changed(self) -> ModelFileError:
        return ModelFileError(self.path, "file", "has changed while it was being read", _LATER)


class _Mapping(mmap.mmap):
    """A mapped file whose bus errors are caught if the system allows it."""

    path: Path
    is_struck = False
    guard: finalize[..., _Mapping] | None = None

    def error(self) -> ModelFileError:
        """The error for an unreadable page."""
        is_short = self.size() < len(self)
        what = "was cut short" if is_short else "can no longer be read"
        return ModelFileError(
            self.path,
            "file",
            f"{what} while its weights were mapped",
            "Open it again when it is complete; without --mmap weights are copied into memory.",
        )


def check_mapped() -> None:
    """Raises ModelFileError if a mapped file could not be read since the last call: results since
    then are invalid. Costs a table look-up.

    Works only if such reads can be caught (kernels.llvm.bus_errors); otherwise they end the
    process.
    """
    numbers = _handler.struck() if _handler else ()
    if struck := [_guarded[number] for number in numbers if number in _guarded]:
        for each in struck:
            each.is_struck = True
        raise struck[0].error()


def _last_change(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_written(before: os.stat_result, now: os.stat_result, is_same_entry: bool) -> bool:
    """Whether a later st_ctime comes from a write: size or modification time changed, or, if a tool
    has reset these, nothing else explains it. is_same_entry: whether the file still has its name; a
    rename would explain it."""
    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        return True
    return is_same_entry and all(getattr(now, x) == getattr(before, x) for x in _OF_ENTRY)


def _reason(error: OSError | ValueError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


_handler: Any = None
_guarded: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()


def _guard(mapping: _Mapping) -> None:
    """Catch bus errors of a mapping where possible."""
    global _handler
    from kernels.llvm.bus_errors import bus_errors  # here, because it loads the compiler

    _handler = bus_errors()
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    number = _handler.guard(address, len(mapping)) if _handler else None
    if number is not None:
        _guarded[number] = mapping
        # the mapping ends with its last view, possibly long after the file was closed
        mapping.guard = finalize(mapping, _handler.forget, number)
        mapping.guard.atexit = False


CHANGES = "file_changes"
"""Fact of a run: changes of its model files, a list of objects. file: name. change: WRITTEN or
REPLACED. mapped: whether weights in use were the file's own. round: in which the change was found,
None before the first or after the last one; after: the last round before."""


LOOK_S = 1 / 4
"""Interval of a run's checks of its model files, seconds: each takes about 0.2 ms."""


class ModelFiles:
    """The files of an open model and its drafters, monitored while in use. parts: every file."""

    def __init__(self, parts: Iterable[PartFile] = ()) -> None:
        self.parts = list(parts)

    @property
    def is_mapped(self) -> bool:
        """Whether weights in use are the files' own, and not copies."""
        return any(part.is_mapped for part in self.parts)

    @property
    def changed(self) -> bool:
        """Whether any file on disk was replaced or modified."""
        return any(part.change() for part in self.parts)

    def check(self) -> None:
        """Raises ModelFileError if weights in use have changed since opening."""
        for part in self.parts:
            part.check()

    def note(self, facts: dict[str, Any], round_: int | None, after: int | None = None) -> None:
        """Add changes of the files to the facts of a run, each once."""
        for part in self.parts:
            if change := part.change():
                known = facts.setdefault(CHANGES, [])
                found = {"file": part.path.name, "change": change, "mapped": part.is_mapped}
                if not any(found.items() <= one.items() for one in known):
                    known.append({**found, "round": round_, "after": after})


_HUGE = 2 << 20
_AT_ONCE = 16 << 20
"""Bytes read per release of the GIL, which may take 5 ms to reacquire."""


class PrivateCopy:
    """memory: not yet touched, on huge pages if available: these take no longer to fill, and
    products read them faster (engine.machine.host_memory)."""

    def __init__(self, n_bytes: int) -> None:
        """Raises OSError."""
        self._spans: Sequence[tuple[int, int]] = ()
        self._until, self._is_wanted, self._is_done = 0, True, True
        self._moved = threading.Condition()
        self._thread: threading.Thread | None = None
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
            self.memory = mmap.mmap(-1, n_bytes)
            return
        # Linux aligns such memory to huge pages
        n_bytes = -(-n_bytes // _HUGE) * _HUGE
        self.memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self.memory.madvise(mmap.MADV_HUGEPAGE)

    def fill(self, file: int, spans: Sequence[tuple[int, int]]) -> None:
        """Start to read these byte ranges of an open file, ascending, to the same offsets."""
        if hasattr(os, "preadv"):
            self._spans, self._is_done = spans, False
            args = os.dup(file), memoryview(self.memory)
            self._thread = threading.Thread(target=self._fill, args=args, daemon=True)
            self._thread.start()

    def has(self, start: int, stop: int, seconds: float) -> bool | None:
        """Whether these bytes are available; None if undecided after these seconds. Bytes that will
        never come, for example after an error, must be read by the caller."""
        if not any(first <= start and stop <= last for first, last in self._spans):
            return False
        with self._moved:
            self._moved.wait_for(lambda: self._until >= stop or self._is_done, seconds)
            return self._until >= stop or (False if self._is_done else None)

    def stop(self) -> None:
        """Stop reading."""
        self._is_wanted = False
        if self._thread is not None:
            self._thread.join()

    def _fill(self, file: int, into: memoryview) -> None:
        try:
            for start, stop in self._spans:
                self._until = start
                while self._until < stop:
                    step = into[self._until : min(self._until + _AT_ONCE, stop)]
                    n = os.preadv(file, [step], self._until) if self._is_wanted else 0
                    if not n:  # the file has become shorter
                        return
                    with self._moved:
                        self._until += n
                        self._moved.notify_all()
        except OSError:
            pass
        finally:
            os.close(file)
            with self._moved:
                self._is_done = True
                self._moved.notify_all()
