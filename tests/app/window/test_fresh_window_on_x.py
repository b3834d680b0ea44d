"""The program as somebody starts it for the first time: on an X display, in a process of its own,
with keys and clicks that come from the server. Twice: the second start knows the first one's run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.x_display import lacking, x_display

ROOT = Path(__file__).parents[3]
SCREEN = (1280, 800)
PATIENCE = 300

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(lacking()), reason=lacking() or "there is an X server"),
]


def start(display: str, home: Path, story: str, *options: str) -> dict[str, Any]:
    """Start the program with a driver; what it saw until it ended by itself, without a warning."""
    out = home / f"{story}.json"
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("QT_", "XDG_", "WAYLAND_", "DRAFTSCOPE_DATA"))
    }
    environment |= {
        "DISPLAY": display,
        "QT_QPA_PLATFORM": "xcb",
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / "config"),
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_RUNTIME_DIR": str(home),
        "PYTHON_KEYRING_BACKEND": "keyring.backends.fail.Keyring",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.driven_window", story, str(out), *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    seen: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return seen


def test_a_first_start_and_a_second_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with x_display(*SCREEN) as display:
        first = start(display, tmp_path, "first", "--demo")
        second = start(display, tmp_path, "second")
    left, top, width, height = first["window"]
    assert first["screen"] == [0, 0, *SCREEN]
    assert left >= 0 and top >= 0 and left + width <= SCREEN[0] and top + height <= SCREEN[1]
    assert first["status"].startswith("demo-target") and first["status"].endswith("ready")
    assert first["plot_buttons"] == ["Plot menu: Memory", "Plot menu: Rollback depth"]
    assert first["end"] == "The run ended with an end token."
    assert "def test_" in first["text"], "the function and its test"
    assert first["plots_status"] and first["plots_height"] <= SCREEN[1]
    assert len(first["plots_buttons"]) == 3, "six plots in three panels"
    assert second == {"layout": "plots", "runs": 1, "status": True, "text": first["text"]}


def test_four_questions_are_answered_within_the_clicks_allowed(tmp_path: Path) -> None:
    """After Run: is my rollback right (1), what does it cost (no more), where is acceptance lost
    (2), show it to a colleague (2)."""
    pytest.importorskip("bokeh")
    tmp_path.chmod(0o700)
    with x_display(*SCREEN) as display:
        seen = start(display, tmp_path, "stopwatch", "--demo")
    assert "equal to plain decoding" in seen["audit"], "without a click"
    clicks, sentence = seen["right"]
    assert clicks <= 1 and "exact" in sentence
    clicks, sentence = seen["cost"]
    assert clicks == 0 and "the time" in sentence and "moved" in sentence
    assert seen["acceptance"] <= 2 and seen["share"] <= 2
    (page,) = tmp_path.glob("draftscope-session-*.html")
    assert page.stat().st_size > 100_000
