"""The chips of the status line: what a new figure costs the window around them."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject
from PySide6.QtWidgets import QApplication, QHBoxLayout, QWidget

from app.window.status_line import FigureChip


class _LayoutRequests(QObject):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        self.n += event.type() == QEvent.Type.LayoutRequest
        return False


def test_only_a_wider_figure_arranges_the_window_anew(qtbot):
    window, chip = QWidget(), FigureChip("tokens/s", "0000.0", "speed")
    QHBoxLayout(window).addWidget(chip)
    qtbot.addWidget(window)
    window.show()
    QApplication.processEvents()
    requests = _LayoutRequests()
    window.installEventFilter(requests)
    for text in ("9.5", "112.5"):
        chip.set_text(text)
        QApplication.processEvents()
    assert chip.text == "112.5"
    assert requests.n == 0
    chip.set_text("123456789.123456789")
    QApplication.processEvents()
    assert requests.n > 0


def test_a_shorter_figure_leaves_the_room_to_the_next(qtbot):
    chip = FigureChip("tokens/s", "0", "speed")
    qtbot.addWidget(chip)
    narrow = chip.sizeHint().width()
    chip.set_text("1234567")
    wide = chip.sizeHint().width()
    chip.set_text("9")
    assert narrow < wide == chip.sizeHint().width()
