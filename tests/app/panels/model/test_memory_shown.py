"""What the Model panel says of memory, and of an MTP block in a file of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytestqt.qtbot import QtBot

from app.engine_thread.events import OpenedFiles, OpenRequest
from app.engine_thread.opening import inspect_files
from app.looks import Theme
from app.panels.model.model_map import ModelMapView
from app.panels.run_panel import RunPanel
from engine.gguf.file import GgufFile
from engine.model.info import ModelInfo, describe
from engine.options import RunOptions, SpecOptions
from resources import DEMO_TARGET
from tests.support.shared_cases import case

MTP = RunOptions(spec=SpecOptions(types=("draft-mtp",), n_max=3), n_ctx=100)


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    with GgufFile.open(DEMO_TARGET) as file:
        return describe(file)


def test_the_panel_counts_loaded_weights(info: ModelInfo, qtbot: QtBot) -> None:
    view = ModelMapView(Theme("dark"), [])
    qtbot.addWidget(view)
    files: Any = OpenedFiles(Path("a.gguf"), (), info, {})
    view.set_files(files)
    stored = view._memory_title.text()
    view.set_compute("f32")
    assert view._memory_title.text() != stored
    view.set_files(files)
    assert view._memory_title.text() == stored


def test_the_panel_follows_the_options(info: ModelInfo, qtbot: QtBot) -> None:
    view = ModelMapView(Theme("dark"), [])
    qtbot.addWidget(view)
    files: Any = OpenedFiles(Path("a.gguf"), (), info, {})
    view.set_files(files)
    view.set_options(MTP, 1)
    one = dict(view.costs.lines)
    view.set_options(replace(MTP, parallel=4), 4)
    assert view.costs.lines["planes"].startswith(one["planes"].split(" = ")[0][:-1] + "4")
    view.set_options(replace(MTP, parallel=4), 1)
    assert view.costs.lines == one, "slots that no prompt fills cost nothing"
    view.set_options(RunOptions(), 1)
    assert view.costs.isHidden()


def test_an_mtp_file_is_opened_as_draft_model(qtbot: QtBot) -> None:
    folder = case("01-mtp-file-beside-trunk")
    request = OpenRequest(folder / "trunk.gguf", (folder / "mtp-only.gguf",), "auto")
    files = inspect_files(request)
    view, panel = ModelMapView(Theme("dark"), []), RunPanel()
    qtbot.addWidget(view)
    qtbot.addWidget(panel)
    view.set_files(files)
    view.set_options(MTP, 1)
    assert view.facts["draft"] == "mtp-only.gguf"
    assert "MTP head" in view._bars.accessibleDescription()
    assert "fits here" in view._fits.text() and "fits in llama-server" in view._fits.text()
    panel.set_files(files)
    assert panel.drafter.text() == "draft-mtp"
