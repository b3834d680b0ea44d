"""Plots one under the other: one axis, equal edges; what is in sight of a run; pictures of them."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QPointF
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.panels.plots.round_view import RoundView
from app.window.plot_group import picture
from app.window.window import MainWindow
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.timed_trace import add_rounds, begin, timed_trace

STACK = ("rollback", "ring", "kv", "acceptance", "timing", "verify")


def edges(view: RoundView) -> tuple[float, float]:
    """Left and right end of what is drawn, in pixels of the window."""
    box = view.plot.box.sceneBoundingRect()
    ends = (view.plot.mapFromScene(QPointF(x, box.center().y())) for x in (box.left(), box.right()))
    left, right = (view.plot.mapTo(view.window(), end).x() for end in ends)
    return left, right


@pytest.mark.usefixtures("each_font")
@pytest.mark.parametrize(("width", "n_lines"), [(1024, 54), (1600, 71)])
@pytest.mark.thinned(8)
def test_in_the_stack_equal_rounds_stand_in_line_over_one_axis(
    window: MainWindow, qtbot: QtBot, width: int, n_lines: int
) -> None:
    size = width, n_lines * window.fontMetrics().height()
    window.resize(*size)
    window.actions_by_id["view.layout_plots"].trigger()
    store, _, run_id = timed_trace(60)
    window.feed.show_run(RunRef(store, run_id))
    views = [window.plots[name] for name in STACK if name != "ring"]  # it has no slots here
    last = window.plots["verify"]
    qtbot.waitUntil(lambda: [v.plot.has_axis for v in views] == [v is last for v in views])
    QApplication.processEvents()
    assert window.size().toTuple() == size, "the stack fits"
    assert len({edges(view) for view in views}) == 1
    assert not window.plots["acceptance"].rates.isVisible()
    legend = last.legend
    assert legend.heightForWidth(legend.width()) <= last.height()

    last.plot._move_to(0, 10)
    assert [v.plot._chip.isVisible() for v in views] == [v is last for v in views]

    shown = picture(window.plots["timing"], window.panels.theme)
    page = window.plots["timing"].page
    assert shown.height() > 2 * page.height(), "a caption is above it"
    assert not window.plots["timing"].plot.has_axis, "as before"
    window.actions_by_id["view.layout_stream"].trigger()
    window.docks.reveal("acceptance")
    window.resize(1600, 1000)
    qtbot.waitUntil(lambda: window.plots["acceptance"].plot.has_axis)


def test_what_is_empty_below_a_plot_does_not_take_its_axis(
    window: MainWindow, qtbot: QtBot
) -> None:
    window.actions_by_id["view.layout_stream"].trigger()
    store, _, run_id = timed_trace(60)
    window.feed.show_run(RunRef(store, run_id))
    rollback, ring = window.plots.rollback, window.plots["ring"]
    qtbot.waitUntil(lambda: rollback.in_sight and ring.in_sight and rollback.plot.has_axis)
    assert ring.currentWidget() is ring.empty, "it has no slots here"


@pytest.mark.shares_window
def test_a_short_run_fills_the_width_and_a_new_one_begins_anew(window: MainWindow) -> None:
    store, _, run_id = timed_trace(20)
    plot = window.plots.rollback.plot
    run = RunRef(store, run_id)
    store.runs[run_id]["stops"] = ["length"]
    window.feed.show_run(run)
    assert plot.x_range == pytest.approx((-0.5, 19.5))
    plot.box.setXRange(3, 9, padding=0)
    plot._on_moved_by_hand()
    other = begin(store, ("draft-mtp",))
    add_rounds(store, other, 0, 40)
    window.feed.show_run(RunRef(store, other))
    assert plot.x_range == pytest.approx((-0.5, 63.5)), "it goes on: there is room for more"

    plot.box.setXRange(3, 9, padding=0)
    window.actions_by_id["plot.pin"].setChecked(True)
    window.feed.show_run(run)
    assert plot.x_range == pytest.approx((3, 9))
    window.actions_by_id["plot.pin"].setChecked(False)
    window.feed.show_run(RunRef(store, other))
    assert plot.x_range == pytest.approx((-0.5, 63.5))


@pytest.mark.shares_window
def test_the_caption_names_plot_run_and_settings(window: MainWindow) -> None:
    from app.window.plot_group import PlotCaption

    store = TraceStore()
    options = {"rollback": "ring", "spec": {"types": ["draft-mtp"], "n_max": 3}}
    model = {"name": "tiny.gguf"}
    run_id = store.begin_run({"model": model, "options": options, "n_ctx": 512})
    view = window.plots["timing"]
    caption = PlotCaption(view.page, RunRef(store, run_id))
    assert caption.title == "Time per round"
    assert caption.lines[0] == f"tiny · run {run_id} · draft-mtp · ring"
    assert any("n_max 3" in line for line in caption.lines)


def test_a_stack_is_arranged_once_its_last_plot_has_been_made(
    window: MainWindow, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_way = list[bool]()

    def take_place(_view: RoundView, _width: int, *, has_axis: bool) -> None:
        on_the_way.append(window.docks.is_making())

    store, _, run_id = timed_trace(60)
    window.feed.show_run(RunRef(store, run_id))
    window.docks.reveal("rollback")
    QApplication.processEvents()
    monkeypatch.setattr(RoundView, "take_place", take_place)
    window.actions_by_id["view.layout_plots"].trigger()
    qtbot.waitUntil(lambda: len(on_the_way) > 2, timeout=20_000)
    assert not any(on_the_way)
