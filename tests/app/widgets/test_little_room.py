"""What views and widgets leave out, and what stays readable, where there is little room."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QObject
from PySide6.QtWidgets import QApplication, QLabel, QStyle, QWidget
from pytestqt.qtbot import QtBot

from app.actions.actions import Actions
from app.looks.theme import Theme, load_theme
from app.models.run_end import COMPARE, NextStep, RunEnd
from app.shell.window import MainWindow
from app.views.conversation import ConversationView
from app.views.rollback import RollbackView
from app.views.runs import RunsView
from app.views.tokens import TokensView
from app.views.tune import TuneView
from app.views.what_if import WhatIfView
from app.widgets.drafter_quality import DrafterQuality
from engine.trace.run_ref import RunRef
from tests.support.timed_trace import timed_trace
from tests.support.trace_builder import sample_trace

NARROW, WIDE = 300, 1100


@pytest.fixture
def theme() -> Theme:
    return load_theme("light")


def show(qtbot: QtBot, view: QWidget, width: int, height: int) -> None:
    qtbot.addWidget(view)
    view.resize(width, height)
    view.show()
    qtbot.waitExposed(view)
    QApplication.processEvents()


def is_whole(label: QLabel) -> bool:
    """Whether a label that wraps has the lines that its text needs."""
    return label.height() >= label.heightForWidth(label.width())


def columns(view: WhatIfView) -> list[str]:
    table = view.table_widget
    heads = [table.horizontalHeaderItem(at) for at in range(table.columnCount())]
    return [h.text() for at, h in enumerate(heads) if h and not table.isColumnHidden(at)]


def estimated(qtbot: QtBot, theme: Theme, width: int, height: int) -> WhatIfView:
    view = WhatIfView(theme)
    show(qtbot, view, width, height)
    store, _, run_id = timed_trace(60)
    view.show_run(RunRef(store, run_id))
    view.refresh()
    qtbot.waitUntil(lambda: view.table_widget.rowCount() > 0, timeout=5000)
    QApplication.processEvents()
    return view


def test_a_narrow_estimate_leaves_the_parts_of_a_round_out(qtbot: QtBot, theme: Theme) -> None:
    view = estimated(qtbot, theme, NARROW, 100)
    assert columns(view) == ["n_max", "tok/round", "round ms", "tok/s"]
    table = view.table_widget
    metrics = table.fontMetrics()
    for row in range(-1, table.rowCount()):
        for at in range(table.columnCount()):
            item = table.item(row, at) if row >= 0 else table.horizontalHeaderItem(at)
            assert item is not None
            room = table.columnWidth(at) if not table.isColumnHidden(at) else WIDE
            assert metrics.horizontalAdvance(item.text()) + 6 <= room
    assert not view.plot.isVisible() and not view.note.isVisible()
    assert "Assumed" in view.headline.toolTip(), "the note is not lost"
    low = view.minimumSizeHint().height()
    view.resize(NARROW, 500)
    QApplication.processEvents()
    assert view.plot.isVisible() and view.note.isVisible()
    assert view.plot.y() > table.geometry().bottom(), "below the table"
    assert view.minimumSizeHint().height() == low, "it can be low again"
    view.resize(WIDE, 500)
    QApplication.processEvents()
    assert len(columns(view)) == 7 and view.plot.x() > table.geometry().right()


def test_the_best_is_told_where_the_rest_is_cut(qtbot: QtBot, theme: Theme) -> None:
    text = estimated(qtbot, theme, NARROW, 100).headline.text()
    assert text.startswith("Best n_max ") and text.index("tok/s") < text.index("estimate from")


def test_what_stood_side_by_side_takes_no_width_when_it_stands_below(
    qtbot: QtBot, theme: Theme
) -> None:
    quality = DrafterQuality(theme)
    show(qtbot, quality, NARROW, 400)
    least = quality.minimumSizeHint().width()
    for width in (WIDE, 500, NARROW):
        quality.resize(width, 400)
        QApplication.processEvents()
        assert quality.minimumSizeHint().width() == least


def test_the_tune_view_can_be_narrow_again(qtbot: QtBot, theme: Theme) -> None:
    view = TuneView(theme)
    show(qtbot, view, NARROW, 400)
    view.setCurrentWidget(view.page)
    least = view.minimumSizeHint().width()
    view.resize(WIDE, 400)
    QApplication.processEvents()
    assert view.quality.isVisible()
    assert view.minimumSizeHint().width() < least + view.quality.minimumSizeHint().width() / 2
    view.headline.setText("Best: n_max 3, p_min 0.3 → 646 tok/s, 1.53× plain. Now: n_max 3 → 646")
    view.resize(least, 400)
    QApplication.processEvents()
    assert view.headline.height() > 1.5 * view.fontMetrics().height() and is_whole(view.headline)


def test_the_conversation_names_itself_whole(qtbot: QtBot, theme: Theme) -> None:
    view = ConversationView(theme)
    show(qtbot, view, view.minimumSizeHint().width(), 500)
    box = view.choice
    arrow = box.style().pixelMetric(QStyle.PixelMetric.PM_ScrollBarExtent)
    needed = box.fontMetrics().horizontalAdvance(box.currentText()) + arrow
    assert box.currentText() == "New conversation" and needed <= box.width()
    assert "No chat template" in view.how.text() and is_whole(view.how)


def test_the_time_of_a_start_has_room(qtbot: QtBot, theme: Theme) -> None:
    root = QObject()
    view = RunsView(theme, Actions(root))
    show(qtbot, view, NARROW, 400)
    column = view.model.column_of("started")
    text = view.table.fontMetrics().horizontalAdvance("2026-11-24 00:28:40")
    assert text + 6 <= view.table.columnWidth(column)


def test_a_legend_below_leaves_half_the_height_to_its_plot(qtbot: QtBot, theme: Theme) -> None:
    view = RollbackView(theme)
    show(qtbot, view, 200, 90)
    view.show_run(sample_trace(rounds=6).run)
    QApplication.processEvents()
    assert not view.legend.isVisible() or view.plot.height() >= view.legend.height()
    view.resize(200, 60)
    QApplication.processEvents()
    assert not view.legend.isVisible()
    view.resize(200, 300)
    QApplication.processEvents()
    assert view.legend.isVisible()


def test_a_legend_has_whole_lines_alone(qtbot: QtBot, theme: Theme) -> None:
    view = RollbackView(theme)
    show(qtbot, view, 900, 300)
    view.show_run(sample_trace(rounds=6).run)
    legend = view.legend
    line = legend.entry_sizes()[0].height()
    legend.set_column(True)
    legend.setFixedSize(200, line + line // 2)
    image = legend.grab().toImage()
    ground = image.pixel(199, 0)
    below = {image.pixel(x, y) for x in range(200) for y in range(line, image.height())}
    above = {image.pixel(x, y) for x in range(200) for y in range(line)}
    assert below == {ground} and len(above) > 1


def test_the_card_at_the_end_leaves_room_for_the_text(qtbot: QtBot, theme: Theme) -> None:
    view = TokensView(theme)
    show(qtbot, view, 600, 170)
    view.show_run(sample_trace(rounds=6).run)
    end = RunEnd(
        "The text came to its limit of 128 tokens.",
        ("128 tokens", "176 tok/s"),
        None,
        False,
        NextStep(COMPARE, "See whether rolling back leaves the text as it would be without."),
    )
    card = view.end_card
    card.show_end(end, can_measure=True, can_compare=True)
    QApplication.processEvents()
    assert card.reason.isVisible() and card.plain.isVisible() and card.step.isVisible()
    assert 2 * card.height() < view.areas[0].height()
    assert "176 tok/s" in card.reason.toolTip()
    view.resize(600, 400)
    QApplication.processEvents()
    assert card.figures.isVisible() and card.why.isVisible()
    assert card.plain.y() > card.reason.y(), "beside the figures again"


def test_nothing_is_under_way_before_the_first_comparison(window: MainWindow) -> None:
    window.actions_by_id["view.layout_divergence"].trigger()
    header = window.divergence.header
    assert header.isVisible() and not header.progress.isVisible()
