"""Weights that are used where their file is mapped, moved to huge pages at the same addresses.

Linux gives the pages of a file 4 KiB each, and a processor's prefetching stops at every page's
end. Memory of the process's own can have pages of 2 MiB. A copy of a stretch on such pages is put
over the stretch in one step (mremap), so views of it stay what they are, and so does what the
process holds: the file's pages go as the copies come.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

_AT_ONCE = 16
"""Huge pages copied before they are put in place: what the process holds twice meanwhile."""
_MAY_MOVE, _FIXED = 1, 2  # flags of mremap
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def move_to_huge_pages(views: Iterable[np.ndarray], size: int, goes_on: Callable[[], bool]) -> int:
    """Bytes that were moved, in whole pages of `size`, while goes_on() says so.

    views: uint8 [n] each, of mapped files, which nothing may write to and nobody unmap meanwhile.
    Nothing is moved where memory would get short: the file's own pages stay in the system's cache
    until that needs them for something else.
    """
    stretches = list(whole_stretches(views, size))
    if 2 * sum(stop - start for start, stop in stretches) > available_memory():
        return 0
    library = _library()
    moved = 0
    for start, stop in stretches:
        for first in range(start, stop, _AT_ONCE * size):
            n_bytes = min(_AT_ONCE * size, stop - first)
            if not goes_on() or not _move(library, first, n_bytes, size):
                return moved
            moved += n_bytes
    return moved


def whole_stretches(views: Iterable[np.ndarray], size: int) -> Iterator[tuple[int, int]]:
    """Addresses from and to, multiples of `size`, that lie in views, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for start, n_bytes in sorted((view.ctypes.data, view.nbytes) for view in views):
        # tensors lie behind one another, with less than an alignment between them
        if joined and start - joined[-1][1] < mmap.PAGESIZE:
            joined[-1] = joined[-1][0], max(joined[-1][1], start + n_bytes)
        else:
            joined.append((start, start + n_bytes))
    for start, stop in joined:
        start, stop = -(-start // size) * size, stop // size * size
        if start < stop:
            yield start, stop


def available_memory() -> int:
    """Bytes that the system, and limits of this process's groups, leave; 0 where it is unknown."""
    try:
        lines = _MEMORY.read_text().splitlines()
        free = 1024 * int(next(x for x in lines if x.startswith("MemAvailable:")).split()[1])
    except (OSError, StopIteration):
        return 0
    try:
        own = next(x for x in _GROUP.read_text().splitlines() if x.startswith("0::"))[4:]
        for folder in (_GROUPS / own, *(_GROUPS / own).parents):
            limit = folder / "memory.max"
            if limit.exists() and (most := limit.read_text().strip()) != "max":
                free = min(free, int(most) - int((folder / "memory.current").read_text()))
    except (OSError, StopIteration, ValueError):
        return free
    return free


def _move(library: ctypes.CDLL, start: int, n_bytes: int, size: int) -> bool:
    """Put a copy on huge pages over a stretch of whole ones."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = library.mmap(None, n_bytes + size, access, flags, -1, 0)
    if room in (None, ctypes.c_void_p(-1).value):
        return False
    copy = -(-room // size) * size
    library.madvise(copy, n_bytes, mmap.MADV_HUGEPAGE)
    ctypes.memmove(copy, start, n_bytes)
    library.mprotect(copy, n_bytes, mmap.PROT_READ)
    put = library.mremap(copy, n_bytes, n_bytes, _MAY_MOVE | _FIXED, start)
    rest = copy if put == start else copy + n_bytes
    for first, last in ((room, copy), (rest, room + n_bytes + size)):
        if first < last:
            library.munmap(first, last - first)
    return bool(put == start)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = library.mremap.restype = address
    library.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    library.mremap.argtypes = [address, size, size, number, address]
    library.madvise.argtypes = library.mprotect.argtypes = [address, size, number]
    library.munmap.argtypes = [address, size]
    return library
