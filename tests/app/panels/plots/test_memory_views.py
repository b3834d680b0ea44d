"""Ring occupancy: states in their cells, bands of sequences, signs, links."""

from __future__ import annotations

import numpy as np
import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.panels.plots.memory_views import RingView
from app.panels.plots.rollback_view import RollbackView
from app.trace_models.run_rows import Position
from engine.trace.records import SLOT_STATES
from tests.support.trace_builder import TraceBuilder, sample_trace


@pytest.fixture(params=["light", "dark"])
def theme(request: pytest.FixtureRequest) -> Theme:
    return Theme(request.param)


def shown(qtbot: QtBot, theme: Theme) -> RingView:
    view = RingView(theme)
    qtbot.addWidget(view)
    view.resize(800, 220)
    view.show()
    qtbot.waitExposed(view)
    return view


@pytest.fixture
def view(qtbot: QtBot) -> RingView:
    return shown(qtbot, Theme("dark"))


def zoom(view: RingView, left: float, right: float) -> None:
    view.plot.set_follow(False)
    view.plot.box.setXRange(left, right, padding=0)
    QApplication.processEvents()


def pixel_of(view: RingView, x: float, y: float) -> QPoint:
    return view.plot.mapFromScene(view.plot.box.mapViewToScene(QPointF(x, y)))


def colour_at(view: RingView, x: float, y: float) -> QColor:
    return view.plot.grab().toImage().pixelColor(pixel_of(view, x, y))


def test_every_state_has_the_colour_of_its_role(qtbot: QtBot, theme: Theme) -> None:
    builder = TraceBuilder()
    builder.slots(SLOT_STATES, 0)
    view = shown(qtbot, theme)
    view.show_run(builder.run)
    zoom(view, -0.5, 1.5)
    for slot, state in enumerate(SLOT_STATES):
        # next to the middle, where pending and stale have their signs
        assert colour_at(view, 0.35, slot) == theme.color(f"slot.{state}"), state
    assert colour_at(view, 1.2, 0) == theme.color("plot.background")


def test_pending_and_stale_have_signs(qtbot: QtBot, theme: Theme) -> None:
    builder = TraceBuilder()
    builder.slots(("live", "pending", "stale"), 0)
    view = shown(qtbot, theme)
    view.show_run(builder.run)
    zoom(view, -0.5, 3.5)
    signs = {state: marks.getData() for state, marks in view._marks.items()}
    assert [column.tolist() for column in signs["pending"]] == [[0], [1]]
    assert [column.tolist() for column in signs["stale"]] == [[0], [2]]
    assert colour_at(view, 0.0, 2.0) != theme.color("slot.stale")


def test_crowded_cells_keep_only_the_sign_of_stale(view: RingView) -> None:
    builder = TraceBuilder()
    for number in range(400):
        builder.slots(("live", "pending", "stale" if number == 200 else "free"), number)
    view.show_run(builder.run)
    zoom(view, 0, 400)
    assert len(view._marks["pending"].getData()[0]) == 0
    assert view._marks["stale"].getData()[0].tolist() == [200]


def test_a_cell_has_one_sign_on_any_axis(view: RingView) -> None:
    view.show_run(sample_trace(rounds=10).run)
    for unit in ("round", "token"):
        view.plot.set_unit(unit)
        view.plot.show_all()
        QApplication.processEvents()
        x, y = view._marks["pending"].getData()
        cells = list(zip(view.plot.run_axis.rounds_at(x).tolist(), y.tolist(), strict=True))
        assert len(cells) > 1 and len(cells) == len(set(cells)), unit


def test_signs_of_stale_slots_next_to_each_other_do_not_touch(view: RingView) -> None:
    builder = TraceBuilder()
    for number in range(400):
        builder.slots(("live", "stale"), number)
    view.show_run(builder.run)
    zoom(view, 0, 400)
    x = view._marks["stale"].getData()[0] * view.plot.box.width() / 400
    assert len(x) > 20 and np.diff(x).min() > 6
    zoom(view, 0, 10)
    assert len(view._marks["stale"].getData()[0]) >= 10, "each cell has room for its own"


def test_signs_stay_within_low_rows(view: RingView) -> None:
    builder = TraceBuilder()
    for seq_id in range(6):
        builder.slots(("fresh", "fresh", "pending", "fresh"), 0, seq_id=seq_id)
    view.show_run(builder.run)
    zoom(view, -0.5, 1.5)
    signs, box = view._marks["pending"], view.plot.box
    row = box.height() / (6 * 4 + 5)  # an empty row between sequences
    assert len(signs.getData()[0]) == 6 and 3 <= signs.opts["size"] <= row < 7
    view.resize(800, 120)
    QApplication.processEvents()
    view.plot.grab()
    assert len(signs.getData()[0]) == 0  # only the colour has room


