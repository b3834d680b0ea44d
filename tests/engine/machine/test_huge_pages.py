"""Pages are joined without touching what lies on them."""

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.machine import host_memory as huge_pages
from engine.machine.host_memory import (
    use_huge_pages,
    use_huge_pages_soon,
    wait_for_huge_pages,
    whole_pages,
)

MADV_COLLAPSE = 25
MAPPINGS = """\
55e0c0a01000-55e0c4e00000 rw-p 00000000 00:00 0                          [heap]
7f0000100000-7f0000a00000 rw-p 00000000 00:00 0
7f0000b00000-7f0000cff000 rw-p 00000000 00:00 0
7f0001000000-7f0003000000 r--p 00000000 fe:00 1234      /models/a name.gguf
7f0004000000-7f0006000000 rw-p 00000000 fe:00 1235      /usr/lib/libx.so
7f0006000000-7f0008000000 rw-s 00000000 00:01 1236
7f0008000000-7f000a000000 ---p 00000000 00:00 0
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
"""


def huge_kib(address: int) -> int:
    """KiB of huge pages in the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, stop = (int(x, 16) for x in found.groups())
            inside = start <= address < stop
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    return 0


class Asked:
    """The system's `madvise`, with what was asked of it: address, bytes, advice and its answer."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self.asked: list[tuple[int, int, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def madvise(self, at: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
        answer = self._library.madvise(at, size, advice)
        self.asked.append((at.value or 0, size.value, advice, answer))
        return answer


def test_only_whole_pages_of_private_memory_are_taken() -> None:
    size = 2 << 20
    found = list(whole_pages(MAPPINGS.splitlines(), size))
    assert found == [(0x55E0C0C00000, 0x55E0C4E00000), (0x7F0000200000, 0x7F0000A00000)]


def test_contents_and_addresses_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    size_file = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    if not size_file.exists():
        pytest.skip("this system has no huge pages")
    size, system = int(size_file.read_text()), Asked()
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda _: system)
    x = torch.arange(16 << 20, dtype=torch.int32)
    address, end = x.data_ptr(), x.data_ptr() + x.nbytes
    use_huge_pages()
    assert x.data_ptr() == address
    assert torch.equal(x, torch.arange(16 << 20, dtype=torch.int32))
    of_x = [
        answer
        for start, n_bytes, advice, answer in system.asked
        if advice == MADV_COLLAPSE
        and start <= -(-address // size) * size
        and end // size * size <= start + n_bytes
    ]
    assert of_x
    if 0 not in of_x:
        pytest.skip("this system has none to give now, or is older than Linux 6.1")
    assert huge_kib(address) >= 60 << 10


def test_it_begins_later_but_at_once_when_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def still_wanted() -> bool:
        return True

    asked = []
    monkeypatch.setattr(huge_pages, "use_huge_pages", lambda wanted: asked.append(wanted))
    monkeypatch.setattr(huge_pages, "_WAIT_S", 3600.0)
    use_huge_pages_soon(still_wanted)
    assert not asked
    wait_for_huge_pages()
    assert asked == [still_wanted]
    assert not huge_pages._at_work
    monkeypatch.setattr(huge_pages, "_WAIT_S", 0.01)
    use_huge_pages_soon(still_wanted)
    for thread in list(huge_pages._at_work):
        thread.join()
    assert asked == [still_wanted] * 2
