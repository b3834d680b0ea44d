"""The tests of the Triton kernels in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "with_triton"

pytest.importorskip("triton")


def test_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", str(FOLDER)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "DRAFTSCOPE_KERNELS": "triton"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    # one line of counts: had a test been skipped, it would say more
    counts = r"^[1-9]\d* passed(, \d+ deselected)? in"
    assert re.search(counts, done.stdout, re.MULTILINE), done.stdout[-2000:]
