"""Without triton, and on systems other than Linux, as far as that can be seen on Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_every_module_is_imported_and_commands_run(system, tmp_path):
    trace, records = tmp_path / "trace", tmp_path / "records.jsonl"
    commands = [
        "info --demo",
        f"run --demo -p def -n 8 --spec-type draft-mtp --trace {trace}",
        f"export {trace} --aiperf {records}",
        f"import {ROOT / 'tests/data/captures/mtp.json.gz'}",
        f"memory {ROOT / 'resources/scenarios/memory/1-save-after-rollback.toml'} --demo",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.other_system", system, *commands],
        cwd=ROOT,
        env={**os.environ, "QT_QPA_PLATFORM": "offscreen"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "general.architecture" in done.stdout and "103 rounds, 232 tokens" in done.stdout
    assert (trace / "rounds.csv").is_file() and records.is_file()
