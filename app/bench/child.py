"""Processes of their own for measurements that need a fresh one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from app.saved.folders import DATA_VARIABLE

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 300


def run_child(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module that prints one JSON object as its last line, with settings and data of its
    own. Raises RuntimeError with what it said when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "XDG_CONFIG_HOME": folder,
            DATA_VARIABLE: str(Path(folder) / "data"),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"{module} ended with status {done.returncode}: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
