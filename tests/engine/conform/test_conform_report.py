"""The script that plays a fault again knows nothing of this program outside it."""

from __future__ import annotations

import subprocess
import sys

from app.__main__ import main
from tests.engine.conform.test_runner import ADAPTER


def test_the_script_shows_the_fault_of_another_place(tmp_path, capsys):
    path = tmp_path / "my_kernel.py"
    wrong = ADAPTER.replace("[n - 1]", "[max(0, n - 2)]").replace("BODY", "pass")
    path.write_text(wrong)
    script = tmp_path / "again.pyz"
    html = tmp_path / "out.html"
    arguments = ("conform", f"{path}:adapter", "--checks", "depths")
    assert main([*arguments, "--script", str(script), "--html", str(html)]) == 1
    assert "stale-column" in capsys.readouterr().out
    assert "Difference of the state" in html.read_text()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-P", str(script)]
    again = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert again.returncode == 1, again.stderr
    assert again.stdout.startswith("1 faults") or again.stdout.startswith("2 faults")
    assert "stale-column" in again.stdout
    assert "error by depth: " in again.stdout
    path.write_text(ADAPTER.replace("BODY", "pass"))
    mended = subprocess.run(
        [*command, f"{path}:adapter"], cwd=elsewhere, capture_output=True, text=True, check=False
    )
    assert mended.returncode == 0, mended.stdout + mended.stderr
