"""Where the target's token was among the drafter's candidates when the drafted one was rejected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PySide6.QtCore import QEvent, QRectF, QSize, Qt
from PySide6.QtGui import QHelpEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.looks.theme import Theme
from app.trace_models.plain_tip import plain_tip

_GAP = 4
_ORDINALS = {1: "1st", 2: "2nd", 3: "3rd"}


class RankBars(QWidget):
    """A bar for each rank, the share of the rejections next to it; the last bar: beyond them."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._rows: list[tuple[str, int]] = []
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName("Rank of the target's token at rejections")
        self.set_counts(np.zeros(6, np.int64))

    def set_counts(self, by_rank: np.ndarray) -> None:
        """Rejections by rank from 1, the last one: not among the candidates, int64 [n + 1]. The
        first rank is left out where nothing has it: the first candidate is what is drafted."""
        counts: Sequence[int] = by_rank.tolist()
        n = len(counts) - 1
        rows = [(_ORDINALS.get(r, f"{r}th"), counts[r - 1]) for r in range(1, n + 1)]
        self._rows = [*(rows if counts[0] else rows[1:]), (f"beyond {n}", counts[n])]
        self.setAccessibleDescription(", ".join(f"{name}: {k:,}" for name, k in self._rows))
        self.updateGeometry()
        self.update()

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._theme = theme
        self.update()

    def sizeHint(self) -> QSize:
        width = 30 * self.fontMetrics().averageCharWidth()
        return QSize(width, self._row() * len(self._rows))

    def minimumSizeHint(self) -> QSize:
        return QSize(self.sizeHint().width() // 2, self.sizeHint().height())

    def paintEvent(self, _event: QPaintEvent) -> None:
        painter = QPainter(self)
        theme, metrics = self._theme, self.fontMetrics()
        left = max(metrics.horizontalAdvance(f"{name}  ") for name, _ in self._rows)
        room = max(0, self.width() - left - metrics.horizontalAdvance("100 %  "))
        total = sum(n for _, n in self._rows)
        most = max(n for _, n in self._rows)
        centre = Qt.AlignmentFlag.AlignVCenter
        for at, (name, n) in enumerate(self._rows):
            top, height = at * self._row(), self._row()
            painter.setPen(theme.color("ui.muted"))
            beside = QRectF(0, top, left - _GAP, height)
            painter.drawText(beside, centre | Qt.AlignmentFlag.AlignRight, name)
            width = room * n / most if most else 0.0
            bar = QRectF(left, top + _GAP / 2, width, height - _GAP)
            is_last = at == len(self._rows) - 1
            painter.fillRect(bar, theme.color("rejected.tint" if is_last else "accepted.tint"))
            if total:
                painter.setPen(theme.color("ui.text"))
                after = QRectF(left + width + _GAP, top, self.width() - left - width, height)
                painter.drawText(after, centre, f"{100 * n / total:.0f} %")
        painter.end()

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            at = event.pos().y() // self._row()
            text = ""
            if 0 <= at < len(self._rows):
                name, n = self._rows[at]
                text = f"{name}: {n:,} of {sum(k for _, k in self._rows):,} rejections"
            QToolTip.showText(event.globalPos(), plain_tip(text), self)
            return True
        return super().event(event)

    def _row(self) -> int:
        return self.fontMetrics().height() + _GAP
