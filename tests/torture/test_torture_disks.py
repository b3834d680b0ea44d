"""Disks of a case get full, take no more files, become read-only or go, and are well again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture import disks

ROOT = Path(__file__).resolve().parents[2]
_PLAY = """
import sys
from pathlib import Path
from tests.torture import disks
folder = Path(sys.argv[1])
def written(name, n):
    try:
        (folder / name).write_bytes(bytes(n))
    except OSError as error:
        return error.errno
    return 0
with disks.disk(folder):
    for kind, n in zip(disks.KINDS, (2, 1, 0, 0)):
        written(f"{kind} before", 9999)
        disks.strike(kind, folder, n)
        said = [written(f"{kind} {i}", 4096) for i in range(3)]
        disks.heal(kind, folder)
        print(*said, written(f"{kind} after", 9999), len(list(folder.iterdir())))
print(list(folder.iterdir()))
"""
_EXPORT = """
import sys
from pathlib import Path
from tests.torture import disks
from tests.torture.campaigns.kill import CAMPAIGN
for kind in disks.KINDS:
    folder = Path(sys.argv[1]) / kind
    folder.mkdir()
    strike = {"how": kind, "at": -1, "is_behind": False, "n_bytes": 0}
    print(CAMPAIGN.play({"subject": "export", "strike": strike, "is_first": False}, folder))
"""


@pytest.fixture(autouse=True)
def _needs_mounts() -> None:
    why = disks.why_none()
    if why:
        pytest.skip(f"nothing can be mounted here: {why}")


def test_a_disk_is_struck_and_well_again(tmp_path: Path) -> None:
    done = _python(_PLAY, tmp_path)
    assert done.stderr == ""
    assert done.stdout.split("\n") == [
        "0 0 28 0 5",
        "0 28 28 0 8",
        "30 30 30 0 10",
        "30 30 30 0 12",
        "[]",
        "",
    ]
    assert not os.path.ismount(tmp_path)


def test_an_export_is_refused_by_every_bad_disk(tmp_path: Path) -> None:
    done = _python(_EXPORT, tmp_path)
    assert done.stderr == ""
    refused = "{'export': 1, 'refused': 1, 'disks': 1}"
    assert done.stdout.splitlines() == [refused] * len(disks.KINDS)


def _python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
