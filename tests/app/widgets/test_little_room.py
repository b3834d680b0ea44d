"""What views and widgets leave out, and what stays readable, where there is little room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import QObject, QPoint, QRect, Qt
from PySide6.QtGui import QFontMetrics, QScreen
from PySide6.QtWidgets import QApplication, QLabel, QStyle, QWidget
from pytestqt.qtbot import QtBot

from app.actions import Actions
from app.looks import Theme
from app.panels.conversation.conversation_view import ConversationView
from app.panels.divergence.divergence_view import DivergenceView
from app.panels.lab.breaks_view import BreaksView
from app.panels.plots.acceptance_view import AcceptanceView
from app.panels.plots.draft_histogram import DraftHistogram
from app.panels.plots.rollback_view import RollbackView
from app.panels.runs.runs_view import RunsView
from app.panels.tokens.end_card import COMPARE, FINDING, EndCard, NextStep, RunEnd
from app.panels.tokens.tokens_view import TokensView
from app.panels.tune.drafter_view import DrafterQuality
from app.panels.tune.results_view import ResultsView
from app.panels.tune.tune_view import TuneView
from app.panels.tune.what_if_view import WhatIfView
from app.trace_models.results import read
from app.trace_models.run_rows import RunOverlay
from app.widgets.build import vbox
from app.widgets.fitted_labels import LowPanel, ScrollPage
from app.window.window import MainWindow
from engine.trace.run_ref import RunRef
from tests.support.sweeps import write_results
from tests.support.timed_trace import timed_trace
from tests.support.trace_builder import sample_trace

NARROW, WIDE = 300, 1100


@pytest.fixture
def theme() -> Theme:
    return Theme("light")


def show(qtbot: QtBot, view: QWidget, width: int, height: int) -> None:
    qtbot.addWidget(view)
    view.resize(width, height)
    view.show()
    qtbot.waitExposed(view)
    QApplication.processEvents()


def show_inside(qtbot: QtBot, view: QWidget, width: int, height: int) -> QWidget:
    """As in a dock: a window of its own would be as large as all that is in it needs. What is
    returned holds the view and must be kept."""
    host = QWidget()
    view.setParent(host)
    show(qtbot, host, WIDE, WIDE)
    view.resize(width, height)
    view.show()
    QApplication.processEvents()
    return host


def is_whole(label: QLabel) -> bool:
    """Whether a label that wraps has the lines that its text needs."""
    return label.height() >= label.heightForWidth(label.width())


def columns(view: WhatIfView) -> list[str]:
    table = view.table_widget
    return [texts(view)[-1][at] for at in range(7) if not table.isColumnHidden(at)]


def texts(view: WhatIfView) -> list[list[str]]:
    """Of all cells, row by row, and of the head at last."""
    model = view.table_widget.model()
    rows = [[model.index(row, at).data() for at in range(7)] for row in range(model.rowCount())]
    return [*rows, [model.headerData(at, Qt.Orientation.Horizontal) for at in range(7)]]


def estimated(qtbot: QtBot, theme: Theme, width: int, height: int) -> WhatIfView:
    view = WhatIfView(theme)
    show(qtbot, view, width, height)
    store, _, run_id = timed_trace(60)
    view.show_run(RunRef(store, run_id))
    view.refresh()
    qtbot.waitUntil(lambda: view.table_widget.model().rowCount() > 0)
    QApplication.processEvents()
    return view


def test_a_narrow_estimate_leaves_the_parts_of_a_round_out(qtbot: QtBot, theme: Theme) -> None:
    view = estimated(qtbot, theme, NARROW, 100)
    assert columns(view) == ["n_max", "tok/round", "round ms", "tok/s"]
    table = view.table_widget
    metrics = table.fontMetrics()
    for row in texts(view):
        for at, text in enumerate(row):
            room = table.columnWidth(at) if not table.isColumnHidden(at) else WIDE
            assert metrics.horizontalAdvance(text) + 6 <= room
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


@pytest.mark.parametrize("width", [260, 300, 420, 520, 640, WIDE])
def test_no_head_of_an_estimate_is_cut(qtbot: QtBot, theme: Theme, width: int) -> None:
    view = estimated(qtbot, theme, width, 100)
    head = view.table_widget.horizontalHeader()
    for at in range(head.count()):
        if not head.isSectionHidden(at):
            assert head.sectionSize(at) >= head.sectionSizeHint(at)
    assert head.length() <= view.table_widget.viewport().width()


def test_the_best_is_told_where_the_rest_is_cut(qtbot: QtBot, theme: Theme) -> None:
    text = estimated(qtbot, theme, NARROW, 100).headline.text()
    assert text.startswith("Highest estimate, ") and text.index("tok/s") < text.index(
        "estimate from"
    )


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
    view.set_ready("")
    show(qtbot, view, view.minimumSizeHint().width(), 500)
    box = view.choice
    arrow = box.style().pixelMetric(QStyle.PixelMetric.PM_ScrollBarExtent)
    needed = box.fontMetrics().horizontalAdvance(box.currentText()) + arrow
    assert box.currentText() == "New conversation" and needed <= box.width()
    assert "No chat template" in view.how.text() and is_whole(view.how)


def test_the_longest_policy_has_room(qtbot: QtBot, theme: Theme) -> None:
    root = QObject()
    view = RunsView(theme, Actions(root))
    show(qtbot, view, NARROW, 400)
    text = view.table.fontMetrics().horizontalAdvance("checkpoint")
    assert text + 6 <= view.table.columnWidth(view.model.column_of("policy"))


def test_the_run_on_show_is_bold_and_has_room(qtbot: QtBot, theme: Theme) -> None:
    root = QObject()
    view = RunsView(theme, Actions(root))
    show(qtbot, view, NARROW, 400)
    bold = view.table.font()
    bold.setBold(True)
    text = QFontMetrics(bold).horizontalAdvance("Nov 24")
    assert text + 6 <= view.table.columnWidth(view.model.column_of("started"))


def test_prompts_take_the_room_that_marks_leave(qtbot: QtBot, theme: Theme) -> None:
    root = QObject()
    view = RunsView(theme, Actions(root))
    view.setCurrentIndex(1)
    show(qtbot, view, NARROW, 400)
    table, column = view.table, view.model.column_of("prompt")
    narrow = table.columnWidth(column)
    view.resize(1600, 400)
    QApplication.processEvents()
    wide = table.columnWidth(column)
    assert wide > 1.5 * narrow
    assert table.horizontalHeader().length() <= table.viewport().width()
    view.resize(NARROW, 400)
    assert table.columnWidth(column) == narrow
    table.setColumnWidth(column, narrow + 5)
    view.resize(1600, 400)
    assert table.columnWidth(column) == narrow + 5, "the user has dragged it"


def test_a_long_legend_leaves_the_lines_their_room(qtbot: QtBot, theme: Theme) -> None:
    view = AcceptanceView(theme)
    show(qtbot, view, 900, 95)
    view.show_run(sample_trace(rounds=6).run)
    view.refresh()
    QApplication.processEvents()
    assert view.rates.isVisible() and view.histogram.isVisible()
    view.set_overlay(RunOverlay(sample_trace(rounds=6).run, view.run))
    named = [replace(s, label=f"run 2 of demo-target, {s.label}") for s in view.legend._parts[1]]
    view.legend.set_leading(named)
    view._fit_legend()
    view.fit()
    QApplication.processEvents()
    assert not view.histogram.isVisible()
    assert view.plot.width() >= 24 * view.fontMetrics().averageCharWidth()
    view.set_overlay(None)
    assert view.histogram.isVisible()


def test_without_lanes_nothing_scrolls(qtbot: QtBot, theme: Theme) -> None:
    root = QObject()
    view = DivergenceView(theme, Actions(root))
    show(qtbot, view, 850, 245)
    (area,) = [a for a in view.findChildren(ScrollPage) if a.isVisible()]
    assert not area.verticalScrollBar().isVisible()


def test_a_page_that_becomes_wider_asks_for_the_width(qtbot: QtBot) -> None:
    part, host = QWidget(), QWidget()
    part.setMinimumWidth(100)
    vbox(ScrollPage(vbox(part)), of=host)
    show(qtbot, host, 150, 100)
    assert host.minimumSizeHint().width() < 200
    part.setMinimumWidth(400)
    qtbot.waitUntil(lambda: host.minimumSizeHint().width() > 400)


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
        "The run reached its limit of 128 tokens.",
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
    view.resize(NARROW, 300)
    QApplication.processEvents()
    assert not card.figures.isVisible(), "its sentences would take several lines"
    view.resize(600, 400)
    QApplication.processEvents()
    assert card.figures.isVisible() and card.why.isVisible()
    assert card.plain.y() > card.reason.y(), "next to the figures again"


@pytest.mark.parametrize(("width", "is_shown"), [(1200, True), (420, False)])
def test_a_long_sentence_of_the_card_takes_three_lines_or_none(
    qtbot: QtBot, width: int, is_shown: bool
) -> None:
    card = EndCard()
    _host = show_inside(qtbot, card, width, 300)
    long = "The same 26 tokens come over and over: acceptance there says nothing of the drafter. "
    end = RunEnd("It was stopped.", ("9 tokens",), None, False, NextStep(FINDING, long * 2))
    card.show_end(end, can_measure=True, can_compare=True)
    QApplication.processEvents()
    assert card.why.isVisible() is is_shown and card.step.isVisible()
    assert card.why.height() <= 3 * card.fontMetrics().lineSpacing() or not is_shown
    assert long in card.step.toolTip()


def test_a_low_and_narrow_card_has_one_button(qtbot: QtBot) -> None:
    card = EndCard()
    host = show_inside(qtbot, card, WIDE, 60)
    end = RunEnd("It was stopped.", ("9 tokens",), None, False, NextStep(COMPARE, "See whether."))
    card.show_end(end, can_measure=True, can_compare=True)
    card.set_low(True)
    least = card.minimumSizeHint().width()
    assert card.plain.isVisible() and card.step.isVisible() and least < NARROW
    card.resize(NARROW, 60)
    QApplication.processEvents()
    assert not card.plain.isVisible() and card.step.isVisible()
    assert card.minimumSizeHint().width() == least
    card.set_low(False)
    assert card.plain.isVisible() and card.step.isVisible()
    assert host.isVisible()


def test_a_break_rule_has_room_to_be_written(qtbot: QtBot, theme: Theme) -> None:
    view = BreaksView(theme)
    _host = show_inside(qtbot, view, view.minimumSizeHint().width(), 300)
    needed = view.line.fontMetrics().horizontalAdvance("accept_rate < 0.25")
    assert view.width() < NARROW and view.line.width() > needed


def test_nothing_is_under_way_before_the_first_comparison(window: MainWindow) -> None:
    window.actions_by_id["view.layout_divergence"].trigger()
    header = window.divergence.header
    assert header.isVisible() and not header.progress.isVisible()


def test_results_in_little_room_keep_their_table(
    window: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    view = ResultsView(Theme("light"), window.actions_by_id)
    empty = view.minimumSizeHint()
    view.show_results(read(write_results(tmp_path, 3, 8)))
    _host = show_inside(qtbot, view, WIDE, 500)
    least = view.minimumSizeHint()
    assert least.width() < NARROW and least.height() < 130 and empty == least
    assert view.pareto.x() + view.pareto.mapTo(view, QPoint()).x() > view.grid.width()
    view.resize(NARROW, 500)
    QApplication.processEvents()
    map_end = view.grid.mapTo(view, QPoint(0, view.grid.height())).y()
    assert view.pareto.isVisible() and view.pareto.mapTo(view, QPoint()).y() > map_end
    view.resize(NARROW, 300)
    QApplication.processEvents()
    assert view.table.isVisible() and view.grid.isVisible() and not view.pareto.isVisible()
    view.resize(least)
    QApplication.processEvents()
    assert view.table.isVisible() and not view.grid.isVisible()
    assert view.minimumSizeHint() == least


def test_the_choices_of_the_tune_view_stand_below_each_other(qtbot: QtBot, theme: Theme) -> None:
    view = TuneView(theme)
    _host = show_inside(qtbot, view, WIDE, 500)
    view.setCurrentWidget(view.page)
    view.drafter.addItem("draft-simple, ngram-simple")
    least = view.minimumSizeHint()
    assert least.width() < 260
    view.resize(least.width(), 400)
    QApplication.processEvents()
    assert view.drafter.y() > view.rule.geometry().bottom()
    assert view.readout.isVisible() and view.note.isVisible()
    low = view.minimumSizeHint().height()
    view.resize(least.width(), low)
    QApplication.processEvents()
    assert not view.readout.isVisible() and not view.note.isVisible()
    assert view.minimumSizeHint().height() == low


def test_a_panel_scrolls_on_a_low_screen(
    qtbot: QtBot, theme: Theme, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = TuneView(theme)
    view.setCurrentWidget(view.page)
    panel = LowPanel(view)
    _host = show_inside(qtbot, panel, NARROW, 500)
    needed = view.minimumSizeHint().height()
    assert view.height() == 500 and panel.minimumSizeHint().height() == needed
    monkeypatch.setattr(QScreen, "availableGeometry", lambda _: QRect(0, 0, 640, 2 * needed))
    least = panel.minimumSizeHint().height()
    assert least < needed
    panel.resize(NARROW, least)
    QApplication.processEvents()
    assert view.height() == needed and panel.verticalScrollBar().maximum() == needed - least


def test_a_low_plot_has_figures_at_its_axis_and_no_name(qtbot: QtBot, theme: Theme) -> None:
    view = RollbackView(theme)
    line = view.fontMetrics().height()
    _host = show_inside(qtbot, view, WIDE, 8 * line)
    view.show_run(sample_trace(rounds=6).run)
    QApplication.processEvents()
    axis = view.plot.getPlotItem().getAxis("bottom")
    assert axis.label.isVisible()
    view.resize(WIDE, view.minimumSizeHint().height())
    QApplication.processEvents()
    assert not axis.label.isVisible() and axis.style["showValues"]
    assert view.plot.box.height() > line / 2
    view.resize(WIDE, 8 * line)
    QApplication.processEvents()
    assert axis.label.isVisible()


def test_a_low_conversation_has_no_room_for_its_checkpoints(qtbot: QtBot, theme: Theme) -> None:
    view = ConversationView(theme)
    _host = show_inside(qtbot, view, NARROW, 500)
    assert view.checkpoints.isVisible()
    least = view.minimumSizeHint()
    view.resize(NARROW, least.height())
    QApplication.processEvents()
    assert not view.checkpoints.isVisible() and view.box.isVisible() and view.area.isVisible()
    assert view.minimumSizeHint().height() == least.height()


def test_rates_are_in_the_legend_of_acceptance_where_they_are_drawn(
    qtbot: QtBot, theme: Theme
) -> None:
    view = AcceptanceView(theme)
    show(qtbot, view, WIDE, 7 * view.fontMetrics().height())
    view.show_run(sample_trace(rounds=6).run)
    QApplication.processEvents()
    assert view.rates.isVisible() and "conditional" in view.legend.trailing_labels
    for width, height in ((NARROW, 300), (WIDE, 60)):
        view.resize(width, height)
        QApplication.processEvents()
        assert not view.rates.isVisible() and not view.legend.trailing_labels


def test_the_table_of_drafts_names_both_axes(qtbot: QtBot, theme: Theme) -> None:
    table = DraftHistogram(theme)
    show(qtbot, table, 200, 200)
    assert table.x_name == "drafted"
    table.resize(200, 80)
    assert table.x_name == "accepted by drafted"
    assert table.fontMetrics().horizontalAdvance(table.x_name) < 160
