"""Painting of a token area while a text grows: new rows alone, the same pixels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from PySide6.QtCore import QEvent, QObject, QPoint, QRect
from PySide6.QtGui import QImage, QPaintEvent
from PySide6.QtWidgets import QApplication

from app.looks import Theme
from app.panels.tokens.token_area import TokenArea
from tests.app.panels.tokens.conftest import Shown, every_kind


def mark_some(area: TokenArea) -> None:
    """Put the cursor on a token, which marks its round, and select others; search for a third."""
    area.go_to(6)
    area.set_follow(True)
    area.selection = (2, 5)
    area.set_hits(np.arange(0, 2000, 3))


@pytest.mark.parametrize("mark", [None, mark_some])
def test_what_streams_in_is_painted_as_if_all_were_painted(
    show: Callable[..., Shown], theme: Theme, mark: Callable[[TokenArea], None] | None
) -> None:
    """Scrolled pixels and new rows against one whole painting; a replay marks an older row."""
    builder = every_kind()
    area, run = show(builder, theme)
    area.clearFocus()
    if mark is not None:
        mark(area)
    view = area.viewport()
    for step in range(40):
        path = "restore" if step % 13 == 12 else ""
        builder.draft([" right", " words\n"], f" so {step}", [" wrong"], path=path)
        run.poll()
        area.grow()
        QApplication.processEvents()
        backing = area.window().backingStore().paintDevice()
        assert isinstance(backing, QImage)
        origin = view.mapTo(area.window(), QPoint(0, 0))
        kept = backing.copy(QRect(origin, view.size())).convertToFormat(QImage.Format.Format_RGB32)
        whole = view.grab().toImage().convertToFormat(QImage.Format.Format_RGB32)
        assert kept == whole, step
    assert area.verticalScrollBar().maximum() > 0, "it has scrolled"


@pytest.mark.parametrize("mark", [None, mark_some])
def test_one_more_token_paints_no_old_row(
    show: Callable[..., Shown], mark: Callable[[TokenArea], None] | None
) -> None:
    builder = every_kind()
    for step in range(60):
        builder.draft([" right", " words\n"], f" so {step}", [" wrong"])
    area, run = show(builder)
    area.clearFocus()
    if mark is not None:
        mark(area)
    QApplication.processEvents()
    builder.draft([], " last")
    rects: list[QRect] = []

    class Witness(QObject):
        def eventFilter(self, watched: QObject, event: QEvent) -> bool:
            if isinstance(event, QPaintEvent):
                rects.append(event.rect())
            return False

    witness = Witness()
    area.viewport().installEventFilter(witness)
    run.poll()
    area.grow()
    area.set_hits(area._hits[area._hits >= 0])
    QApplication.processEvents()
    assert rects and max(rect.height() for rect in rects) < 4 * area._metrics.row_height
