"""What would draw the same again draws nothing."""

from __future__ import annotations

import pytest
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.widgets import empty_state
from app.widgets.empty_state import StatusMessage
from app.widgets.round_plot import RoundPlot


def test_the_same_sentence_draws_its_icon_once(
    qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    make = empty_state.icon

    def count(name: str, *rest: object) -> object:
        drawn.append(name)
        return make(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(empty_state, "icon", count)
    message = StatusMessage(Theme("dark"))
    qtbot.addWidget(message)
    for severity, text in (("info", "a"), ("info", "a"), ("error", "a"), ("error", "b")):
        message.say(severity, text)
    message._theme.become("light")
    message.say("error", "b")
    assert drawn == ["info", "error", "error", "error"]


def test_axes_that_are_not_shown_follow_nothing(qtbot: QtBot) -> None:
    plot = RoundPlot(Theme("dark"), "y")
    qtbot.addWidget(plot)
    linked = {s: plot.getPlotItem().getAxis(s).linkedView() for s in ("top", "right", "left")}
    assert linked == {"top": None, "right": None, "left": plot.box}


def test_a_run_that_begins_lays_the_axis_out_once(
    qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = RoundPlot(Theme("dark"), "y")
    qtbot.addWidget(plot)
    plot.show_rounds(50)
    calls: list[int] = []
    show = plot.show_rounds
    monkeypatch.setattr(plot, "show_rounds", lambda n, f=0: (calls.append(n), show(n, f)))
    plot.begin_run()
    assert calls == [0]
    plot.set_pinned(True)
    plot.begin_run()
    assert calls[1:] == [0, 0]
