"""A token area that shows a run, and a run with tokens of every kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.panels.tokens.token_area import TokenArea
from app.trace_models.token_stream import RunStreams
from tests.support.trace_builder import TraceBuilder

Shown = tuple[TokenArea, RunStreams]


@pytest.fixture(params=["light", "dark"])
def theme(request: pytest.FixtureRequest) -> Theme:
    return Theme(request.param)


@pytest.fixture
def show(qtbot: QtBot) -> Callable[..., Shown]:
    def make(
        builder: TraceBuilder, theme: Theme | None = None, width: int = 480, height: int = 200
    ) -> Shown:
        area = TokenArea(theme or Theme("dark"))
        qtbot.addWidget(area)
        area.resize(width, height)
        run = RunStreams(builder.run)
        while run.behind:
            run.poll()
        area.set_stream(run.by_seq[0])
        area.show()
        qtbot.waitExposed(area)
        finish(area)
        return area, run

    return make


def finish(area: TokenArea) -> None:
    """Let the area lay out everything."""
    QApplication.processEvents()
    while area._rows is not None and not area._rows.layout.complete:
        QApplication.processEvents()
    QApplication.processEvents()


def every_kind() -> TraceBuilder:
    builder = TraceBuilder()
    builder.prompt(["prompt"])
    builder.plain(" target")
    builder.draft([" accepted"], " replacement", [" rejected", " ignored"])
    builder.draft([], " bonus")
    builder.draft([" again"], " more", [" wrong"], path="restore")
    return builder
