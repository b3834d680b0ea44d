"""A disk of its own for a case: it gets full, has no room for files, becomes read-only or is gone.

It is a tmpfs in a mount namespace of this process alone, for which it must be root or may make a
user namespace.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FULL, NO_INODES, READ_ONLY, GONE = "full", "no inodes", "read-only", "gone"
KINDS = (FULL, NO_INODES, READ_ONLY, GONE)
_NEWNS, _NEWUSER = 0x20000, 0x10000000
_RDONLY, _REMOUNT, _REC, _PRIVATE, _DETACH = 1, 32, 0x4000, 1 << 18, 2
_PAGE = os.sysconf("SC_PAGE_SIZE")
_WHOLE = "size=64m,nr_inodes=4096"
_own: list[bool] = []
"""Whether this process has a namespace of its own."""


def why_none() -> str:
    """Why there can be no such disks here; empty if there can."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with disk(Path("/tmp")):
                pass
        except OSError as error:
            os.write(writing, str(error).encode() or b"?")
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        os.waitpid(child, 0)
        return file.read().decode()


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """An empty disk at a folder, in this process and its children. Raises OSError."""
    if not _own:
        _unshare()
        _own.append(True)
    _mount("tmpfs", folder, 0, _WHOLE)
    try:
        yield folder
    finally:
        _check(_LIBC.umount2(os.fsencode(folder), _DETACH))


def strike(kind: str, folder: Path, n: int) -> None:
    """From now on it is FULL but for n pages, one at least; takes n files more; is READ_ONLY; or
    is GONE but for files that are open, and an empty folder that nothing can be written to is in
    its place. While files are open for writing the system makes none READ_ONLY: nothing happens.
    """
    found = os.statvfs(folder)
    if kind == FULL:
        pages = (found.f_blocks - found.f_bfree) * found.f_frsize // _PAGE + n
        _mount("tmpfs", folder, _REMOUNT, f"size={max(1, pages) * _PAGE}")
    elif kind == NO_INODES:
        _mount("tmpfs", folder, _REMOUNT, f"nr_inodes={found.f_files - found.f_ffree + n}")
    elif kind == READ_ONLY:
        with suppress(OSError):
            _mount("tmpfs", folder, _REMOUNT | _RDONLY, "")
    else:
        _mount("tmpfs", folder, _RDONLY, "")


def heal(kind: str, folder: Path) -> None:
    """It is there again, and has room for everything."""
    if kind == GONE and os.statvfs(folder).f_flag & os.ST_RDONLY:
        _check(_LIBC.umount2(os.fsencode(folder), _DETACH))
    _mount("tmpfs", folder, _REMOUNT, _WHOLE)


_LIBC = ctypes.CDLL(None, use_errno=True)


def _unshare() -> None:
    user, group = os.getuid(), os.getgid()
    if _LIBC.unshare(_NEWNS):
        _check(_LIBC.unshare(_NEWUSER | _NEWNS))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount("none", Path("/"), _REC | _PRIVATE, "")


def _mount(kind: str, folder: Path, flags: int, options: str) -> None:
    name = kind.encode()
    _check(_LIBC.mount(name, os.fsencode(folder), name, flags, options.encode()))


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
