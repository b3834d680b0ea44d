"""Memory that this process may still take, by the system and by its control groups."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
# of a group, by the version of control groups: its limit, its use, and what of that is file cache
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
    """Whether so much can be taken with room for the rest of a run: a quarter is left."""
    return n_bytes <= _SHARE * available_memory()


def available_memory() -> int:
    """Bytes that the system and the limits of this process's groups leave, cache of files included;
    half of all memory where the system does not say, and 0 where that is unknown, too."""
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


def _left(root: Path, own: str, kind: str, free: int) -> int:
    """What the limits of a group and of those around it leave; `free` where there is none."""
    limit, use, cache = _LIMITS[kind]
    for folder in (root / own, *(root / own).parents):
        if folder.is_relative_to(root):
            with suppress(OSError, ValueError):  # the root has no files, "max" is not a number
                most = int((folder / limit).read_text())
                stat = _numbers(folder / "memory.stat")
                cached = sum(stat.get(name, 0) for name in cache)
                free = min(free, most - int((folder / use).read_text()) + cached)
    return free


def _numbers(path: Path) -> dict[str, int]:
    """The first number of every line, by the word before it."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
