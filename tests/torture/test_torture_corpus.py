"""What failed once in a campaign holds now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture import corpus
from tests.torture.listed import NAMES

ROOT = Path(__file__).resolve().parents[2]


def test_the_corpus_holds(request: pytest.FixtureRequest) -> None:
    """Every second case, with --all each. None is of a stall, which a busy machine has, too."""
    files = sorted(corpus.FOLDER.glob("*.json"))
    assert files and {corpus.load(path).campaign for path in files} <= set(NAMES)
    files = files if request.config.getoption("all") else files[::2]
    command = [sys.executable, "-m", "tests.torture", "--any-pace", "--replay", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
