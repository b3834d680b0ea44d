"""Planted faults have something to be planted in, and one is caught by its campaign."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.listed import NAMES, campaign
from tests.torture.plants import PLANTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", PLANTS)
def test_it_can_be_planted(name: str) -> None:
    where, plant = PLANTS[name]
    assert where in NAMES and campaign(where).name == where
    child = os.fork()
    if not child:
        status = 1
        try:
            plant()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.repeats("test_torture_frame.py::test_every_planted_fault_is_found_and_made_small")
def test_one_is_caught() -> None:
    name = "a worker of templates is never reaped"
    command = [sys.executable, "-m", "tests.torture.plants", "--only", name, "--seeds", "1"]
    command += ["--minutes", "0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and f"{name}  seed 1" in done.stdout, done.stdout + done.stderr
