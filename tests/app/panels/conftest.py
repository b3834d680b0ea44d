"""A Run panel, and files of models for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pytestqt.qtbot import QtBot

from app.engine_thread.events import OpenedFiles
from app.panels.run_panel import RunPanel
from tests.support.fake_session import FakeInfo, FakeLayer


def files(*, mtp: bool, draft: bool) -> OpenedFiles:
    layers = (FakeLayer(0, "delta net"), FakeLayer(1, "mtp" if mtp else "attention"))
    info: Any = FakeInfo(layers=layers)
    drafts = ((Path("draft.gguf"), "draft-simple", info),) if draft else ()
    return OpenedFiles(Path("a.gguf"), drafts, info, {})


@pytest.fixture
def panel(qtbot: QtBot) -> RunPanel:
    panel = RunPanel()
    qtbot.addWidget(panel)
    panel.resize(320, 700)
    panel.show()
    panel.set_files(files(mtp=True, draft=True))
    panel.set_open_groups(["drafters", "sampling", "memory", "limits", "faults"])
    return panel
