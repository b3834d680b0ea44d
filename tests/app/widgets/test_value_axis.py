"""Figures of a left axis keep clear of each other."""

from __future__ import annotations

import pytest
from PySide6.QtGui import QPainter, QPicture
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.widgets.plot_surface import wider_step
from app.widgets.round_plot import RoundPlot


def test_round_steps() -> None:
    steps = [0.2]
    for _ in range(5):
        steps.append(wider_step(steps[-1]))
    assert steps == pytest.approx([0.2, 0.5, 1, 2, 5, 10])


@pytest.mark.parametrize("high", [3.0, 7.0, 19.0, 106.0, 4500.0])
@pytest.mark.parametrize("lines", [2.2, 3.0, 5.0, 20.0])
def test_figures_have_a_line_each(qtbot: QtBot, high: float, lines: float) -> None:
    plot = RoundPlot(Theme("light"), "tokens")
    qtbot.addWidget(plot)
    axis, line = plot.getPlotItem().getAxis("left"), plot.fontMetrics().height()
    step, offset = axis.tickSpacing(0.0, high, lines * line)[0]
    assert offset == 0
    assert high / step <= max(lines, 2.5), "one figure for each line"
    assert high / step >= 1, "more than the zero"


def test_a_name_longer_than_the_axis_is_left_out(qtbot: QtBot) -> None:
    plot = RoundPlot(Theme("light"), "tokens in a cell")
    qtbot.addWidget(plot)
    plot.show()
    label = plot.getPlotItem().getAxis("left").label
    for height, named in ((400, True), (60, False), (400, True)):
        plot.resize(600, height)
        qtbot.waitUntil(lambda named=named: label.isVisible() is named)
        plot._theme.become("dark" if named else "light")
        assert label.isVisible() is named


def test_the_upper_edge_cuts_no_figure(qtbot: QtBot) -> None:
    plot = RoundPlot(Theme("light"), "tokens")
    qtbot.addWidget(plot)
    plot.resize(400, 200)
    plot.show()
    axis = plot.getPlotItem().getAxis("left")
    picture = QPicture()
    for top in (100.0, 130.0):
        plot.box.setYRange(0.0, top, padding=0)
        painter = QPainter(picture)
        *_, texts = axis.generateDrawSpecs(painter)
        painter.end()
        tops = [axis.mapRectToScene(box).top() for box, *_ in texts]
        assert texts and min(tops) >= 0, f"{top}: {texts}"
        assert ("100" in [words for *_, words in texts]) is (top == 130.0)
    for height in range(120, 200):
        plot.resize(400, height)
        plot.box.setYRange(0.0, 104.0, padding=0)
        painter = QPainter(picture)
        *_, texts = axis.generateDrawSpecs(painter)
        painter.end()
        assert min(axis.mapRectToScene(box).top() for box, *_ in texts) >= 0, height


def test_another_theme_scales_no_figure(qtbot: QtBot) -> None:
    plot = RoundPlot(Theme("light"), "share")
    qtbot.addWidget(plot)
    plot.resize(400, 300)
    plot.show()
    axis = plot.getPlotItem().getAxis("left")
    plot.box.setYRange(0.0, 0.025, padding=0)
    qtbot.waitUntil(axis.label.isVisible)
    for theme in ("dark", "light"):
        plot._theme.become(theme)
        picture = QPicture()
        painter = QPainter(picture)
        *_, texts = axis.generateDrawSpecs(painter)
        painter.end()
        figures = [float(words) for *_, words in texts]
        assert len(figures) > 1 and max(figures) <= 0.025, f"{theme}: {figures}"
