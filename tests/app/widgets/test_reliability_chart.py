"""The chart of confidence: the count of each bar can be read."""

from __future__ import annotations

import numpy as np
import pytest
from PySide6.QtCore import QRect
from PySide6.QtGui import QImage
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.widgets.reliability_chart import ReliabilityChart
from engine.analysis.draft_quality import Calibration


@pytest.mark.parametrize(("n", "accepted"), [(4, 0), (40, 4)])
def test_the_line_of_an_interval_goes_through_no_count(
    qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, n: int, accepted: int
) -> None:
    chart = ReliabilityChart(Theme("light"))
    qtbot.addWidget(chart)
    chart.resize(400, 300)
    chart.set_calibration(Calibration.of(np.full(n, 0.27), np.arange(n) < accepted))
    foot, metrics = chart.place(0.25, 0.0).toPoint(), chart.fontMetrics()
    wide, high = metrics.horizontalAdvance(f"{n}") - 2, metrics.height() - 4

    def count() -> QImage:
        """As it is drawn, without what lies on the axis below it."""
        return chart.grab(
            QRect(foot.x() - wide // 2, foot.y() - metrics.height() + 1, wide, high)
        ).toImage()

    seen, whole = count(), chart.grab().toImage()
    monkeypatch.setattr(Calibration, "interval", (np.ones(10), np.ones(10)))
    assert whole != chart.grab().toImage(), "the interval is drawn"
    assert seen == count()
