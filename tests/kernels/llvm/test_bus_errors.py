"""The handler of bus errors: its own ranges read as zeros, everything else ends as before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bus errors are caught on Linux")
BEGIN = """
import ctypes, faulthandler, mmap, os, signal, sys, threading
from pathlib import Path
import numpy as np
from kernels.llvm.bus_errors import bus_errors

def mapped(name, n_pages=64):
    path = Path(sys.argv[1]) / name
    path.write_bytes(b"x" * n_pages * mmap.PAGESIZE)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8), path

handler = bus_errors()
if handler is None:
    sys.exit(77)
page = mmap.PAGESIZE
mine, path = mapped("mine")
number = handler.guard(mine.ctypes.data, len(mine))
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, str(folder)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == 77:
        pytest.skip("bus errors are not caught on this processor")
    return done


def test_pages_that_are_gone_read_as_zeros_in_every_thread(tmp_path: Path) -> None:
    script = """
other, _ = mapped("other")
second = handler.guard(other.ctypes.data, len(other))
assert handler.struck() == []
os.truncate(path, 7 * page + 5)
threads = [threading.Thread(target=lambda: mine[::-1].copy()) for _ in range(8)]
[each.start() for each in threads]
[each.join() for each in threads]
assert handler.struck() == [number] and handler.struck() == []
assert mine[: 7 * page + 5].all() and not mine[8 * page :].any()
assert other.all() and handler.struck() == []
handler.forget(number)
assert handler.guard(mine.ctypes.data, len(mine)) == number
sys.exit(5)
"""
    assert run(script, tmp_path).returncode == 5


@pytest.mark.parametrize("noted", ["", "faulthandler.enable()"])
@pytest.mark.parametrize(
    "strike",
    [
        "other, path = mapped('other'); os.truncate(path, 0); other[5]",
        "handler.forget(number); os.truncate(path, 0); mine[5]",
        "os.kill(os.getpid(), signal.SIGBUS)",
    ],
    ids=["another mapping", "forgotten", "sent"],
)
def test_what_is_not_guarded_ends_the_process_as_before(
    tmp_path: Path, strike: str, noted: str
) -> None:
    script = f"""
if {noted!r}:  # which the window does before it opens a model
    handler._library.sigaction(signal.SIGBUS, ctypes.byref(handler._previous), None)
    {noted or "pass"}
    handler.forget(handler.guard(mine.ctypes.data, len(mine)))
{strike}
sys.exit(5)
"""
    done = run(script, tmp_path)
    assert done.returncode == -7
    assert done.stderr.count("Fatal Python error: Bus error") == bool(noted)


def test_more_ranges_than_there_is_room_for_stay_unguarded(tmp_path: Path) -> None:
    script = """
numbers = [handler.guard((1 << 40) + i * page, page) for i in range(100)]
assert len(set(numbers)) == 64 and numbers[-1] is None
handler.forget(numbers[9])
assert handler.guard(1 << 41, page) == numbers[9]
sys.exit(5)
"""
    assert run(script, tmp_path).returncode == 5
