"""What was freed leaves the process."""

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from engine.machine.host_memory import give_back_memory

PIECES, PIECE_BYTES = 1000, 64 << 10


def resident_bytes(kind: str = "VmRSS:") -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("this system does not tell how much memory a process has")
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) << 10


def test_pieces_between_what_stays_are_given_back() -> None:
    # pieces too small for a mapping of their own, and what stays above them
    pieces = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in range(PIECES)]
    last = torch.ones(PIECE_BYTES, dtype=torch.uint8)
    del pieces
    before = resident_bytes()
    give_back_memory()
    assert before - resident_bytes() > PIECES * PIECE_BYTES // 2
    assert last.sum() == PIECE_BYTES


@pytest.mark.parametrize(
    ("name", "access", "leaves"),
    [
        ("library.so", mmap.PROT_READ | mmap.PROT_EXEC, True),
        ("program", mmap.PROT_READ | mmap.PROT_EXEC, True),
        ("library.so.1", mmap.PROT_READ, True),
        ("model.gguf", mmap.PROT_READ, False),
    ],
)
def test_pages_of_libraries_are_given_back_and_come_again(
    tmp_path: Path, name: str, access: int, leaves: bool
) -> None:
    code = bytes(range(256)) * (4 << 10)
    (tmp_path / name).write_bytes(code)
    give_back_memory()
    before = resident_bytes("RssFile:")
    with open(tmp_path / name, "rb") as file:
        mapped = mmap.mmap(file.fileno(), len(code), flags=mmap.MAP_PRIVATE, prot=access)
    assert mapped[:] == code
    give_back_memory()
    assert (resident_bytes("RssFile:") - before < len(code) // 2) is leaves
    assert mapped[:] == code


def test_code_that_was_written_to_stays(tmp_path: Path) -> None:
    (tmp_path / "library.so").write_bytes(bytes(mmap.PAGESIZE))
    with open(tmp_path / "library.so", "rb") as file:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=access)
    mapped[7] = 0xCC  # as a debugger stops a program
    place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
    access = mmap.PROT_READ | mmap.PROT_EXEC
    assert ctypes.CDLL(None).mprotect(place, mmap.PAGESIZE, access) == 0
    give_back_memory()
    assert mapped[7] == 0xCC


def test_a_process_that_has_not_grown_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back_memory()
    opened, read = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self: opened.append(self.name) or read(self))
    give_back_memory(64 << 20)
    assert opened == ["status"]
    held = torch.ones(80 << 20, dtype=torch.uint8)
    give_back_memory(64 << 20)
    assert "smaps" in opened and held.all()