def test_signs_shrink_with_the_cells(view: RingView) -> None:
    builder = TraceBuilder()
    for number in range(150):
        builder.slots(("live", "pending"), number)
    view.show_run(builder.run)
    zoom(view, 0, 150)
    room = view.plot.box.width() / 150
    pending = view._marks["pending"]
    assert 3 <= room < 6, "the case that is meant"
    assert len(pending.getData()[0]) == 150
    assert 3 <= pending.opts["size"] <= room
    zoom(view, 0, 10)
    assert pending.opts["size"] == 6


def test_sequences_are_bands(view: RingView) -> None:
    builder = TraceBuilder()
    builder.slots(("live", "free"), 0, seq_id=1)
    view.show_run(builder.run)
    assert view._image.image.shape == (2, 1)
    builder.slots(("live", "fresh", "carried"), 0, seq_id=0)
    view.refresh()
    states = [SLOT_STATES[value - 1] if value else "" for value in view._image.image[:, 0]]
    assert states == ["live", "fresh", "carried", "", "live", "free"]
    ticks = dict(view.plot.getPlotItem().getAxis("left")._tickLevels[0])
    assert ticks[0] == "seq 0"
    assert ticks[4] == "seq 1"


def test_names_of_low_bands_are_in_their_middles_and_do_not_overlap(
    qtbot: QtBot, view: RingView
) -> None:
    builder = TraceBuilder()
    for seq_id in range(5):
        builder.slots(("live", "fresh", "carried", "free"), 0, seq_id=seq_id)
    view.show_run(builder.run)
    plot = view.plot
    seen = set()
    for height in range(420, 60, -10):
        view.resize(view.width(), height)
        qtbot.waitUntil(lambda at=height: view.height() == at)
        view.refresh()
        view.grab()
        ticks = plot.getPlotItem().getAxis("left")._tickLevels[0]
        named = [(y, name) for y, name in ticks if name.startswith("seq")]
        assert named[0][1] == "seq 0"
        row = plot.box.height() / 24.2
        gaps = np.diff([y for y, _ in ticks]) * row
        assert (gaps >= plot.fontMetrics().ascent() - 1).all(), height
        seen.add(len(ticks))
        if len(ticks) == len(named):
            assert dict(named)[1.5] == "seq 0"
    assert {20, 5} < seen, "all slots, all names, some of the names"


def states_of(view: RingView, left: float, right: float) -> dict[int, list[object]]:
    """The states of every round in sight, by slot and sequence."""
    zoom(view, left, right)
    found: dict[int, list[object]] = {}
    for round_, _, _, state, _ in view.table()[1]:
        assert isinstance(round_, int)
        found.setdefault(round_, []).append(state)
    return found


def test_rows_written_later_change_their_cells_only(view: RingView) -> None:
    builder = sample_trace(rounds=30, n_seqs=2)
    view.show_run(builder.run)
    before = states_of(view, 0, 40)
    assert len(before) == 30
    builder.slots(("live", "stale", "stale", "stale"), 31)
    view.refresh()
    assert states_of(view, 0, 40) == before | {31: ["live", "stale", "stale", "stale"]}


def test_growing_past_the_first_room(view: RingView) -> None:
    builder = sample_trace(rounds=10)
    view.show_run(builder.run)
    for number in range(11, 3000):
        builder.slots(("live", "fresh", "carried", "free"), number)
    view.refresh()
    assert view.plot.n_rounds == 3000
    left, right = view.plot.x_range
    assert left < 2999 < right
    assert view._image.image.shape[1] < 200  # only what is in sight
    found = states_of(view, 11, 3000)
    assert len(found) == 2989
    assert all(states == ["live", "fresh", "carried", "free"] for states in found.values())


def test_slots_and_rounds_take_room_by_their_number(view: RingView) -> None:
    builder = TraceBuilder()
    for number, seq_id, slot in ((3, 7, 4095), (10**9, 65_535, 12), (10**9, 65_535, 4000)):
        builder.store.memory.append(
            run_id=builder.run_id, round=number, seq_id=seq_id, slot=slot, state="stale", age=1
        )
    view.show_run(builder.run)
    zoom(view, -1, 10**9 + 1)
    assert view._image.image.shape[0] == 4
    assert view._image.image.shape[1] < 2000
    assert [tuple(row) for row in view.table()[1]] == [
        (3, 7, 4095, "stale", 1),
        (10**9, 65_535, 12, "stale", 1),
        (10**9, 65_535, 4000, "stale", 1),
    ]
    assert view.plot.tip(3.0, 0.0).startswith("round 3 · sequence 7 · slot 4095")
    assert view.plot.tip(3.0, 3.0) == ""


