"""The handler of bus errors: its own ranges read as zeros, everything else ends as before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bus errors are caught on Linux")
HERE = """
page = mmap.PAGESIZE
mine, path = mapped("mine")
number = handler.guard(mine.ctypes.data, len(mine))
"""
GONE = """
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
"""
MANY = """
numbers = [handler.guard((1 << 40) + i * page, page) for i in range(100)]
assert len(set(numbers)) == 64 and numbers[-1] is None
handler.forget(numbers[9])
assert handler.guard(1 << 41, page) == numbers[9]
"""
STRIKES = {
    "another mapping": "other, path = mapped('other'); os.truncate(path, 0); other[5]",
    "forgotten": "handler.forget(number); os.truncate(path, 0); mine[5]",
    "sent": "os.kill(os.getpid(), signal.SIGBUS)",
}
# what the window does before it opens a model
NOTED = """
handler._library.sigaction(signal.SIGBUS, ctypes.byref(handler._previous), None)
faulthandler.enable()
handler.forget(handler.guard(mine.ctypes.data, len(mine)))
"""
SCRIPTS = {
    "gone": HERE + GONE,
    "many": HERE + MANY,
    **{name: HERE + strike for name, strike in STRIKES.items()},
    **{f"{name}, noted": HERE + NOTED + strike for name, strike in STRIKES.items()},
}
# plays each script in a fork of its own: the imports take longer than all of them
PLAYER = """
import ctypes, faulthandler, json, mmap, os, signal, sys, threading, traceback
from pathlib import Path
import numpy as np
from kernels.llvm.bus_errors import bus_errors

def mapped(name, n_pages=64):
    path = Path(name)
    path.write_bytes(b"x" * n_pages * mmap.PAGESIZE)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8), path

scripts, ends = json.load(sys.stdin), {}
handler = bus_errors()
if handler is None:
    sys.exit(77)
for number, (name, script) in enumerate(scripts.items()):
    folder = Path(sys.argv[1]) / str(number)
    folder.mkdir()
    child = os.fork()
    if not child:
        os.chdir(folder)
        os.dup2(os.open("said", os.O_CREAT | os.O_WRONLY, 0o600), 2)
        try:
            exec(script)
            os._exit(5)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ends[name] = status, (folder / "said").read_text()
print(json.dumps(ends))
"""


class End(NamedTuple):
    """How a script ended: its exit status, or minus a signal; what it wrote to stderr."""

    status: int
    said: str


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    done = subprocess.run(
        [sys.executable, "-c", PLAYER, str(tmp_path_factory.mktemp("bus"))],
        cwd=Path(__file__).parents[3],
        input=json.dumps(SCRIPTS),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("bus errors are not caught on this processor")
    assert done.returncode == 0, done.stderr
    return {name: End(*end) for name, end in json.loads(done.stdout).items()}


def test_pages_that_are_gone_read_as_zeros_in_every_thread(ends: dict[str, End]) -> None:
    assert ends["gone"] == (5, "")


@pytest.mark.parametrize("strike", STRIKES)
def test_what_is_not_guarded_ends_the_process_as_before(ends: dict[str, End], strike: str) -> None:
    assert ends[strike] == (-7, "")
    status, said = ends[f"{strike}, noted"]
    assert (status, said.count("Fatal Python error: Bus error")) == (-7, 1)


def test_more_ranges_than_there_is_room_for_stay_unguarded(ends: dict[str, End]) -> None:
    assert ends["many"] == (5, "")
