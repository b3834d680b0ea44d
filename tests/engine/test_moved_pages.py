"""Stretches of a mapped file get huge pages of the process's own without anybody noticing."""

import ctypes
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from engine import moved_pages
from engine.moved_pages import available_memory, move_to_huge_pages, whole_stretches
from tests.engine.test_huge_pages import huge_kib, joins_pages

SIZE = 2 << 20
N_BYTES = 41 * SIZE + 12345
linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux")


def view_at(start: int, stop: int) -> np.ndarray:
    """Bytes of this process, never read here."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (stop - start)).from_address(start))


@pytest.fixture
def mapped(tmp_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A file of random bytes, mapped, and what it holds."""
    content = np.random.default_rng(5).integers(0, 256, N_BYTES, np.uint8)
    path = tmp_path / "model.gguf"
    path.write_bytes(content.tobytes())
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(data, np.uint8), content


@linux
def test_bytes_and_addresses_stay_and_the_pages_are_huge(
    mapped: tuple[np.ndarray, np.ndarray],
) -> None:
    view, content = mapped
    address = view.ctypes.data
    moved = move_to_huge_pages([view], SIZE, lambda: True)
    if moved == 0:
        pytest.skip("no huge pages, or too little memory")
    assert 40 * SIZE <= moved <= 41 * SIZE
    assert view.ctypes.data == address
    assert np.array_equal(view, content)
    if joins_pages():
        assert huge_kib(-(-address // SIZE) * SIZE) > 0


@linux
def test_what_lies_beside_the_views_stays_in_the_file(
    mapped: tuple[np.ndarray, np.ndarray],
) -> None:
    view, content = mapped
    parts = [view[: 5 * SIZE], view[20 * SIZE : 30 * SIZE + 7]]
    assert move_to_huge_pages(parts, SIZE, lambda: True) <= 15 * SIZE
    assert np.array_equal(view, content)
    (beside,) = (x for x in lines_of(view.ctypes.data + 10 * SIZE) if "model.gguf" in x)
    assert " r--" in beside


def lines_of(address: int) -> list[str]:
    """The mapping that holds an address."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(x, 16) for x in line.split()[0].split("-"))
        if start <= address < stop:
            found.append(line)
    return found


@linux
def test_readers_see_the_same_bytes_all_the_time(mapped: tuple[np.ndarray, np.ndarray]) -> None:
    view, content = mapped
    words, expected = view[: 40 * SIZE].view(np.int64), content[: 40 * SIZE].view(np.int64).sum()
    done, wrong = threading.Event(), []

    def read() -> None:
        while not done.is_set():
            if words.sum() != expected:
                wrong.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(5):  # what was moved can be moved again
            move_to_huge_pages([view], SIZE, lambda: True)
    finally:
        done.set()
        reader.join()
    assert not wrong


@linux
def test_it_ends_when_the_weights_are_not_wanted(mapped: tuple[np.ndarray, np.ndarray]) -> None:
    view, content = mapped
    if move_to_huge_pages([view], SIZE, lambda: True) == 0:
        pytest.skip("no huge pages, or too little memory")
    answers = iter([True, False])
    assert move_to_huge_pages([view], SIZE, lambda: next(answers)) == 16 * SIZE
    assert np.array_equal(view, content)


def test_nothing_is_moved_where_memory_would_get_short(
    mapped: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    view, content = mapped
    monkeypatch.setattr(moved_pages, "available_memory", lambda: 2 * 40 * SIZE - 1)
    assert move_to_huge_pages([view], SIZE, lambda: True) == 0
    assert np.array_equal(view, content)


def test_stretches_are_whole_pages_of_joined_neighbours() -> None:
    base = 0x7F0000000000
    views = [
        view_at(base + 3 * SIZE, base + 5 * SIZE + 10),
        view_at(base + 100, base + SIZE + SIZE // 2),
        view_at(base + SIZE + SIZE // 2 + 32, base + 2 * SIZE + 1),
        view_at(base + 6 * SIZE - 5, base + 7 * SIZE - 1),
    ]
    assert list(whole_stretches(views, SIZE)) == [
        (base + SIZE, base + 2 * SIZE),
        (base + 3 * SIZE, base + 5 * SIZE),
    ]


def test_a_group_with_a_limit_leaves_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, group = tmp_path / "meminfo", tmp_path / "cgroup"
    memory.write_text("MemTotal: 8000 kB\nMemAvailable:    4000 kB\n")
    group.write_text("0::/a/b\n")
    groups = tmp_path / "groups"
    (groups / "a" / "b").mkdir(parents=True)
    (groups / "a" / "b" / "memory.max").write_text("max\n")
    (groups / "a" / "memory.max").write_text("3000000\n")
    (groups / "a" / "memory.current").write_text("1000000\n")
    monkeypatch.setattr(moved_pages, "_MEMORY", memory)
    monkeypatch.setattr(moved_pages, "_GROUP", group)
    assert available_memory() == 4000 * 1024
    monkeypatch.setattr(moved_pages, "_GROUPS", groups)
    assert available_memory() == 2000000
    memory.unlink()
    assert available_memory() == 0
