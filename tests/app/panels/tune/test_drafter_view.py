"""The Drafter panel: empty, with one draft, with a chain of drafters, growing, out of sight."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from PySide6.QtCore import QEvent, QPoint, Qt
from PySide6.QtGui import QHelpEvent, QPainterPath, QPainterPathStroker
from PySide6.QtWidgets import QApplication, QLabel, QToolTip
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.panels.tune.drafter_view import DrafterView, SurvivalChart
from app.window.window import MainWindow
from engine.analysis.acceptance.counts import Survival
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.trace_builder import TraceBuilder
from tests.support.window_acts import settle

pytestmark = pytest.mark.shares_window


def add_drafts(
    store: TraceStore, run_id: int, first: int, stop: int, drafter: str = "draft-mtp"
) -> None:
    """Rounds of two drafted tokens; the second is rejected in every other one, where the target
    chose the candidate of rank 3."""
    for round_ in range(first, stop):
        ids = {"run_id": run_id, "round": round_, "seq_id": 0}
        n_accepted = 1 + round_ % 2
        for i, kind in enumerate(("accepted", "accepted" if n_accepted == 2 else "rejected")):
            store.tokens.append(
                **ids,
                pos=3 * round_ + i,
                kind=kind,
                token_id=i,
                draft_index=i,
                draft_p=0.95 - 0.5 * i,
                draft_top_id=[i, 8, 9, 10, 11],
            )
        kind = "bonus" if n_accepted == 2 else "replacement"
        store.tokens.append(**ids, pos=3 * round_ + n_accepted, kind=kind, token_id=9)
        store.rounds.append(
            **ids,
            drafter=drafter,
            num_draft_tokens=2,
            num_accepted_draft_tokens=n_accepted,
            num_emitted=n_accepted + 1,
            verify_width=3,
            verify_ms=9.0,
            draft_ms=1.0,
        )


def add_plain(store: TraceStore, run_id: int) -> None:
    store.rounds.append(
        run_id=run_id,
        round=0,
        seq_id=0,
        num_draft_tokens=0,
        num_emitted=1,
        verify_width=1,
        verify_ms=7.0,
    )


def begun() -> tuple[TraceStore, RunRef]:
    """A run with a prompt, and a round without a draft that took 7 ms."""
    store = TraceStore()
    run = RunRef(store, store.begin_run({}))
    store.rounds.append(
        run_id=run.run_id, round=0, seq_id=0, num_emitted=1, verify_width=9, verify_ms=90.0
    )
    add_plain(store, run.run_id)
    return store, run


@pytest.fixture
def view(qtbot: QtBot) -> DrafterView:
    view = DrafterView(Theme("dark"))
    qtbot.addWidget(view)
    view.resize(700, 700)
    view.show()
    qtbot.waitExposed(view)
    return view


def test_what_is_shown_is_what_was_drafted(view: DrafterView, qtbot: QtBot) -> None:
    store, run = begun()
    view.show_run(run)
    assert not view.has_rounds
    assert view.empty.words[0] == "No draft yet"
    add_drafts(store, 0, 1, 2)
    view.refresh()
    qtbot.waitUntil(lambda: view.has_rounds)
    assert "2 tokens" in view.quality.reliability_part.figure.text()
    assert view.quality.rank_part.figure.text() == "none recorded"  # nothing was rejected
    add_drafts(store, 0, 2, 41)
    view.refresh()
    qtbot.waitUntil(lambda: "40 drafts" in view.quality.survival_part.figure.text())
    assert view.quality.survival_part.figure.text().startswith("2.50 tokens/round")
    # 40 tokens of .95 accepted, 20 of 40 of .45: |.05| and |.05| apart
    assert (
        view.quality.reliability_part.figure.text()
        == "ECE 0.050 · 80 tokens · underconfident by 0.050"
    )
    assert view.quality.ranks.accessibleDescription().startswith("2nd: 0, 3rd: 20, 4th: 0")
    # 20 of 40 steps would have emitted one token more; no pass of 4 tokens was timed
    assert view.quality.trees.rows()[0] == ["2 leaves", "3.00", "–", "–"]
    names, rows = view.table()
    assert rows[9] == pytest.approx([0.9, 1.0, 40, 40, 0.95])
    assert rows[0][names.index("mean_confidence")] is None
    assert not view.choice.isVisible()


def is_whole(figure: QLabel) -> bool:
    room, wraps = figure.contentsRect(), Qt.TextFlag.TextWordWrap
    return room.contains(figure.fontMetrics().boundingRect(room, wraps, figure.text()))


@pytest.mark.parametrize("width", [200, 300, 700])
def test_figures_are_whole_at_any_width(view: DrafterView, qtbot: QtBot, width: int) -> None:
    store, run = begun()
    add_drafts(store, 0, 1, 41)
    view.resize(width, 700)
    view.show_run(run)
    for part in (view.quality.reliability_part, view.quality.survival_part):
        qtbot.waitUntil(partial(is_whole, part.figure))


def test_each_drafter_of_a_chain_can_be_chosen(view: DrafterView) -> None:
    store, run = begun()
    add_drafts(store, 0, 1, 21)
    add_drafts(store, 0, 21, 31, "draft-simple")
    view.show_run(run)
    assert view.choice.isVisible()
    assert [view.choice.itemText(i) for i in range(view.choice.count())] == [
        "all drafters",
        "draft-mtp",
        "draft-simple",
    ]
    assert "30 drafts" in view.quality.survival_part.figure.text()
    view.choice.setCurrentIndex(2)
    view.choice.activated.emit(2)
    assert "10 drafts" in view.quality.survival_part.figure.text()
    assert view.headline.text() == "draft-simple"


@pytest.mark.parametrize("accepted", [(40, 2, 1, 1, 0), (50, 50, 49, 5, 5), (20, 10, 5, 2, 1)])
def test_rates_are_written_beside_the_line(qtbot: QtBot, accepted: tuple[int, ...]) -> None:
    chart = SurvivalChart(Theme("dark"))
    qtbot.addWidget(chart)
    chart.resize(260, 180)
    judged = (50, *accepted[:-1])
    chart.set_survival(Survival(np.array(judged), np.array(accepted)))
    points = [chart.place(chart._x(i), rate) for i, rate in chart._rates()]
    line = QPainterPath(points[0])
    for point in points[1:]:
        line.lineTo(point)
    boxes = [chart._label_box(point) for point in points]
    drawn = QPainterPathStroker().createStroke(line)
    assert not any(drawn.intersects(box) for box in boxes)
    assert all(chart.rect().toRectF().contains(box) for box in boxes)
    assert not any(one.intersects(other) for one, other in pairwise(boxes))


def test_out_of_sight_it_neither_reads_nor_draws(window: MainWindow, qtbot: QtBot) -> None:
    view = window.plots["drafter"]
    store, run = begun()
    add_drafts(store, 0, 1, 9)
    window.feed.show_run(run)
    assert not view.has_rounds
    window.docks.reveal("drafter")
    qtbot.waitUntil(lambda: view.has_rounds)
    window.docks.reveal("findings")
    qtbot.waitUntil(lambda: not view.in_sight)
    assert view._facts is not None
    before = view._facts.quality().n_steps
    add_drafts(store, 0, 9, 20)
    window.feed.refresh()
    settle(qtbot)
    assert view._facts.quality().n_steps == before == 8
    window.docks.reveal("drafter")
    qtbot.waitUntil(lambda: "19 drafts" in view.quality.survival_part.figure.text())


def test_another_engine_may_tell_no_drafts(view: DrafterView) -> None:
    store = TraceStore()
    facts = {"source": {"engine": "llama.cpp"}, "stops": ["limit"]}
    view.show_run(RunRef(store, store.begin_run(facts)))
    assert view.empty.words[0] == "Not observed"
    assert "llama.cpp does not report the tokens of its drafts" in view.empty.words[1]


@pytest.mark.parametrize("width", [300, 700, 1400])
def test_every_width_and_theme_is_drawn(view: DrafterView, qtbot: QtBot, width: int) -> None:
    """Bars as high as the rates: what is accepted as a whole fills its bar to the top."""
    store, run = begun()
    add_drafts(store, 0, 1, 31)
    view.resize(width, 700)
    view.show_run(run)
    qtbot.waitUntil(lambda: view.has_rounds)
    theme = view.quality.reliability.theme
    theme.become("light")
    QApplication.processEvents()
    chart = view.quality.reliability
    assert chart.width() > 100 and chart.height() > 90
    image = chart.grab().toImage()
    tint = theme.color("accepted.tint").rgb()
    ratio = image.width() / chart.width()

    def is_filled(x: float, rate: float) -> bool:
        at = chart.place(x, rate)
        return image.pixel(round(at.x() * ratio), round(at.y() * ratio)) == tint

    assert is_filled(0.93, 0.9)
    assert is_filled(0.42, 0.42) and not is_filled(0.42, 0.6)
    assert not is_filled(0.2, 0.05)


def test_tooltips_tell_the_figures(view: DrafterView) -> None:
    store, run = begun()
    add_drafts(store, 0, 1, 31)
    view.show_run(run)
    for widget, at, words in (
        (view.quality.reliability, view.quality.reliability.place(0.45, 0.3), "15 of 30 tokens"),
        (view.quality.survival, view.quality.survival.place(0.75, 0.3), "15 of the 30 drafts"),
        (view.quality.ranks, QPoint(20, 2), "2nd: 0 of 15 rejections"),
    ):
        place = at if isinstance(at, QPoint) else at.toPoint()
        event = QHelpEvent(QEvent.Type.ToolTip, place, widget.mapToGlobal(place))
        QApplication.sendEvent(widget, event)
        assert words in QToolTip.text(), QToolTip.text()
    QToolTip.hideText()


def test_without_candidates_there_are_neither_ranks_nor_trees(view: DrafterView) -> None:
    builder = TraceBuilder()
    builder.prompt(["a"])
    for _ in range(3):
        builder.draft(["b"], "c", ["d"])
    view.show_run(builder.run)
    assert view.quality.rank_part.figure.text() == "none recorded"
    assert not view.quality.trees.isVisible()
    assert view.quality.survival.accessibleDescription() == "accepted up to index 0: 1.00, 1: 0.00"
