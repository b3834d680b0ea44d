"""The divergence view over traces made by hand: what is drawn, chosen, and linked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from PySide6.QtCore import QObject, QPoint, QPointF, Qt
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QApplication, QLabel, QPushButton, QStyle, QStyleOptionComboBox
from pytestqt.qtbot import QtBot

from app.actions import Actions
from app.looks import Theme
from app.panels.divergence import divergence_view
from app.panels.divergence.divergence_view import DivergenceView
from app.panels.divergence.lane_cards import verdict_text
from app.panels.divergence.state_map import gradient, shades
from app.trace_models.compared_lanes import ComparedLanes
from app.trace_models.run_rows import Position
from app.widgets.plain_table import BAR_ROLE
from app.widgets.round_plot import RoundPlot
from engine.analysis.run_cost import RunCost
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.app.panels.divergence.conftest import lane, shown
from tests.support.lane_traces import CLEAN, NOISE, LaneBuilder, faulty_comparison


def place(plot: RoundPlot, x: float, y: float) -> QPoint:
    return plot.mapFromScene(plot.box.mapViewToScene(QPointF(x, y)))


def colour_at(plot: RoundPlot, x: float, y: float) -> QColor:
    return plot.grab().toImage().pixelColor(place(plot, x, y))


def chips(view: DivergenceView) -> list[str]:
    return [
        verdict_text(c.verdict)[0]
        for c in view.header.cards.cards.values()
        if c.verdict is not None
    ]


# -- empty ---------------------------------------------------------------------------------


def test_empty_it_offers_the_action_that_fills_it(qtbot: QtBot) -> None:
    root = QObject()
    actions = Actions(root)
    view = DivergenceView(Theme("dark"), actions)
    qtbot.addWidget(view)
    view.show()
    texts = [label.text() for label in view.findChildren(QLabel) if label.isVisible()]
    assert "No comparison yet" in texts
    assert view.header.editor.isVisible()
    pressed: list[bool] = []
    actions["run.compare"].triggered.connect(lambda: pressed.append(True))
    button = next(b for b in view.findChildren(QPushButton) if b.text() == "Compare")
    button.click()
    assert pressed == [True]


def test_the_first_comparison_finds_plots_and_tables_made(
    view: DivergenceView, monkeypatch: pytest.MonkeyPatch
) -> None:
    QApplication.processEvents()
    assert view._stack.currentIndex() == 0, "nothing of them is in sight"
    assert view._page.verticalScrollBar().maximum() == 0, "nor has any room"
    made = (view.plots, view.tables, view.bar)
    monkeypatch.setattr(divergence_view, "LanePlots", None)
    view.show_run(RunRef(faulty_comparison().store, 3))
    assert (view.plots, view.tables, view.bar) == made


def test_a_trace_without_lanes_stays_empty(view: DivergenceView) -> None:
    store = TraceStore()
    view.show_run(RunRef(store, store.begin_run({})))
    assert view.header.cards.cards == {}
    view.set_cursor(Position(RunRef(store, 0), 0, 1, 3))
    view.go_first()
    view.refresh()


# -- lanes ---------------------------------------------------------------------------------


def test_a_lane_with_one_position_before_those_of_the_others_is_in_sight(
    view: DivergenceView,
) -> None:
    build = LaneBuilder()
    build.lane("planes", CLEAN)
    alone = build.lane("ring", [])
    build.row(alone, "ring", -4, 0.25)
    build.end()
    view.show_run(RunRef(build.store, alone))
    view.go_first()
    QApplication.processEvents()
    plot = view.plots.delta
    left, right = plot.x_range
    assert left < 6 < 17 < right and plot.cursor_line.value() == 6
    plot.cursor_line.hide()
    plot._first_line.hide()
    here = colour_at(plot, 6, plot.axis.y(np.array([0.25]))[0])
    assert here == plot._curves[alone].opts["pen"].color()


def test_one_verdict_for_each_lane(faulty: DivergenceView) -> None:
    assert chips(faulty) == ["leads", "≤ 4.0e-12", "within bound", "suspect @14"]
    names = [card.accessibleName() for card in faulty.header.cards.cards.values()]
    assert names[3] == "Lane ring,fault=no-conv-rollback: suspect @14"
    assert "worst NMSE 0.25 at position 15" in faulty.header.cards.cards[3].toolTip()
    assert faulty.header.sentence.font().bold() and not faulty.header.cost.font().bold()
    assert faulty.header.sentence.text() == (
        "ring,fault=no-conv-rollback: diverges first at position 14, round 2, after the rollback "
        "of 1 token by seq_rm in round 1."
    )
    assert not faulty.header.progress.isVisible()


def test_a_card_breaks_what_a_lane_did_into_lines_rather_than_cut_it(
    faulty: DivergenceView, qtbot: QtBot
) -> None:
    cards = faulty.header.cards
    costs = {run_id: RunCost.of(lane(faulty, run_id)) for run_id in cards.cards}
    work = {"n_passes": 755, "n_restores": 1110, "n_removed": 0, "n_replayed": 1420}
    times = {"verify": np.ones(len(costs[3].rounds))}
    costs[3] = replace(costs[3], round_ms=times, bytes_moved=1 << 20, **work)
    cards.set_costs(costs)
    assert "1,110 restores · 1,420 replayed · 755 passes" in cards.cards[3].work_text
    metrics, heights = cards.fontMetrics(), []
    for width in (4000, 700):
        cards.resize(width, cards.height())
        assert (metrics.horizontalAdvance(cards.cards[3].work_text) < width / 4) is (width == 4000)
        heights.append({card.sizeHint().height() for card in cards.cards.values()})
    (high,), (higher,) = heights
    assert higher - high == metrics.height() + 2
    assert "not timed" in cards.cards[0].toolTip() and "not timed" not in cards.cards[3].toolTip()


def test_choosing_a_lane_changes_every_part(faulty: DivergenceView, qtbot: QtBot) -> None:
    with qtbot.waitSignal(faulty.lane_selected) as signal:
        qtbot.mouseClick(faulty.header.cards.cards[2], Qt.MouseButton.LeftButton)
    assert signal.args == [lane(faulty, 2)]
    assert faulty.header.cards.cards[2].isChecked() and not faulty.header.cards.cards[3].isChecked()
    assert faulty.header.sentence.text().startswith(
        "checkpoint: within the bound 1.0e-09: worst NMSE 3.0e-12"
    )
    assert (
        faulty.tables.position_model.data(faulty.tables.position_model.index(4, 3))
        == "within bound"
    )
    with qtbot.waitSignal(faulty.lane_selected) as signal:
        qtbot.keyClick(faulty.header.cards.cards[2], Qt.Key.Key_Right)
    assert signal.args == [lane(faulty, 3)]
    assert not faulty.header.cards.cards[0].isCheckable(), "the reference has no differences"


def test_a_lane_that_stopped_says_why(view: DivergenceView) -> None:
    builder = LaneBuilder()
    run_id = builder.lane("planes", CLEAN[:3])
    builder.store.runs[run_id]["lane_error"] = "Depth 3 is too deep. Raise n_rs_seq."
    view.show_run(RunRef(builder.store, run_id))
    assert chips(view)[1] == "stopped"
    assert "Depth 3 is too deep." in view.header.sentence.text()


def test_sequences_that_come_later_are_named_whole(
    faulty: DivergenceView, monkeypatch: pytest.MonkeyPatch, qtbot: QtBot
) -> None:
    box, run = faulty.bar.seq, RunRef(faulty_comparison().store, 3)
    assert box.isHidden() and box.count() == 1
    monkeypatch.setattr(ComparedLanes, "seq_ids", property(lambda _: [0, 1, 10]))
    faulty.show_run(run)
    QApplication.processEvents()
    assert box.isVisible() and box.count() == 3
    part = QStyle.SubControl.SC_ComboBoxEditField

    def is_whole() -> bool:
        option = QStyleOptionComboBox()
        box.initStyleOption(option)
        room = box.style().subControlRect(QStyle.ComplexControl.CC_ComboBox, option, part, box)
        return room.width() >= box.fontMetrics().horizontalAdvance(box.itemText(2))

    qtbot.waitUntil(is_whole)


def test_a_plain_run_has_no_lanes(faulty: DivergenceView) -> None:
    store = faulty._lanes.store
    plain = store.begin_run({})
    faulty.show_run(RunRef(store, plain))
    assert faulty.header.cards.cards == {} and not faulty.has_divergences
    assert faulty._empty.words[0] == f"No comparison with run {plain}"
    LaneBuilder(store).lane("planes", CLEAN)
    faulty.show_run(RunRef(store, 5))
    assert list(faulty.header.cards.cards) == [5, 6], "a newer comparison"
    faulty.show_run(None)
    assert faulty.header.cards.cards == {}


def test_progress_while_it_runs(view: DivergenceView) -> None:
    builder = LaneBuilder()
    planes = builder.lane("planes", ())
    view.show_run(RunRef(builder.store, 0))
    assert view.header.progress.isVisible()
    assert "planes: no position is compared yet." in view.header.sentence.text()
    for index in range(3):
        builder.row(planes, "planes", index, 0.0)
    view.refresh()
    assert (view.header.progress.value(), view.header.progress.maximum()) == (3, 8)
    assert "all 3 positions are exact" in view.header.sentence.text()
    builder.end()
    view.refresh()
    assert not view.header.progress.isVisible()


# -- plots ---------------------------------------------------------------------------------


def test_lines_lie_where_the_errors_are(faulty: DivergenceView) -> None:
    plot = faulty.plots.delta
    x, y = plot._curves[3].getOriginalDataset()
    assert x.tolist() == list(range(10, 18))
    assert y[5] == pytest.approx(math.log10(0.25))
    assert y[0] == plot.axis.exact, "no error at all is on the line of its own"
    assert y[0] < plot.axis.low
    ticks = {text: at for at, text in plot.getPlotItem().getAxis("left")._tickLevels[0]}
    assert ticks["exact"] == plot.axis.exact
    band = plot._band.getRegion()
    assert band == pytest.approx((plot.axis.exact, math.log10(4e-12)))
    assert plot._bound.value() == pytest.approx(-9)
    assert plot._first_line.value() == 14
    assert colour_at(plot, 17.4, -11.8) == Theme("dark").color("plot.band")


def test_other_measures(faulty: DivergenceView) -> None:
    faulty.plots.measure.setCurrentIndex(1)
    plot = faulty.plots.delta
    _, y = plot._curves[3].getOriginalDataset()
    assert y[5] == pytest.approx(math.log10(0.5))
    assert not plot._bound.isVisible(), "verdicts are given on the NMSE"
    assert plot._band.getRegion()[1] == pytest.approx(math.log10(8e-12))
    assert "ring,fault=no-conv-rollback: 0.5" in plot.tip(15.2, 0)


def test_signs_have_the_colour_of_their_lane_and_the_shape_of_the_path(
    faulty: DivergenceView,
) -> None:
    plot = faulty.plots.delta
    for run_id, shape in ((2, "d"), (3, "t")):
        signs, curve = plot._signs[run_id], plot._curves[run_id]
        x, _ = signs.getData()
        assert x.tolist() == [13, 16], "last position of rounds 1 and 2"
        assert set(signs.data["symbol"]) == {shape}
        assert signs.opts["brush"].color() == curve.opts["pen"].color()
    rows = [plot._signs[run_id].getData()[1][0] for run_id in (2, 3)]
    assert rows[0] > rows[1] > plot.box.viewRange()[1][0], "a row for each lane"
    assert 1 not in plot._signs, "noise rolls nothing back"
    assert plot._first_line.isVisible()
    faulty._on_lane_chosen(2)
    assert not plot._first_line.isVisible()


def test_not_finite_is_above_everything(view: DivergenceView) -> None:
    builder = LaneBuilder()
    builder.lane("noise", NOISE)
    run_id = builder.lane("ring", [0.0, math.nan, 0.5, 0, 0, 0, 0, 0])
    view.show_run(RunRef(builder.store, run_id))
    plot = view.plots.delta
    _, y = plot._curves[run_id].getOriginalDataset()
    assert y[1] == plot.axis.not_finite > y[2]
    assert chips(view)[2] == "suspect @11"


@pytest.mark.parametrize("name", ["light", "dark"])
def test_state_map_has_the_colours_of_its_scale(qtbot: QtBot, name: str) -> None:
    theme = Theme(name)
    view = shown(qtbot, theme)
    view.show_run(RunRef(faulty_comparison().store, 3))
    QApplication.processEvents()
    states = view.plots.states
    assert states.error_at(0, 13) == 1e-2 and states.error_at(5, 16) == 0.5
    assert states.error_at(0, 10) == 0.0 and states.error_at(0, 9) is None
    assert states.error_at(0, 12) is None, "measured after the last token of a round only"
    assert states.error_at(1, 13) is None, "layer 1 is not a recurrent one"
    assert colour_at(states, 10, 0.1) == theme.color("heat.exact")
    assert colour_at(states, 12, 0.1) == theme.color("plot.background")
    assert colour_at(states, 16, 0.1) == theme.color("heat.high"), "as large as the state"
    assert "layer 2" in states.tip(16.0, 1.0) and "0.5" in states.tip(16.0, 1.0)
    view.plots.part.setCurrentIndex(1)
    assert states.error_at(0, 13) == pytest.approx(1e-3)
    assert "window" in states.tip(13.0, 0.0)


def test_shades_are_a_log_scale() -> None:
    shade = shades(np.array([0.0, 1e-8, 1e-4, 1.0, 1e-20, 1e9, math.inf, math.nan])).astype(int)
    exact, low, middle, high, less, more, broken, none = shade.tolist()
    assert low == less and high == more == 255
    assert middle == pytest.approx((low + high) / 2, abs=1)
    assert len({exact, low, middle, high, broken, none}) == 6


@pytest.mark.parametrize("name", ["light", "dark"])
def test_the_scale_goes_one_way_in_lightness(name: str) -> None:
    colours = gradient(Theme(name), 64)
    lightness = [c.redF() * 0.3 + c.greenF() * 0.59 + c.blueF() * 0.11 for c in colours]
    steps = np.diff(lightness)
    assert (steps > 0).all() or (steps < 0).all()


def test_a_lane_without_states_says_so(faulty: DivergenceView) -> None:
    faulty._on_lane_chosen(1)
    assert not faulty.plots.states.isVisible()
    texts = [label.text() for label in faulty.findChildren(QLabel) if label.isVisible()]
    assert any("No states are recorded" in text for text in texts)


# -- positions -----------------------------------------------------------------------------


def test_first_next_and_previous_divergence(faulty: DivergenceView, qtbot: QtBot) -> None:
    found: list[Position] = []
    faulty.position_selected.connect(found.append)
    faulty._choose(2)  # this lane has none: the first goes to the lane that has it
    with qtbot.waitSignal(faulty.lane_selected) as signal:
        faulty.go_first()
    assert signal.args == [lane(faulty, 3)]
    for go in (faulty.go_next, faulty.go_next, faulty.go_next, faulty.go_previous):
        go()
    assert [(p.run.run_id, p.round, p.pos) for p in found] == [
        (3, 2, 14),
        (3, 2, 15),
        (3, 3, 17),
        (3, 2, 15),
    ]
    assert faulty.tables.shown == 15
    assert faulty.plots.delta.cursor_line.value() == 15


def test_clicks_and_keys_in_the_plots_select_positions(
    faulty: DivergenceView, qtbot: QtBot
) -> None:
    plot = faulty.plots.delta
    with qtbot.waitSignal(faulty.position_selected) as signal:
        qtbot.mouseClick(plot.viewport(), Qt.MouseButton.LeftButton, pos=place(plot, 12.1, -5))
    assert signal.args == [Position(lane(faulty, 3), 0, 1, 12)]
    with qtbot.waitSignal(faulty.position_selected) as signal:
        qtbot.keyClick(faulty.plots.states, Qt.Key.Key_Right)
    assert signal.args == [Position(lane(faulty, 3), 0, 1, 13)]
    for x in (9.0, 18.0):  # next to what was compared
        with qtbot.assertNotEmitted(faulty.position_selected):
            plot.clicked.emit(x, 0.0)


def test_rows_of_the_table_select_positions(faulty: DivergenceView, qtbot: QtBot) -> None:
    table = faulty.tables.positions
    with qtbot.waitSignal(faulty.position_selected) as signal:
        table.setCurrentIndex(table.model().index(7, 0))
    assert signal.args == [Position(lane(faulty, 3), 0, 3, 17)]
    with qtbot.assertNotEmitted(faulty.position_selected):
        faulty.set_cursor(Position(lane(faulty, 0), 0, 1, 11))
    assert table.currentIndex().row() == 1
    cells = [table.model().index(4, column).data() for column in range(9)]
    assert cells == ["14", "2", "):", "✗ beyond bound", "0.002", "0.001", "0.003", "same", "1"]


def test_a_round_without_a_position_is_its_first(faulty: DivergenceView) -> None:
    faulty.set_cursor(Position(lane(faulty, 2), 0, 2, None))
    assert faulty.tables.shown == 14
    assert faulty.plots.states.cursor_line.isVisible()
    faulty.set_cursor(Position(lane(faulty, 77), 0, 2, 14))
    assert not faulty.plots.states.cursor_line.isVisible()


def test_top_k_side_by_side(faulty: DivergenceView) -> None:
    faulty.select(15)
    model = faulty.tables.detail_model
    assert [model.headerData(c, Qt.Orientation.Horizontal) for c in range(4)] == [
        "reference",
        "noise",
        "checkpoint",
        "ring\nfault=no-conv-rollback",
    ]
    assert model.headerData(0, Qt.Orientation.Vertical) == "› ⟨newline⟩"
    assert model.index(0, 3).data() == "▼ 0.220"
    assert model.index(0, 3).data(BAR_ROLE) == pytest.approx(0.22)
    theme = Theme("dark")
    assert model.index(0, 3).data(Qt.ItemDataRole.ForegroundRole) == theme.color("rejected.line")
    image = faulty.tables.detail.viewport().grab().toImage()
    painted = {
        image.pixelColor(x, y).name() for x in range(image.width()) for y in range(image.height())
    }
    lanes = [faulty._lanes.names[run_id] for run_id in faulty._lanes.run_ids]
    assert lanes[2:] == ["checkpoint", "ring,fault=no-conv-rollback"]
    lines = [curve.opts["pen"].color().name() for curve in faulty.plots.delta._curves.values()]
    assert set(lines) == {theme.color(f"lane.{one}").name() for one in ("noise", "first", "second")}
    assert {theme.color("plot.text").name(), *lines} <= painted, "bars have the lanes' colours"


def test_wide_it_shows_both_tables(faulty: DivergenceView) -> None:
    assert not faulty.tables.positions.isVisible()
    faulty.resize(1800, 900)
    QApplication.processEvents()
    assert faulty.tables.positions.isVisible() and faulty.tables.detail.isVisible()
    faulty.resize(640, 760)
    QApplication.processEvents()
    assert not faulty.tables.positions.isVisible()


# -- the rest ------------------------------------------------------------------------------


def test_hidden_it_does_nothing_until_it_is_shown(view: DivergenceView) -> None:
    builder = LaneBuilder()
    planes = builder.lane("planes", ())
    view.show_run(RunRef(builder.store, planes))
    view.hide()
    builder.row(planes, "planes", 0, 0.5)
    view.refresh()
    assert chips(view)[1] == "nothing yet"
    view.show()
    assert chips(view)[1] == "suspect @10"
    assert view.has_divergences


def test_custom_painted_parts_are_told_in_words(faulty: DivergenceView) -> None:
    delta, states = faulty.plots.delta, faulty.plots.states
    assert "ring,fault=no-conv-rollback: 0.25" in delta.accessibleDescription()
    assert states.accessibleDescription() == "state: 3 layers, worst relative error 1"
    for part in (delta, states, faulty.plots.scale, faulty.plots.legend, faulty.header.cards):
        assert part.accessibleName()


def test_another_theme(faulty: DivergenceView) -> None:
    light = Theme("light")
    faulty._theme.become("light")
    QApplication.processEvents()
    assert colour_at(faulty.plots.states, 16, 0.1) == light.color("heat.high")
    assert colour_at(faulty.plots.delta, 17.4, -11.8) == light.color("plot.band")
