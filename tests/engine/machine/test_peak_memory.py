"""Peak of memory: of this process, and of another with what it has started."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from engine.machine.host_memory import forget_peak, peak_resident, resident_memory

MIB = 2**20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells it")


def test_a_peak_counts_until_it_is_forgotten() -> None:
    before = resident_memory() or 0
    np.ones(400 * MIB, np.uint8)  # more than what other tests left and is freed meanwhile
    assert peak_resident() > before + 190 * MIB
    if not forget_peak():
        pytest.skip("the system does not forget peaks here")
    assert peak_resident() < before + 100 * MIB


def test_a_child_counts_and_a_process_that_is_gone_is_nothing() -> None:
    held = "x = bytes(range(256)) * 2**19; print(flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}])"
    words, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as program:
        assert program.stdout is not None
        program.stdout.readline()
        assert 128 * MIB < peak_resident(program.pid) < 200 * MIB
    assert peak_resident(program.pid) == 0
