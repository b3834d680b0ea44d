"""Files of kernels on disk, so that each is compiled only once; and the cache folder.

What is read here is executed as machine code. So the folder must belong to the user and be writable
by no one else, and every file holds a hash of its content. Without such a folder, or with
DRAFTSCOPE_KERNEL_CACHE=off, nothing is kept.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "DRAFTSCOPE_KERNEL_CACHE"
MOST_BYTES = 64 << 20
"""Limit for all files together; the least recently used ones are removed first."""

_SUFFIX = ".kernel"
_HEADER = b"draftscope kernel 1\n"
_HASH_BYTES = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """DRAFTSCOPE_DATA_DIR, or the system's cache folder. It need not exist."""
    if chosen := os.environ.get("DRAFTSCOPE_DATA_DIR"):
        return Path(chosen)
    if sys.platform == "win32":
        folder = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        folder = "~/Library/Caches"
    else:
        folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(folder)) / "draftscope"


def kept(key: str, made: Callable[[], bytes]) -> bytes:
    """The content kept under a key of hexadecimal digits, usually object code; made and kept if
    missing.

    Errors of the disk are ignored: the kernel is then compiled.
    """
    with suppress(OSError), _folder() as folder:
        found = _read(folder, key)
        if found is not None:
            return found
    code = made()
    with suppress(OSError), _folder() as folder:
        _write(folder, key, code)
        _prune(folder)
    return code


@contextmanager
def _folder() -> Iterator[int]:
    """An open folder to reach files in. Raises OSError if there is none that can be trusted."""
    chosen = os.environ.get(VARIABLE)
    if chosen == "off":
        raise OSError("kernels are not to be kept")
    if not hasattr(os, "O_NOFOLLOW"):
        raise OSError("this system has no way to open a folder that only its owner can write to")
    path = chosen or cache_folder() / "kernels"
    os.makedirs(path, mode=0o700, exist_ok=True)
    # opened before it is checked, and not opened again by name
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _is_ours(os.fstat(folder)):
            raise PermissionError(f"{path} can be written by others")
        yield folder
    finally:
        os.close(folder)


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(folder: int, key: str) -> bytes | None:
    """None for a file that is missing, not ours, damaged, or holds something else."""
    try:
        file = os.open(key + _SUFFIX, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        return None
    with open(file, "rb") as opened:
        status = os.fstat(file)
        if not (stat.S_ISREG(status.st_mode) and _is_ours(status) and status.st_size < MOST_BYTES):
            return None
        whole = opened.read()
        with suppress(OSError):  # a read-only disk is not pruned either
            os.utime(file)
    return _content(whole, key)


def _content(whole: bytes, key: str) -> bytes | None:
    head = _head(key)
    digest, code = whole[len(head) :][:_HASH_BYTES], whole[len(head) + _HASH_BYTES :]
    intact = whole.startswith(head) and hashlib.sha256(code).digest() == digest
    return code if intact else None


def _head(key: str) -> bytes:
    return _HEADER + key.encode() + b"\n"


def _write(folder: int, key: str, code: bytes) -> None:
    """The whole file appears at once; two processes may write the same one."""
    part = f"{key}.{uuid.uuid4().hex}{_SUFFIX}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with open(os.open(part, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(_head(key) + hashlib.sha256(code).digest() + code)
        os.replace(part, key + _SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise


def _prune(folder: int) -> None:
    """Remove the least recently used files, including those of other versions, beyond
    MOST_BYTES."""
    found = []
    for name in os.listdir(folder):
        if name.endswith(_SUFFIX):
            with suppress(FileNotFoundError):  # another process has removed it
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                found.append((status.st_mtime_ns, name, status.st_size))
    total = sum(size for _, _, size in found)
    for _, name, size in sorted(found):
        if total <= MOST_BYTES:
            break
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        total -= size