def test_tooltip_and_click(view: RingView, qtbot: QtBot) -> None:
    builder = sample_trace(rounds=40, n_seqs=2)
    view.show_run(builder.run)
    QApplication.processEvents()
    assert view.plot.tip(10.0, 2.0).startswith("round 10 · sequence 0 · slot 2\n")
    assert "2 tokens older than the newest" in view.plot.tip(10.0, 2.0)
    assert view.plot.tip(10.0, 4.0) == ""  # between the bands
    assert view.plot.tip(500.0, 1.0) == ""
    with qtbot.waitSignal(view.position_selected) as signal:
        qtbot.mouseClick(
            view.plot.viewport(), Qt.MouseButton.LeftButton, pos=pixel_of(view, 12.0, 6.0)
        )
    assert signal.args == [Position(builder.run, 1, 12, None)]


def test_linked_plots_share_rounds_and_following(qtbot: QtBot, view: RingView) -> None:
    rollback = RollbackView(Theme("dark"))
    qtbot.addWidget(rollback)
    rollback.resize(600, 200)
    rollback.show()
    view.link_x(rollback)
    builder = sample_trace(rounds=300)
    for one in (rollback, view):
        one.show_run(builder.run)
    assert rollback.plot.x_range == pytest.approx(view.plot.x_range)
    qtbot.keyClick(view.plot, Qt.Key.Key_W)
    for _ in range(6):
        qtbot.keyClick(view.plot, Qt.Key.Key_A)
    assert rollback.plot.x_range == pytest.approx(view.plot.x_range)
    assert not rollback.plot.follow
    assert not view.plot.follow
    qtbot.keyClick(rollback.plot, Qt.Key.Key_End)
    assert view.plot.follow
    assert rollback.plot.x_range == pytest.approx(view.plot.x_range)
    assert view.plot.x_range[1] > 300


def test_linked_plots_agree_while_one_table_is_a_round_ahead(qtbot: QtBot, view: RingView) -> None:
    rollback = RollbackView(Theme("dark"))
    qtbot.addWidget(rollback)
    rollback.show()
    qtbot.waitExposed(rollback)
    view.link_x(rollback)
    builder = sample_trace(rounds=300)
    for one in (rollback, view):
        one.show_run(builder.run)
    builder.draft([], "a", ["x"])  # its slots are not written yet, those of the last round are
    builder.slots(("live",), 300)
    for one in (rollback, view):
        one.refresh()
    assert rollback.plot.x_range[1] > 301
    assert view.plot.x_range == pytest.approx(rollback.plot.x_range)


def test_another_theme(view: RingView) -> None:
    builder = sample_trace(rounds=30)
    view.show_run(builder.run)
    light = Theme("light")
    view.plot._theme.become("light")
    zoom(view, 0, 10)
    assert colour_at(view, 5.0, 0.0) == light.color("slot.live")


def test_the_plot_is_told_in_words(view: RingView) -> None:
    builder = TraceBuilder()
    builder.slots(("live", "stale"), 0)
    view.show_run(builder.run)
    assert view.plot.accessibleDescription() == "rounds: 1, slots of sequence 0: 2, stale: 1"


def test_a_narrow_view_puts_the_legend_below(view: RingView) -> None:
    builder = sample_trace(rounds=10)
    view.show_run(builder.run)
    QApplication.processEvents()
    assert view.legend.x() > view.plot.geometry().right()
    n_states, line = len(SLOT_STATES), view.legend.fontMetrics().height() + 1
    assert view.legend.heightForWidth(view.legend.width()) == n_states * line
    view.resize(320, 220)
    QApplication.processEvents()
    assert view.legend.y() > view.plot.geometry().bottom()
    assert view.legend.geometry().bottom() <= view.height()


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        ({"options": {"rollback": "planes", "faults": []}}, "spent"),
        ({"options": {"rollback": "planes", "faults": ["stale-plane"]}}, "stale"),
        ({"options": {"rollback": "planes"}, "lane_kind": "peer"}, "stale"),
        ({"source": {"engine": "other"}, "options": {}}, "stale"),
    ],
)
def test_stale_is_alarming_only_where_it_may_be_read(
    view: RingView, facts: dict[str, object], shown: str
) -> None:
    builder = TraceBuilder()
    builder.store.runs[builder.run_id].update(facts)
    builder.slots(("live", "stale"), 0)
    view.show_run(builder.run)
    assert states_of(view, 0, 1) == {0: ["live", shown]}
    assert (view.legend.trailing_labels == ["spent"]) is (shown == "spent")
    assert view.plot.accessibleDescription().endswith(f"stale: {int(shown == 'stale')}")
