"""Memory of this process: how much more the system and control groups allow; returning freed memory
to the system; and huge pages (2 MiB) for weights, which are read from end to end in every step.

On pages of 4 KiB the processor's prefetching stops at the end of each page. One row through int8
matrices took a fifth less time on pages of 2 MiB (two cores of Zen 4). For weights kept in their
file's blocks, which are copied to such pages (engine.gguf.reader), a pass of one token through 0.65
B took 13 % less time in Q8_0 and 7 % less in Q4_K_M (two cores of a Xeon, family 6 model 167).
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_MAPPINGS = Path("/proc/self/maps")
_PAGES = Path("/proc/self/smaps")
# first and last address of file-backed code, or of read-only data of a library, without modified
# pages
_UNWRITTEN_CODE = re.compile(
    r"^(\w+)-(\w+) r-(?:xp [^/\n]*/.*|-p [^/\n]*/.*\.so[.\d]*)\n"
    r"(?:(?!Anonymous:)\w+:.*\n)*Anonymous: +0 kB",
    re.MULTILINE,
)
_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_DONT_NEED = 4  # MADV_DONTNEED
# MADV_COLLAPSE, since Linux 6.1; it works wherever huge pages exist, even if none are automatic
_COLLAPSE = 25

_POLITE = 10
"""Niceness of the thread: a run that starts meanwhile has priority."""
_WAIT_S = 2.0
"""A model opened for only a few tokens is done by then, and would gain nothing."""
_at_work: dict[threading.Thread, threading.Event] = {}


def use_huge_pages_soon(wanted: Callable[[], bool]) -> None:
    """Start `use_huge_pages` in the background after a delay, because it takes as long as dozens of
    steps."""
    at_once = threading.Event()

    def work() -> None:
        at_once.wait(_WAIT_S)
        with suppress(OSError, AttributeError):  # a thread has a niceness of its own on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _POLITE)
        try:
            use_huge_pages(wanted)
        finally:
            _at_work.pop(thread, None)

    thread = threading.Thread(target=work, name="huge-pages", daemon=True)
    _at_work[thread] = at_once
    thread.start()


def wait_for_huge_pages() -> None:
    """Wait until no pages are being joined in the background, for measurements."""
    for thread, at_once in list(_at_work.items()):
        at_once.set()
        thread.join()


def use_huge_pages(wanted: Callable[[], bool] = lambda: True) -> None:
    """Return freed memory to the system and join the pages of all other memory; contents and
    addresses stay.

    For use after large allocations that will mostly be kept. Covers the whole process, because the
    libraries that pack weights allocate from the C library. Takes up to a few seconds per GiB, and
    ends early once the weights are no longer wanted. Does nothing if the system has no such pages.
    """
    if not sys.platform.startswith("linux"):
        return
    give_back_memory()
    library = ctypes.CDLL(None)
    try:
        size, mappings = int(_PAGE_SIZE.read_text()), _MAPPINGS.read_text()
    except OSError:  # a kernel without huge pages
        return
    for start, stop in whole_pages(mappings.splitlines(), size):
        if not wanted():
            return
        # parts that cannot be joined stay unchanged, so the result does not matter
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _COLLAPSE)


def whole_pages(mappings: Iterable[str], size: int) -> Iterator[tuple[int, int]]:
    """Address ranges, multiples of `size`, of a process's private memory.

    mappings: lines of /proc/self/maps. Stacks, files and read-only memory are left out.
    """
    for line in mappings:
        addresses, access, _, _, _, *name = line.split(maxsplit=5)
        if access != "rw-p" or (name and name[0] != "[heap]"):
            continue
        start, stop = (int(address, 16) for address in addresses.split("-"))
        start, stop = -(-start // size) * size, stop // size * size
        if start < stop:
            yield start, stop


_left_resident = -sys.maxsize  # bytes, after memory was last given back


def give_back_memory(growth: int = 0) -> None:
    """Return memory to the system after imports and loading: freed memory that GNU's C library
    keeps and a run hardly reuses, and pages of libraries, most of which were used once.

    It takes a few hundredths of a second, so it is skipped if the process has grown by less than
    `growth` bytes since the last time. For a 0.65 B model in its file's blocks, 80 MiB were freed
    memory and 60 MiB code, mostly of torch, which registers its operations. Code that runs again
    comes back from the system's file cache; modified code, usually by a debugger, would not, and
    stays. Works on Linux only; other C libraries than GNU's keep freed memory.
    """
    global _left_resident
    grown = not growth or (resident_memory() or 0) >= _left_resident + growth
    if not (grown and sys.platform.startswith("linux")):
        return
    library = ctypes.CDLL(None)
    with suppress(AttributeError):  # not GNU's
        library.malloc_trim(ctypes.c_size_t(0))
    with suppress(OSError):
        for start, stop in _UNWRITTEN_CODE.findall(_PAGES.read_text()):
            first, size = int(start, 16), int(stop, 16) - int(start, 16)
            library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _DONT_NEED)
    _left_resident = resident_memory() or 0


_CLEAR = Path("/proc/self/clear_refs")
_MEMORY, _SELF = Path("/proc/meminfo"), Path("/proc/self/status")
_GROUP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# of a group, by version of control groups: files with limit and use, and counters of its file cache
_LIMITS = {
    "": ("memory.max", "memory.current", ("active_file", "inactive_file")),
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}
_SHARE = 0.75


def fits_in_memory(n_bytes: int) -> bool:
    """Whether this much can be allocated while leaving a quarter for the rest of a run."""
    return n_bytes <= _SHARE * available_memory()


def available_memory() -> int:
    """Bytes that the system and the limits of this process's groups leave, including file cache;
    half of all memory if the system does not report it, and 0 if that is unknown too."""
    try:
        free = 1024 * _numbers(_MEMORY)["MemAvailable:"]
    except (OSError, KeyError):
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        except (AttributeError, ValueError, OSError):  # Windows
            return 0
    with suppress(OSError):
        for line in _GROUP.read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            for kind in {"", *controllers.split(",")} & _LIMITS.keys():
                if kind or not controllers:
                    free = min(free, _left(_GROUPS / kind, own.lstrip("/"), kind, free))
    return max(free, 0)


def resident_memory() -> int | None:
    """Bytes that this process has in memory; None if the system does not report it."""
    try:
        return 1024 * _numbers(_SELF)["VmRSS:"]
    except (OSError, KeyError):
        return None


def forget_peak() -> bool:
    """Reset `peak_resident` of this process; returns whether the system supports it."""
    with suppress(OSError):
        return bool(_CLEAR.write_text("5"))
    return False


def peak_resident(pid: int | None = None) -> int:
    """Most bytes that this process, or another one or a child of it, has had in memory; 0 if the
    system does not report it."""
    try:
        if pid is None:
            return 1024 * _numbers(_SELF)["VmHWM:"]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return 1024 * max(
            _numbers(Path(f"/proc/{one}/status"))["VmHWM:"] for one in (pid, *children)
        )
    except (OSError, KeyError):
        return 0


def _left(root: Path, own: str, kind: str, free: int) -> int:
    """What the limits of a group and its parents leave; `free` without limits."""
    limit, use, cache = _LIMITS[kind]
    for folder in (root / own, *(root / own).parents):
        if folder.is_relative_to(root):
            with suppress(OSError, ValueError):  # the root has no such files; "max" is not a number
                most = int((folder / limit).read_text())
                stat = _numbers(folder / "memory.stat")
                cached = sum(stat.get(name, 0) for name in cache)
                free = min(free, most - int((folder / use).read_text()) + cached)
    return free


def _numbers(path: Path) -> dict[str, int]:
    """The first number of every line, by the line's first word."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
