"""Rollback bars: heights, paths by colour and sign, the limit, the linked cursor, following."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QApplication, QLabel
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.panels.plots import rollback_view
from app.panels.plots.bar_view import PixelColumns
from app.panels.plots.rollback_view import RollbackView
from app.trace_models.run_rows import Position
from engine.trace.run_ref import RunRef
from tests.support.trace_builder import TraceBuilder, sample_trace


@pytest.fixture(params=["light", "dark"])
def theme(request: pytest.FixtureRequest) -> Theme:
    return Theme(request.param)


@pytest.fixture
def view(qtbot: QtBot) -> RollbackView:
    return shown(qtbot, Theme("dark"))


def shown(qtbot: QtBot, theme: Theme) -> RollbackView:
    view = RollbackView(theme)
    qtbot.addWidget(view)
    view.resize(800, 220)
    view.show()
    qtbot.waitExposed(view)
    return view


def some_rounds() -> TraceBuilder:
    """Rounds 1 to 4: depth 1 by seq_rm, 2 by restore, 1 refused, 0."""
    builder = TraceBuilder()
    builder.prompt(["p"])
    builder.draft(["a"], "b", ["x"])
    builder.draft([], "c", ["x", "y"], path="restore_depth")
    builder.draft([], "d", ["x"], path="refused")
    builder.draft(["e"], "f")
    return builder


def bars(view: RollbackView, group: str) -> dict[float, float]:
    x, height = view._bars[group].getData()
    return dict(zip(x.tolist(), height.tolist(), strict=True))


def pixel_of(view: RollbackView, x: float, y: float) -> QPoint:
    """Where a place of the plot is in its viewport."""
    return view.plot.mapFromScene(view.plot.box.mapViewToScene(QPointF(x, y)))


def test_bars_by_path(view: RollbackView) -> None:
    builder = some_rounds()
    view.show_run(builder.run)
    assert bars(view, "seq_rm") == {1: 1}
    assert bars(view, "restore") == {2: 2}
    assert bars(view, "refused") == {3: 1}
    crosses, heights = view._crosses.getData()
    assert crosses.tolist() == [3]
    assert heights[0] > 1


def test_new_rounds_join(view: RollbackView) -> None:
    builder = some_rounds()
    view.show_run(builder.run)
    builder.draft([], "g", ["x", "y", "z"])
    view.refresh()
    assert bars(view, "seq_rm")[5] == 3


def test_every_sequence_has_a_strip(view: RollbackView) -> None:
    builder = TraceBuilder()
    for seq_id in (0, 1):
        builder.prompt(["p"], seq_id)
    for seq_id in (0, 1):
        builder.draft([], "a", ["x"] * (seq_id + 1), seq_id)
    view.show_run(builder.run)
    opts = view._bars["seq_rm"].opts
    assert opts["x"].tolist() == [1, 1]
    by_base = dict(zip(opts["y0"].tolist(), opts["height"].tolist(), strict=True))
    strip = max(by_base)
    assert by_base == {0: 2, strip: 1}, "the first sequence is on top"
    assert view.plot.box.viewRange()[1] == [0, 2 * strip]
    assert [line.value() for line in view._limits] == [strip + 3, 3]
    labels = view.plot._ticks["left"]
    assert [text for _, text in labels] == ["seq 0", "3", "seq 1", "3"]
    assert [at for at, text in labels if text == "3"] == pytest.approx([strip + 3, 3])
    view.resize(800, 70)
    view.grab()
    labels = view.plot._ticks["left"]
    assert labels == [(1.5 * strip, "seq 0"), (0.5 * strip, "seq 1")], "no room for more"
    assert "sequence 1" in view.plot.tip(1.0, 0.5)
    assert "sequence 0" in view.plot.tip(1.0, strip + 0.5)


def test_the_limit_line(view: RollbackView) -> None:
    builder = some_rounds()
    view.show_run(builder.run)
    (limit,) = view._limits
    assert limit.isVisible() and limit.value() == 3
    assert view.legend.labels[0] == "n_rs_seq = 3"
    _, top = view.plot.box.viewRange()[1]
    assert top > 3


def test_without_planes_there_is_no_limit_line(view: RollbackView) -> None:
    builder = TraceBuilder()
    builder.store.rounds.append(run_id=0, round=0, seq_id=0, rollback_path="none")
    view.show_run(builder.run)
    assert not any(line.isVisible() for line in view._limits)
    assert view.legend.labels[0] == "n_rs_seq"


def test_paths_differ_in_more_than_hue(qtbot: QtBot, theme: Theme) -> None:
    builder = TraceBuilder()
    builder.prompt(["p"])
    for path in ("seq_rm", "restore", "refused"):
        builder.draft([], "a", ["x", "y", "z"], path=path)
    view = shown(qtbot, theme)
    view.show_run(builder.run)
    view.plot.set_follow(False)
    view.plot.box.setXRange(0.5, 3.5, padding=0)
    QApplication.processEvents()
    image = view.plot.grab().toImage()

    def filled(round_: int, role: str) -> float:
        """How much of the inside of a bar has the colour of a role."""
        first, last = pixel_of(view, round_ - 0.3, 2.7), pixel_of(view, round_ + 0.3, 0.3)
        colour = theme.color(role).name()
        cells = [
            image.pixelColor(x, y).name() == colour
            for x in range(first.x(), last.x())
            for y in range(first.y(), last.y())
        ]
        return sum(cells) / len(cells)

    assert filled(1, "path.seq_rm") > 0.95
    assert 0.05 < filled(2, "path.restore") < 0.6
    assert filled(3, "path.refused") == 0.0
    assert filled(3, "plot.background") > 0.95


def test_a_click_selects_the_round(view: RollbackView, qtbot: QtBot) -> None:
    builder = sample_trace(rounds=60, n_seqs=2)
    view.show_run(builder.run)
    QApplication.processEvents()
    with qtbot.waitSignal(view.position_selected) as signal:
        qtbot.mouseClick(
            view.plot.viewport(), Qt.MouseButton.LeftButton, pos=pixel_of(view, 20.2, 1.0)
        )
    assert signal.args == [Position(builder.run, 1, 20, None)]
    assert view.plot.cursor_line.value() == 20
    with qtbot.waitSignal(view.position_selected) as signal:
        qtbot.keyClick(view.plot, Qt.Key.Key_Right)
    assert signal.args == [Position(builder.run, 1, 21, None)]
    with qtbot.assertNotEmitted(view.position_selected):
        qtbot.mouseClick(
            view.plot.viewport(), Qt.MouseButton.LeftButton, pos=pixel_of(view, 90.0, 1.0)
        )


def test_the_cursor_comes_from_outside(view: RollbackView) -> None:
    builder = sample_trace(rounds=300)
    view.show_run(builder.run)
    view.set_cursor(Position(builder.run, 0, 7, 30))
    left, right = view.plot.x_range
    assert left < 7 < right
    assert left == view.plot.run_axis.start(0), "there is nothing before the first round"
    assert view.plot.cursor_line.isVisible()
    assert "round 7" in view.plot.getPlotItem().getAxis("bottom").labelString()
    assert not view.plot.follow
    view.set_cursor(Position(RunRef(builder.store, 9), 0, 7, 30))  # another run
    assert not view.plot.cursor_line.isVisible()


def test_the_newest_round_stays_in_sight_until_scrolled(view: RollbackView, qtbot: QtBot) -> None:
    builder = sample_trace(rounds=300)
    view.show_run(builder.run)
    left, right = view.plot.x_range
    assert left < 300 < right
    with qtbot.waitSignal(view.plot.follow_changed):
        for _ in range(8):
            qtbot.keyClick(view.plot, Qt.Key.Key_A)
    assert not view.plot.follow
    before = view.plot.x_range
    builder.draft([], "a", ["x"])
    view.refresh()
    assert view.plot.x_range == before
    qtbot.mouseClick(view.plot._chip, Qt.MouseButton.LeftButton)
    assert view.plot.follow
    assert view.plot.x_range[1] > 301
    assert not view.plot._chip.isVisible()


def turn_wheel(view: RollbackView, by: int) -> None:
    place = QPointF(pixel_of(view, 250.0, 1.0))
    viewport = view.plot.viewport()
    wheel = QWheelEvent(
        place,
        viewport.mapToGlobal(place),
        QPoint(0, 0),
        QPoint(0, by),
        Qt.MouseButton.NoButton,
        Qt.KeyboardModifier.NoModifier,
        Qt.ScrollPhase.NoScrollPhase,
        False,
    )
    QApplication.sendEvent(viewport, wheel)


def test_neither_the_wheel_nor_keys_leave_the_run(view: RollbackView, qtbot: QtBot) -> None:
    builder = sample_trace(rounds=300)
    view.show_run(builder.run)
    QApplication.processEvents()
    for _ in range(9):
        turn_wheel(view, -120 * 4)
    assert view.plot.x_range == pytest.approx((-0.5, view.plot.n_rounds - 0.5))
    qtbot.keyClick(view.plot, Qt.Key.Key_W)
    for _ in range(30):
        qtbot.keyClick(view.plot, Qt.Key.Key_A)
    assert view.plot.x_range[0] == pytest.approx(-0.5)


def test_the_wheel_zooms_at_the_cursor(view: RollbackView) -> None:
    builder = sample_trace(rounds=300)
    view.show_run(builder.run)
    QApplication.processEvents()
    before, y_before = view.plot.x_range, view.plot.box.viewRange()[1]
    turn_wheel(view, 120)
    after = view.plot.x_range
    assert after[1] - after[0] < before[1] - before[0]
    share = (250 - before[0]) / (before[1] - before[0])
    assert (250 - after[0]) / (after[1] - after[0]) == pytest.approx(share, abs=0.02)
    assert view.plot.box.viewRange()[1] == y_before


def test_the_tooltip_gives_the_numbers(view: RollbackView) -> None:
    builder = some_rounds()
    view.show_run(builder.run)
    tip = view.plot.tip(2.1, 1.0)
    assert "round 2 · sequence 0" in tip
    assert "restore_depth, depth 2, n_rs_seq 3" in tip
    assert "2 drafted, 0 accepted" in tip
    assert "no rollback" in view.plot.tip(4.0, 0.0)
    assert view.plot.tip(40.0, 0.0) == ""


def test_the_plot_is_told_in_words(view: RollbackView) -> None:
    builder = some_rounds()
    view.show_run(builder.run)
    words = view.plot.accessibleDescription()
    assert words == "rounds: 5, deepest rollback: 2, seq_rm: 1, restore: 1, refused: 1"


def test_empty_and_back(view: RollbackView) -> None:
    def words() -> str:
        return " ".join(label.text() for label in view.currentWidget().findChildren(QLabel))

    assert "Press Run (F5)" in words()
    builder = some_rounds()
    view.show_run(builder.run)
    assert view.plot.isVisible()
    view.show_run(None)
    assert "Press Run (F5)" in words()
    other = TraceBuilder(builder.store)
    view.show_run(RunRef(builder.store, other.run_id))
    assert "how deep" in words() and "Press Run" not in words(), "that has been done"
    other.prompt(["p"])
    other.draft([], "a", ["x"])
    view.refresh()
    assert bars(view, "seq_rm") == {1: 1}


def test_another_theme(view: RollbackView) -> None:
    builder = some_rounds()
    view.show_run(builder.run)
    light = Theme("light")
    view.plot._theme.become("light")
    QApplication.processEvents()
    image = view.plot.grab().toImage()
    assert image.pixelColor(5, 5) == light.color("plot.background")
    assert image.pixelColor(pixel_of(view, 1.0, 0.5)) == light.color("path.seq_rm")


def test_only_rounds_in_sight_are_drawn(view: RollbackView) -> None:
    builder = sample_trace(rounds=1000)
    view.show_run(builder.run)
    left, right = view.plot.x_range
    drawn = np.concatenate([np.array(list(bars(view, group))) for group in view._bars])
    assert 0 < len(drawn) <= right - left + 3
    view.plot.set_cursor(100)
    drawn = np.array(list(bars(view, "seq_rm")))
    assert drawn.min() < 100 < drawn.max()


def test_no_bar_is_lost_between_pixels(view: RollbackView) -> None:
    builder = TraceBuilder()
    builder.prompt(["p"])
    for at in range(6000):
        builder.draft(["a"], "b", ["x", "y"] if at % 40 == 20 else [])
    view.show_run(builder.run)
    view.plot.show_all()
    view.refresh()
    image, drawn = view.plot.grab().toImage(), bars(view, "seq_rm")
    assert len(drawn) == 150
    colour = Theme("dark").color("path.seq_rm")
    shown = {
        x
        for x in drawn
        for by in (-1, 0, 1)
        if image.pixelColor(pixel_of(view, x, 1.5) + QPoint(by, 0)) == colour
    }
    assert shown == drawn.keys()


def test_limits_do_not_cover_low_strips(view: RollbackView) -> None:
    builder = TraceBuilder()
    for seq_id in range(30):
        builder.draft([], "a", ["x"], seq_id)
    view.show_run(builder.run)
    view.grab()
    assert not any(line.isVisible() for line in view._limits)
    assert view.legend.labels[0] == "n_rs_seq = 3"
    view.resize(800, 900)
    view.grab()
    assert [line.isVisible() for line in view._limits] == [True] * 30


def test_a_path_that_was_not_told_is_not_drawn_as_none(qtbot: QtBot) -> None:
    builder = TraceBuilder()
    builder.prompt(["a"])
    builder.draft([" b"], " c", [" x"])
    number = builder.untold(" d")
    view = RollbackView(Theme("light"))
    qtbot.addWidget(view)
    view.resize(600, 200)
    view.show()
    view.show_run(builder.run)
    assert list(view._bars["untold"].opts["x"]) == [number]
    assert min(view._bars["untold"].opts["height"]) > 0
    assert view.legend.trailing_labels == ["not observed"]
    assert "path not observed: 1" in view.plot.accessibleDescription()
    assert "rollback path not observed" in view.plot.tip(float(number), 0.1)
    view.show_run(sample_trace(rounds=5).run)
    assert view.legend.trailing_labels == []


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"summary": {"draft_acceptance_rate": 0.0}}, "Only totals are known for this run. vllm"),
        (
            {"summary": {}, "source": {"engine": ""}},
            "No totals are known for this run. The engine does not report its rounds.",
        ),
        ({"summary": {}}, "No totals are known for this run. vllm does not report its rounds."),
        ({"error": "It broke."}, "The run failed: It broke."),
        ({"listens_at": "http://127.0.0.1:8081"}, "No client sent a request."),
    ],
)
def test_why_there_are_no_rounds(view: RollbackView, facts: dict[str, object], said: str) -> None:
    run = TraceBuilder().run
    run.facts.update({"source": {"engine": "vllm"}, "stops": [], **facts})
    view.show_run(run)
    assert view.currentWidget() is view.empty
    assert view.empty.words[1].startswith(said)


def test_bars_of_a_thousand_sequences_are_put_together_at_once(
    view: RollbackView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them alone took seconds; of a column of pixels each has its deepest."""
    columns, n_seqs = list[PixelColumns](), 1000

    def seen(*how: Any) -> PixelColumns:
        columns.append(PixelColumns(*how))
        return columns[-1]

    monkeypatch.setattr(rollback_view, "PixelColumns", seen)
    builder = TraceBuilder()
    for number in range(2 * n_seqs):
        builder.draft([], "b", ["x"] * (1 + number // n_seqs), seq_id=number % n_seqs)
    view.show_run(builder.run)
    assert 1 <= len(columns) <= len(view._bars)
    x, height = view._bars["seq_rm"].getData()
    assert len(x) == 2 * n_seqs and set(height.tolist()) == {1.0, 2.0}
    assert len(set(view._bars["seq_rm"].opts["y0"].tolist())) == n_seqs
