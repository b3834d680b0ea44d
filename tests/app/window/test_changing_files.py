"""A model file that is cut short in a run of the window, with its weights mapped or copied."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.window.window import MainWindow
from engine.analysis.findings.check import recorded
from resources import DEMO_DRAFT, DEMO_TARGET


def wait(qtbot: QtBot, window: MainWindow, state: State) -> None:
    qtbot.waitUntil(lambda: window.bridge.state is state, timeout=120_000)


def cut_in_a_run(window: MainWindow, qtbot: QtBot, path: Path, mmap: str) -> None:
    """Open a copy of the demo model, and cut it short while its run is paused."""
    shutil.copyfile(DEMO_TARGET, path)
    window.run_panel.mmap.setCurrentText(mmap)
    window.open_model(path)
    wait(qtbot, window, State.READY)
    window.run_panel.prompt.setPlainText("def add(a, b):")
    window.run_panel.n_predict.setValue(24)
    for _ in range(3):
        window.actions_by_id["run.step"].trigger()
        wait(qtbot, window, State.PAUSED)
    os.truncate(path, 0)
    window.actions_by_id["run.start"].trigger()
    wait(qtbot, window, State.READY)


@pytest.mark.skipif(sys.platform != "linux", reason="bus errors are caught on Linux")
def test_where_weights_are_mapped_the_run_ends_and_another_model_opens(
    make_window: Callable[[Bridge], MainWindow], qtbot: QtBot, tmp_path: Path
) -> None:
    window = make_window(Bridge())
    cut_in_a_run(window, qtbot, tmp_path / "cut.gguf", "yes")
    (said,) = [banner.message for banner in window.banners.banners]
    assert said == "cut.gguf: file: was cut short while its weights were mapped."
    store = window.bridge.session_store
    (facts,) = store.runs.values()
    assert facts["error"] == said and facts["mmap"] is True
    assert len(store.rounds) == 3, "what was recorded stays"
    assert "model-file-changed" in [one.rule for one in recorded(store)]
    window.actions_by_id["run.start"].trigger()  # the model is of no use any more
    qtbot.waitUntil(lambda: window.bridge.state is State.READY, timeout=120_000)
    assert "cut.gguf: file: has changed since it was opened." in [
        banner.message for banner in window.banners.banners
    ]
    window.open_model(DEMO_DRAFT)
    qtbot.waitUntil(
        lambda: window.bridge.state is State.READY and window.bridge.compute != ""
        and window.bridge.files is not None
        and window.bridge.files.target == DEMO_DRAFT,
        timeout=120_000,
    )  # fmt: skip
    with qtbot.waitSignal(window.bridge.run_ended, timeout=120_000):
        window.actions_by_id["run.start"].trigger()
    (facts,) = window.bridge.session_store.runs.values()
    assert facts["stops"] and "error" not in facts


def test_copied_weights_go_on_and_the_file_that_changed_is_named(
    make_window: Callable[[Bridge], MainWindow],
    qtbot: QtBot,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.decode.recorder.LOOK_S", 0.0)  # the run may be over before
    window = make_window(Bridge())
    cut_in_a_run(window, qtbot, tmp_path / "cut.gguf", "auto")
    store = window.bridge.session_store
    (facts,) = store.runs.values()
    assert "error" not in facts and facts["mmap"] is False
    assert [one.rule for one in recorded(store)].count("model-file-differs") == 1
    assert facts["file_changes"][0]["round"] in (3, 4)
