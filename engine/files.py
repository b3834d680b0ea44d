"""Files that a user names: errors about them, and writing one as a whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import DraftscopeError, OptionError

_MOST_LINKS = 40
_LONGEST_SUFFIX = 16
PART = ".draftscope-"
"""How the name begins of what is being written and takes the place of a file when it is whole."""


def unreadable(
    path: Path, error: OSError, kind: type[DraftscopeError] = OptionError
) -> DraftscopeError:
    """The error, of this kind, about a file that the system does not let us read."""
    return kind(
        f"{path} cannot be read: {error.strerror or error}.", "Check the path and its rights."
    )


def user_text(path: Path, most_bytes: int) -> str:
    """The text of a file that a user names, without a byte order mark.

    Raises OptionError for what is no file (a device or a pipe might never end), is larger, is not
    UTF-8 or cannot be read.
    """
    try:
        if path.exists() and not path.is_file():
            raise OptionError(f"{path} is no file.", "Name a text file.")
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # a name with a null character
        reason = error if isinstance(error, OSError) else OSError(str(error))
        raise unreadable(path, reason) from error
    if len(raw) > most_bytes:
        raise OptionError(f"{path} is larger than {most_bytes >> 20} MiB.", "Split it.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise OptionError(
            f"{path}: line {line} is not UTF-8 text.", "Convert the file to UTF-8."
        ) from error


def is_unicode(text: str) -> bool:
    """Whether a text can be written at all: JSON may hold halves of characters."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


@contextmanager
def written_whole(path: Path, kind: type[DraftscopeError] = OptionError) -> Iterator[Path]:
    """A path to write a regular file to, which takes the place of `path` when the body is done.

    After an error in the body nothing is left of it, and an earlier file stays. The new one has
    the permissions of the earlier one. Where `path` is a link, the file that it points to is
    replaced. A pipe, a device or /dev/stdout gets the bytes once all are there. Raises an error of
    this kind where the system does not let us write.
    """
    try:
        stream = _stream(path)
        if stream is not None:
            with tempfile.TemporaryDirectory() as folder:
                part = Path(folder, _part_name(path))
                yield part
                _copy(part, stream)
        else:
            yield from _replaced(_target(path))
    except OSError as error:
        raise kind(
            f"{path} cannot be written: {error.strerror or error}.",
            "Choose another path, or free some space.",
        ) from error


def check_writable(path: Path) -> None:
    """Raise OSError if `written_whole` could not write a file; nothing is left of the attempt."""
    if _stream(path) is not None:
        return
    target = _target(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    # the name itself, which the file system may not take, and one more file in its folder
    for probe in (target, target.with_name(_part_name(target))):
        if not probe.exists():
            probe.touch(exist_ok=False)
            probe.unlink()


def _stream(path: Path) -> Path | int | None:
    """What takes bytes one after another and cannot be replaced: a pipe, a device, or the number
    of an open file, which /dev/stdout and a shell's `>(…)` lead to. None for anything else."""
    link = path
    for _ in range(_MOST_LINKS):
        if os.path.realpath(link.parent) in (f"/proc/{os.getpid()}/fd", "/dev/fd"):
            os.stat(link)
            return int(link.name)
        if not link.is_symlink():
            break
        link = link.parent / os.readlink(link)
    return path if path.is_fifo() or path.is_char_device() else None


def _target(path: Path) -> Path:
    """The file that is replaced, where links lead."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return target


def _part_name(path: Path) -> str:
    """A name beside any other; its suffix is the same, for what is written as that says."""
    return f"{PART}{uuid.uuid4().hex[:8]}{path.suffix[:_LONGEST_SUFFIX]}"


def _copy(part: Path, target: Path | int) -> None:
    if isinstance(target, int):
        for stream in (sys.stdout, sys.stderr):  # what was printed before comes first
            if stream is not None:
                stream.flush()
    with (
        part.open("rb") as whole,
        open(target, "wb", closefd=not isinstance(target, int)) as opened,
    ):
        shutil.copyfileobj(whole, opened)


def _replaced(target: Path) -> Iterator[Path]:
    part = target.with_name(_part_name(target))
    try:
        yield part
        if target.exists():
            part.chmod(stat.S_IMODE(target.stat().st_mode))
        synced(part)
        part.replace(target)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            part.unlink(missing_ok=True)
        raise


def synced(path: Path) -> None:
    """Return once a file's bytes are on the disk, so that after a power cut none is empty."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
