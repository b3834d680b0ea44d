"""The plots on the real window: numbers drawn, one axis, one cursor, few points, pictures."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QGuiApplication, QImage
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import QApplication, QFileDialog
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.looks import FocusFrame, Theme
from app.panels.plots.acceptance_view import AcceptanceView
from app.panels.plots.bar_view import StackedBars
from app.panels.plots.memory_views import KvCellsView
from app.panels.plots.round_view import RoundView
from app.panels.plots.timing_view import NO_BASELINE, TimingView
from app.panels.plots.verify_width_view import VerifyWidthView
from app.trace_models.run_rows import Position
from app.window.plot_group import OVER_ROUNDS, picture, write_plot
from app.window.window import MainWindow
from engine.errors import TraceFileError
from engine.trace.records import MISSING, PHASES
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.timings import acceptance
from tests.support.fake_session import FakeEngine
from tests.support.timed_trace import add_rounds, timed_trace
from tests.support.trace_builder import TraceBuilder
from tests.support.window_acts import settle

pytestmark = pytest.mark.shares_window

BOTTOM = ("memory", "speed")


@pytest.fixture
def make(qtbot: QtBot) -> Callable[[type[RoundView]], RoundView]:
    def make_view(kind: type[RoundView]) -> RoundView:
        view = kind(Theme("dark"))  # type: ignore[call-arg, arg-type]
        qtbot.addWidget(view)
        view.resize(900, 200)
        view.show()
        qtbot.waitExposed(view)
        return view

    return make_view


def filled(window: MainWindow, rounds: int = 60) -> tuple[TraceStore, int]:
    store, _, run_id = timed_trace(rounds)
    window.feed.show_run(RunRef(store, run_id))
    return store, run_id


def bars(stack: StackedBars) -> list[dict[float, float]]:
    """Heights of each part by the middle of the bar."""
    found = []
    for item in stack.items:
        x = (np.asarray(item.opts["x0"]) + np.asarray(item.opts["x1"])) / 2
        heights = np.asarray(item.opts["height"]).tolist()
        found.append(dict(zip(np.round(x, 6).tolist(), heights, strict=True)))
    return found


def n_points(view: RoundView) -> int:
    """Points and bars that the view has given to the plot."""
    total = 0
    for item in view.plot.getPlotItem().items:
        if hasattr(item, "opts") and "x0" in getattr(item, "opts", {}):
            x0 = item.opts["x0"] if item.opts["x0"] is not None else item.opts["x"]
            total += len(x0)
        elif hasattr(item, "getData"):
            x, _ = item.getData()
            total += 0 if x is None else len(x)
        elif hasattr(item, "image") and item.image is not None:
            total += item.image.shape[1]
    return total


def test_time_is_stacked_by_phase(make: Callable[[type[RoundView]], RoundView]) -> None:
    store, _, run_id = timed_trace(60, n_seqs=2)
    view = make(TimingView)
    view.show_run(RunRef(store, run_id))
    mine = (store.rounds.column("run_id") == run_id) & (store.rounds.column("round") == 12)
    *phases, whole = bars(view._bars)  # type: ignore[attr-defined]
    assert not len(whole), "every round has its phases"
    for phase, heights in zip(PHASES, phases, strict=True):
        expected = store.rounds.column(f"{phase}_ms")[mine].sum()
        assert heights.get(12.0, 0.0) == pytest.approx(expected)
    assert "replay 9.00 ms" in view.plot.tip(12.0, 1.0)


def test_the_speed_up_is_that_of_measured_pairs(
    make: Callable[[type[RoundView]], RoundView],
) -> None:
    store, _, run_id = timed_trace(60)
    view = make(TimingView)
    assert isinstance(view, TimingView)
    view.show_run(RunRef(store, run_id))
    assert view.legend.labels[0] == NO_BASELINE, "another run measures nothing"
    assert not view._plain.isVisible()
    assert "Measure plain" in view.legend.entry_tip(0)
    store.runs[run_id].plain_pairs = [(12.0, 10.0), (15.0, 10.0), (11.0, 10.0)]
    view.plain_measured()
    assert view.legend.labels[0] == "1.10 to 1.50×"
    assert view._plain.isVisible() and view._plain.value() == 100.0


def test_acceptance_says_what_the_engine_says(make: Callable[[type[RoundView]], RoundView]) -> None:
    store, _, run_id = timed_trace(80)
    view = make(AcceptanceView)
    assert isinstance(view, AcceptanceView)
    view.show_run(RunRef(store, run_id))
    figures = acceptance(store, run_id)
    _, lifetime = view._lifetime.getData()
    assert lifetime[-1] == pytest.approx(figures["draft_acceptance_rate"])
    last = slice(-16, None)
    _, windowed = view._windowed.getData()
    assert windowed[-1] == pytest.approx(
        sum(figures["per_step_accepted"][last]) / sum(figures["per_step_drafted"][last])
    )
    for name, rates in figures["acceptance_per_position"].items():
        _, y = view.rates.curves[name].getData()
        assert y.tolist() == pytest.approx([rate for rate in rates if rate is not None])
    assert "conditional" in view.rates.accessibleDescription()
    assert "4 drafted" in view.histogram.accessibleDescription()
    for table in ("token class", "context depth", "after"):
        assert f"{table}: " in view.rates.tip(0.0, 0.5)


def test_ubatches_show_padding_and_the_reason(make: Callable[[type[RoundView]], RoundView]) -> None:
    store, _, run_id = timed_trace(60, n_seqs=2)
    view = make(VerifyWidthView)
    view.show_run(RunRef(store, run_id))
    _prompt, verify, replay, padding = bars(view._bars)  # type: ignore[attr-defined]
    mine = (store.ubatches.column("run_id") == run_id) & (store.ubatches.column("round") == 13)
    (row,) = np.flatnonzero(mine).tolist()
    facts = store.ubatches.row(row)
    assert padding[13.0] == facts["n_padding"] > 0
    assert verify[13.0] == 2 * facts["n_seq_tokens"] - facts["n_padding"]
    assert 12.0 in replay
    tip = view.plot.tip(12.0, 1.0)
    assert "verify: 2 × " in tip and "replay: 1 × 2 tokens · end of batch" in tip


def test_the_longest_draft_of_adaptive_depth_is_a_line(
    make: Callable[[type[RoundView]], RoundView],
) -> None:
    store, _, run_id = timed_trace(60)
    rounds = store.rounds
    mine = np.flatnonzero(rounds.column("run_id") == run_id)
    longest = 2 + np.arange(len(mine)) % 7
    longest[:20] = MISSING
    rounds.fill(mine, {"draft_n_max": longest})
    view = make(VerifyWidthView)
    view.show_run(RunRef(store, run_id))
    x, y = view._longest.getData()  # type: ignore[attr-defined]
    number = rounds.column("round")[mine]
    drawn = dict(zip(((x[::2] + x[1::2]) / 2).tolist(), y[::2].tolist(), strict=True))
    assert drawn == dict(zip(number[20:].tolist(), (longest[20:] + 1.0).tolist(), strict=True))
    assert f"n_max + 1: {longest[-1] + 1}" in view.legend.labels
    assert f"n_max {longest[30]} by adaptive depth" in view.plot.tip(float(number[30]), 1.0)
    plain = make(VerifyWidthView)
    plain.show_run(RunRef(*timed_trace(60)[::2]))
    assert "n_max + 1" in plain.legend.labels and "adaptive" not in plain.plot.tip(30.0, 1.0)


def test_duplicate_cells_are_marked(make: Callable[[type[RoundView]], RoundView]) -> None:
    store, _, run_id = timed_trace(60)
    view = make(KvCellsView)
    view.show_run(RunRef(store, run_id))
    used, twice = bars(view._bars)  # type: ignore[attr-defined]
    assert set(twice) == {33.0}
    x, _ = view._signs.getData()  # type: ignore[attr-defined]
    assert x.tolist() == [33.0]
    held = store.rounds.column("kv_cells_used")[store.rounds.column("run_id") == run_id]
    assert used[20.0] == held[20]
    assert "3 duplicates" in view.plot.tip(33.0, 1.0)


def test_a_long_run_is_drawn_with_as_many_points_as_pixels(window: MainWindow) -> None:
    window.resize(1280, 800)
    store, _, run_id = timed_trace(2)
    add_rounds(store, run_id, 2, 100_000)
    window.feed.show_run(RunRef(store, run_id))
    parts = {"acceptance": 2, "timing": len(PHASES) + 1, "verify": 5, "kv": 3, "rollback": 4}
    for unit in ("round", "token", "time"):
        window.actions_by_id[f"plot.x_{unit}"].trigger()
        window.actions_by_id["plot.show_all"].trigger()
        for name, n_parts in parts.items():
            window.docks.reveal(name)
            for _ in range(2):  # for a plot that is made now, then for its place in the stack
                QApplication.processEvents()
            view = window.plots[name]
            first, stop = view.plot.rounds_in_sight
            assert stop - first == 100_000
            view.refresh()
            assert 100 < n_points(view) <= n_parts * view.plot.n_pixels, (name, unit)


def test_a_plot_behind_another_tab_draws_when_it_comes_to_the_front(
    window: MainWindow, qtbot: QtBot
) -> None:
    window.resize(1280, 800)
    window.docks.reveal("ring")
    QApplication.processEvents()
    filled(window)
    view = window.plots["kv"]
    assert n_points(view) == 0
    window.docks.reveal("kv")
    qtbot.waitUntil(lambda: n_points(view) > 0)


def test_behind_another_tab_nothing_is_read_until_it_comes_to_the_front(
    window: MainWindow, qtbot: QtBot
) -> None:
    window.resize(1280, 800)
    window.docks.reveal("ring")
    QApplication.processEvents()
    store, run_id = filled(window)
    timing, estimate = window.plots["timing"], window.plots["what_if"]
    before = [timing.plot.n_rounds, estimate.note.text(), estimate.headline.text()]
    add_rounds(store, run_id, 60, 90)
    window.feed.refresh()
    qtbot.waitUntil(lambda: window.plots.rollback.plot.n_rounds == 90)
    shown = [timing.plot.n_rounds, estimate.note.text(), estimate.headline.text()]
    assert shown == before
    window.docks.reveal("timing")
    qtbot.waitUntil(lambda: timing.plot.n_rounds == 90)
    window.docks.reveal("what_if")
    qtbot.waitUntil(lambda: estimate.headline.text() != before[2])


def test_a_plot_made_late_shows_what_the_others_show(
    make_window: Callable[[Bridge], MainWindow], engine: FakeEngine, qtbot: QtBot
) -> None:
    window = make_window(Bridge(engine))
    window.resize(1280, 800)
    filled(window, 300)
    window.appearance.set_theme("dark")
    window.feed.move_cursor(Position(window.feed.run, 0, 200, None))
    window.actions_by_id["plot.x_time"].trigger()
    first = window.plots.rollback
    for _ in range(2):
        qtbot.keyClick(first.plot, Qt.Key.Key_W)
    window.actions_by_id["plot.pin"].trigger()
    assert list(window.plots.views) == ["rollback", "ring"] and not window.plots.whole
    in_sight = first.plot.x_range
    window.docks.reveal("timing")
    late = window.plots.views["timing"]
    qtbot.waitUntil(lambda: n_points(late) > 0)
    for view in (first, late):
        assert view.plot.x_range == pytest.approx(in_sight)
        assert view.plot.cursor_line.value() == first.plot.run_axis.centre(200)
        assert "round 200" in view.plot.getPlotItem().getAxis("bottom").labelString()
        assert view.plot._theme.name == "dark" and view.plot.pinned and not view.plot.follow
        assert view.plot.menu is window.plots.menu
    qtbot.keyClick(late.plot, Qt.Key.Key_D)
    assert first.plot.x_range == late.plot.x_range != pytest.approx(in_sight)
    clicked = []
    late.position_selected.connect(lambda position: clicked.append(position.round))
    qtbot.keyClick(late.plot, Qt.Key.Key_Right)
    assert clicked == [201] and window.feed.cursor.round == 201
    second = timed_trace(1)[0]
    window.feed.show_run(RunRef(second, max(second.runs)))
    assert late.run == first.run == window.feed.run


def test_one_switch_changes_the_unit_of_all_plots(window: MainWindow) -> None:
    filled(window)
    views = [window.plots[name] for name in OVER_ROUNDS]
    before = views[0].plot.rounds_in_sight
    for unit, label in (("token", "emitted tokens"), ("time", "time, s"), ("round", "round")):
        window.actions_by_id[f"plot.x_{unit}"].trigger()
        for view in views:
            assert label in view.plot.getPlotItem().getAxis("bottom").labelString()
            assert view.plot.x_range == pytest.approx(views[0].plot.x_range)
    assert views[0].plot.rounds_in_sight == before


def test_all_plots_share_cursor_pan_and_reset(window: MainWindow, qtbot: QtBot) -> None:
    filled(window, 300)
    window.actions_by_id["plot.x_time"].trigger()
    window.feed.move_cursor(Position(window.feed.run, 0, 200, None))
    views = [window.plots[name] for name in OVER_ROUNDS]
    centre = views[0].plot.run_axis.centre(200)
    assert {view.plot.cursor_line.value() for view in views} == {centre}
    qtbot.keyClick(views[2].plot, Qt.Key.Key_A)
    ranges = {tuple(np.round(view.plot.x_range, 6)) for view in views}
    assert len(ranges) == 1
    assert not any(view.plot.follow for view in views)
    window.docks.reveal("rollback")
    QApplication.processEvents()
    plot = views[0].plot
    spot = plot.mapFromScene(plot.box.mapViewToScene(QPointF(sum(plot.x_range) / 2, 1.0)))
    for act in (qtbot.mouseClick, qtbot.mouseDClick, qtbot.mouseRelease):
        act(plot.viewport(), Qt.MouseButton.LeftButton, pos=QPoint(spot))
    assert all(view.plot.follow for view in views)
    assert plot.x_range[1] == pytest.approx(plot.run_axis.start(300))


def test_the_docks_are_tabs_below(window: MainWindow) -> None:
    together = window.tabifiedDockWidgets(window.docks["memory"])
    assert set(together) == {window.docks[name] for name in BOTTOM[1:]}
    window.docks["speed"].setFloating(True)
    window.actions_by_id["view.reset_layout"].trigger()
    assert set(window.tabifiedDockWidgets(window.docks["memory"])) == set(together)


def test_what_if_names_the_best(window: MainWindow, qtbot: QtBot) -> None:
    window.docks.reveal("what_if")
    QApplication.processEvents()
    view = window.plots["what_if"]
    assert not view.has_rounds
    filled(window)
    assert view.has_rounds
    qtbot.waitUntil(lambda: view.table_widget.model().rowCount() == 5)
    names, rows = view.table()
    speeds = [row[names.index("tokens_per_second")] for row in rows]
    assert speeds[0] is None, "passes of one token were timed too seldom"
    best = int(np.nanargmax(np.array(speeds, float)))
    assert view.headline.text().startswith(f"Highest estimate, no verdict: n_max {best}: ")
    assert " · estimate from " in view.headline.text()
    assert view.table_widget.model().index(best, 0).data() == str(best)
    assert "the mean measured cost for their length" in view.note.text()


def test_export_as_picture_drawing_and_table(
    window: MainWindow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qtbot: QtBot
) -> None:
    window.appearance.set_theme("dark")
    window.docks.reveal("timing")
    QApplication.processEvents()
    store, run_id = filled(window)
    view = window.plots["timing"]
    window.activateWindow()
    view.plot.setFocus()
    qtbot.waitUntil(lambda: bool(view.plot.findChildren(FocusFrame)))
    monkeypatch.setattr(window.plots, "chosen", lambda: view)
    for name, kind in (("a.png", ""), ("b.svg", ""), ("c", "CSV of the visible part (*.csv)")):
        answer = (str(tmp_path / name), kind)
        monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_a, _b=answer, **_k: _b)
        window.actions_by_id["plot.export"].trigger()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["a.png", "b.svg", "c.csv"]
    image, light = QImage(str(tmp_path / "a.png")), Theme("light")
    assert image.width() == 2 * max(view.page.width(), 640)
    assert image.pixelColor(3, 3) == light.color("plot.background")
    colours = {
        image.pixelColor(x, y).name()
        for x in range(0, image.width(), 3)
        for y in range(0, image.height(), 3)
    }
    assert light.color("phase.verify").name() in colours
    assert view.plot.findChildren(FocusFrame)[0].isVisible()
    window.setFocus()
    qtbot.waitUntil(lambda: not view.plot.findChildren(FocusFrame))
    assert picture(view, window.panels.theme).convertToFormat(image.format()) == image
    size = view.page.size()
    view.page.resize(200, 60)
    assert picture(view, window.panels.theme).width() == 2 * 640, "of a narrow dock"
    assert view.page.size().toTuple() == (200, 60)
    view.page.resize(size)
    assert QSvgRenderer(str(tmp_path / "b.svg")).isValid()
    assert view.plot._theme.name == "dark"
    with (tmp_path / "c.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    first, stop = view.plot.rounds_in_sight
    assert [int(row["round"]) for row in rows] == list(range(first, stop))
    mine = store.rounds.column("run_id") == run_id
    assert float(rows[5]["verify_ms"]) == pytest.approx(store.rounds.column("verify_ms")[mine][5])

    QGuiApplication.clipboard().clear()
    window.actions_by_id["plot.copy_image"].trigger()
    assert QGuiApplication.clipboard().image().size() == image.size()
    assert window.status.currentMessage() == "Copied"
    view.plot._move_to(0, 4)
    assert view.plot._chip.isVisible(), "over what is shown, not over what is exported"
    copied = picture(view, window.panels.theme)
    assert view.plot._chip.isVisible()
    view.plot._chip.hide()
    assert picture(view, window.panels.theme) == copied
    with pytest.raises(TraceFileError, match="cannot be written"):
        write_plot(view, tmp_path / "no" / "x.csv", window.panels.theme)

    before = {path.name: path.read_bytes() for path in tmp_path.glob("?.*")}
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda _: os.open(tmp_path, os.O_WRONLY))  # any OSError
        for name in before:
            with pytest.raises(TraceFileError, match="cannot be written"):
                write_plot(view, tmp_path / name, window.panels.theme)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("?.*")} == before
    (tmp_path / "link.svg").symlink_to("b.svg")
    write_plot(view, tmp_path / "link.svg", window.panels.theme)
    assert (tmp_path / "link.svg").is_symlink()


def test_every_plot_has_a_table_and_words(window: MainWindow) -> None:
    filled(window)
    for name in OVER_ROUNDS:
        if name == "ring":
            continue  # this trace has no slots
        view = window.plots[name]
        columns, rows = view.table()
        assert len(rows) >= 50 and {len(row) for row in rows} == {len(columns)}
        assert view.plot.accessibleName() and "rounds: 60" in view.plot.accessibleDescription()


def test_a_run_that_has_ended_is_shown_whole(window: MainWindow, qtbot: QtBot) -> None:
    """Plots out of sight, which know of no rounds yet, change nothing about that."""
    store, _, run_id = timed_trace(300)
    run = RunRef(store, run_id)
    assert not run.ended
    for name in ("ring", "acceptance", "timing", "ring"):
        window.docks.reveal(name)
        QApplication.processEvents()
    window.feed.show_run(run)
    settle(qtbot)
    plots = [window.plots[name].plot for name in ("rollback", "ring")]
    assert all(plot.x_range[0] > 200 for plot in plots), "a run goes on: its newest rounds"
    store.runs[run_id].stops = ["limit"]
    window.feed.show_run(None)
    window.feed.show_run(run)
    settle(qtbot)
    axis = plots[0].run_axis
    assert all(plot.x_range == (axis.start(0), axis.start(300)) for plot in plots)


def test_a_drawing_has_symbols_as_shapes_and_a_table_its_light_rows(
    window: MainWindow, tmp_path: Path
) -> None:
    window.appearance.set_theme("dark")
    for name in ("rollback", "what_if"):
        window.docks.reveal(name)
        QApplication.processEvents()
    builder = TraceBuilder()
    builder.prompt(["p"])
    for _ in range(4):
        builder.draft([], "d", ["x"], path="refused")
    window.feed.show_run(builder.run)
    view = window.plots.rollback
    view.show_run(builder.run)
    for _ in range(2):
        write_plot(view, tmp_path / "a.svg", window.panels.theme)
        assert (tmp_path / "a.svg").read_text().count("<image") == 1, "the background alone"
    filled(window)
    table = window.plots["what_if"]
    window.docks.reveal("what_if")
    assert table.has_rounds
    image = picture(table, window.panels.theme)
    across, down = range(0, image.width(), 3), range(0, image.height(), 3)
    shades = Counter(image.pixelColor(x, y).name() for x in across for y in down)
    light, dark = (shades[Theme(name).color("ui.raised").name()] for name in ("light", "dark"))
    assert light > 1000 > dark, "dark pixels are those of letters"
