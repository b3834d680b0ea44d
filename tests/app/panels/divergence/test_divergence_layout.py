"""Room in the divergence view: low and narrow windows, scroll bars, heads, costs of lanes."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.panels.divergence.divergence_view import DivergenceView
from app.trace_models.compared_lanes import ComparedLanes
from app.widgets.fitted_labels import ScrollPage
from engine.analysis.run_cost import RunCost
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.app.panels.divergence.conftest import lane
from tests.support.lane_traces import CLEAN, NOISE, LaneBuilder, faulty_comparison
from tests.support.window_acts import settle


@pytest.mark.usefixtures("each_font")
@pytest.mark.thinned(4)
def test_an_open_editor_leaves_plots_and_tables_readable(
    faulty: DivergenceView, qtbot: QtBot
) -> None:
    page = faulty.findChildren(ScrollPage)[0]
    line = faulty.fontMetrics().height()
    show_costs(faulty)
    faulty.resize(1280, 40 * line)  # what a window of 1280 × 800 has for it with a common font
    for editing in (False, True):
        faulty.header.set_editing(editing)
        settle(qtbot)
        assert faulty.plots.delta.height() >= 8 * line
        assert faulty.plots.states.height() >= 6 * line
        shown_rows = faulty.tables.detail.viewport().height()
        assert shown_rows >= 5 * faulty.tables.detail.verticalHeader().defaultSectionSize()
        assert editing or page.verticalScrollBar().maximum() == 0, "the page may scroll then"


@pytest.mark.usefixtures("each_font")
@pytest.mark.thinned(4)
def test_a_low_view_fits_without_the_editor(faulty: DivergenceView, qtbot: QtBot) -> None:
    line = faulty.fontMetrics().height()
    faulty.resize(1280, 31 * line)  # what the same window has with a tall font
    bar = faulty.findChildren(ScrollPage)[0].verticalScrollBar()
    qtbot.waitUntil(lambda: bar.maximum() == 0)
    assert faulty.plots.delta.height() >= 5 * line
    assert faulty.plots.states.height() >= 5 * line
    rows = faulty.tables.detail
    assert rows.viewport().height() >= 3 * rows.verticalHeader().defaultSectionSize()
    faulty.resize(1280, 40 * line)
    qtbot.waitUntil(lambda: faulty.plots.delta.height() >= 8 * line)


def test_a_scroll_bar_comes_and_goes_within_the_resize(faulty: DivergenceView) -> None:
    """After the painting everything would be laid out and painted once more."""
    (area,) = faulty.findChildren(ScrollPage)
    bar, page = area.verticalScrollBar(), area.widget()
    seen = set()
    for height in (1600, 300, 1600):
        faulty.resize(900, height)
        assert bar.isVisible() == (bar.maximum() > 0)
        assert page.width() == area.width() - (bar.width() if bar.isVisible() else 0)
        seen.add(bar.isVisible())
    assert seen == {True, False}


def test_ranks_stand_in_sight_of_half_a_window(faulty: DivergenceView, qtbot: QtBot) -> None:
    faulty.resize(1280, 545)
    settle(qtbot)
    table = faulty.tables.positions
    titles = [table.model().headerData(i, Qt.Orientation.Horizontal) for i in range(9)]
    rank = titles.index("rank")
    right = table.columnViewportPosition(rank) + table.columnWidth(rank)
    assert right <= table.viewport().width()


def test_heads_of_two_lines_are_as_high_from_the_first_look_on(
    view: DivergenceView, qtbot: QtBot
) -> None:
    builder = LaneBuilder()
    builder.lane("noise", NOISE)
    view.show_run(RunRef(builder.store, 1))
    header = view.tables.detail.horizontalHeader()
    qtbot.waitUntil(lambda: header.isVisible() and header.height() > 0)
    one = header.height()
    view.show_run(RunRef(faulty_comparison().store, 3))
    qtbot.waitUntil(lambda: header.height() >= one + header.fontMetrics().height())


def test_a_lane_is_shown_in_a_sequence_that_it_was_compared_in(
    view: DivergenceView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ComparedLanes, "seq_ids", property(lambda _: [0, 1]))
    builder = LaneBuilder()
    first, other = builder.lane("checkpoint", CLEAN), builder.lane("planes", [])
    facts = {"run_id": other, "lane": "planes", "nmse": 0.0, "token_id": 0, "round": 0}
    builder.store.divergence.append(**facts, seq_id=1, pos=20)
    view.show_run(RunRef(builder.store, other))
    assert view.tables.positions.model().rowCount() == 1
    assert view.bar.seq.currentText() == "sequence 1"
    view.show_run(RunRef(builder.store, first))
    assert view.bar.seq.currentText() == "sequence 0"


def test_a_lane_keeps_its_name_where_its_verdict_has_little_room(faulty: DivergenceView) -> None:
    card = next(c for c in faulty.header.cards.cards.values() if "within" in c.verdict_in(4000))
    assert card.verdict_in(4000) == "within bound"
    assert card.verdict_in(card.sizeHint().width() // 2) == "within"


def test_figures_of_many_lanes_are_scrolled_to_not_cut_off(
    faulty: DivergenceView, qtbot: QtBot
) -> None:
    detail = faulty.tables.detail
    least = detail.fontMetrics().horizontalAdvance("checkpoint")
    faulty.select(15)
    detail.setFixedWidth(detail.verticalHeader().width() + 2 * least)
    qtbot.waitUntil(lambda: detail.horizontalScrollBar().maximum() > 0)
    assert min(map(detail.columnWidth, range(detail.model().columnCount()))) >= least


def test_the_axis_ends_at_the_last_position_once_the_lanes_have_ended(view: DivergenceView) -> None:
    """The end of a comparison comes after its last position, and nothing more with it."""
    builder = LaneBuilder()
    builder.lane("noise", NOISE)
    run_id = builder.lane("planes", CLEAN)
    for facts in builder.store.runs.values():
        facts["options"] = {"n_predict": 200}
    view.show_run(RunRef(builder.store, run_id))
    left, right = view.plots.delta.x_range
    assert right - left > 150, "room for what is expected"
    builder.end()
    view.refresh()
    left, right = view.plots.delta.x_range
    assert right - left < 30


def test_of_a_long_comparison_that_is_opened_every_position_is_in_sight(
    view: DivergenceView,
) -> None:
    builder = LaneBuilder()
    run_id = builder.lane("planes", CLEAN)
    facts = {"run_id": run_id, "lane": "planes", "seq_id": 0, "nmse": 0.0}
    for pos in range(100, 1300):
        builder.store.divergence.append(**facts, round=pos, pos=pos)
    builder.end()
    view.show_run(RunRef(builder.store, run_id))
    positions = builder.store.divergence.column("pos")
    for plot in (view.plots.delta, view.plots.states):
        left, right = plot.x_range
        assert left <= positions[0] and right >= positions[-1] == 1299


def show_costs(view: DivergenceView) -> None:
    costs = [RunCost.of(lane(view, run_id)) for run_id in (2, 3)]
    view.header.cost_model.show_costs(costs)
    view.header.costs.show()


def test_costs_go_with_their_comparison(faulty: DivergenceView) -> None:
    faulty.resize(1280, 900)
    show_costs(faulty)
    store = TraceStore()
    faulty.show_run(RunRef(store, store.begin_run({})))
    faulty.header.set_editing(False)
    faulty.refresh()
    assert not faulty.header.costs.isVisible() and not faulty.header.cost_model.n_rows()


def test_every_lane_has_its_costs_in_sight_where_columns_scroll(
    faulty: DivergenceView, qtbot: QtBot
) -> None:
    header = faulty.header
    show_costs(faulty)
    bar = header.costs.horizontalScrollBar()
    for width in (640, 1800, 640):
        faulty.resize(width, 900)
        qtbot.waitUntil(lambda scrolls=width == 640: (bar.maximum() > 0) is scrolls)
        QApplication.processEvents()
        last = header.costs.visualRect(header.cost_model.index(1, 0))
        assert header.costs.viewport().height() > last.bottom()
