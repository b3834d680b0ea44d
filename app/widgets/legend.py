"""Legends, whose samples are drawn like the plots themselves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from PySide6.QtCore import QPoint, QRect, QSize, Qt
from PySide6.QtGui import QColor, QPainter
from PySide6.QtWidgets import QSizePolicy

from app.looks import Theme, fixed_font
from app.trace_models.token_stream import KIND
from app.widgets.build import TipWidget
from app.widgets.token_paint import PlacedToken, TokenMetrics, TokenPainter
from engine.trace.token_text import MEANING

_SWATCH = 10
_MOST_COLUMNS = 3


class FlowLegend(TipWidget):
    """Entries from left to right, wrapped at the width. gap: between entries."""

    gap = 12
    _column = False

    def __init__(self, name: str) -> None:
        super().__init__()
        self.set_beside(False)
        self.setAccessibleName(name)

    @abstractmethod
    def entry_sizes(self) -> list[QSize]:
        """The room that each entry needs."""

    @abstractmethod
    def paint_entry(self, painter: QPainter, index: int, box: QRect) -> None:
        """Draw one entry."""

    @abstractmethod
    def entry_tip(self, index: int) -> str:
        """What the entry means, for its tooltip."""

    def set_column(self, column: bool) -> None:
        """One entry per line, or as many as fit."""
        self._column = column
        self.updateGeometry()
        self.update()

    def set_beside(self, beside: bool) -> None:
        """Place it next to a plot that may be lower, or below it with all entries visible."""
        least = QSizePolicy.Policy.Ignored if beside else QSizePolicy.Policy.Minimum
        policy = QSizePolicy(QSizePolicy.Policy.Preferred, least)
        policy.setHeightForWidth(not beside)
        self.setSizePolicy(policy)

    def hasHeightForWidth(self) -> bool:
        return self.sizePolicy().hasHeightForWidth()

    def heightForWidth(self, width: int) -> int:
        boxes = self.boxes(width)
        return boxes[-1].bottom() + 1 if boxes else 0

    def sizeHint(self) -> QSize:
        width = sum(size.width() + self.gap for size in self.entry_sizes())
        return QSize(width, self.heightForWidth(width))

    def minimumSizeHint(self) -> QSize:
        sizes = self.entry_sizes()
        return QSize(max((size.width() for size in sizes), default=0), 0)

    def draw(self, painter: QPainter) -> None:
        for index, box in enumerate(self.boxes(self.width())):
            if box.bottom() < self.height():  # half a line cannot be read
                self.paint_entry(painter, index, box)

    def tip_at(self, at: QPoint) -> str:
        found = (i for i, box in enumerate(self.boxes(self.width())) if box.contains(at))
        return next(map(self.entry_tip, found), "")

    def boxes(self, width: int) -> list[QRect]:
        """Rectangles of the entries at this width."""
        boxes, place = [], QPoint(0, 0)
        for size in self.entry_sizes():
            if place.x() and (self._column or place.x() + size.width() > width):
                place = QPoint(0, place.y() + size.height())
            boxes.append(QRect(place, size))
            place += QPoint(size.width() + self.gap, 0)
        return boxes


class TokenLegend(FlowLegend):
    """Token kinds, each name painted as a token of that kind."""

    def __init__(self, theme: Theme) -> None:
        super().__init__("Kinds of tokens")
        font = fixed_font()
        font.setPointSizeF(font.pointSizeF() * 0.9)
        self._metrics = TokenMetrics(font)
        self._kinds = list(KIND)
        self._painter = TokenPainter(theme, self._metrics)

    def entry_sizes(self) -> list[QSize]:
        height = self._metrics.row_height
        return [QSize(round(self._metrics.width(kind)), height) for kind in self._kinds]

    def paint_entry(self, painter: QPainter, index: int, box: QRect) -> None:
        kind = self._kinds[index]
        self._painter.paint(painter, [PlacedToken(kind, KIND[kind], box.x(), box.y(), box.width())])

    def entry_tip(self, index: int) -> str:
        return MEANING[self._kinds[index]]


@dataclass(frozen=True, slots=True)
class Swatch:
    """A coloured sample with a label. `draw` paints it into a square."""

    label: str
    role: str
    tip: str
    draw: Callable[[QPainter, QRect, QColor], None]


class SwatchLegend(FlowLegend):
    """The samples of a plot."""

    def __init__(self, name: str, swatches: Sequence[Swatch], theme: Theme) -> None:
        super().__init__(name)
        self._parts = [list[Swatch](), list(swatches), list[Swatch]()]
        """Entries before the initial ones, those, and entries after them."""
        self._theme = theme

    @property
    def labels(self) -> list[str]:
        """Labels of the initial swatches."""
        return [swatch.label for swatch in self._parts[1]]

    @property
    def leading_labels(self) -> list[str]:
        """Labels of the entries before them."""
        return [swatch.label for swatch in self._parts[0]]

    @property
    def trailing_labels(self) -> list[str]:
        """Labels of the entries after them."""
        return [swatch.label for swatch in self._parts[2]]

    def set_leading(self, swatches: Sequence[Swatch]) -> None:
        """Replace the entries before the others."""
        self._replace(0, swatches)

    def set_trailing(self, swatches: Sequence[Swatch]) -> None:
        """Replace the entries after the others."""
        self._replace(2, swatches)

    def _replace(self, part: int, swatches: Sequence[Swatch]) -> None:
        if list(swatches) != self._parts[part]:
            self._parts[part] = list(swatches)
            self.updateGeometry()
            self.update()

    def column_width(self, widest: str) -> int:
        """Width of a single column with `widest` as longest label, and of the others if wider."""
        advance = self.fontMetrics().horizontalAdvance
        around = (*self.leading_labels, *self.trailing_labels)
        return _SWATCH + 5 + max(map(advance, (widest, *around)))

    def width_in(self, height: int, widest: str) -> int:
        """Width of the narrowest legend within this height, one column if that suffices; `widest`
        as in `column_width`."""
        one = self.column_width(widest)
        n_lines = max(1, height // (self.fontMetrics().height() + 1))
        n_columns = min(-(-len(self._entries) // n_lines), _MOST_COLUMNS)
        return n_columns * (one + self.gap) - self.gap

    def set_label(self, index: int, label: str) -> None:
        swatches = list(self._parts[1])
        swatches[index] = replace(swatches[index], label=label)
        self._replace(1, swatches)

    def entry_sizes(self) -> list[QSize]:
        metrics = self.fontMetrics()
        return [
            QSize(_SWATCH + 5 + metrics.horizontalAdvance(swatch.label), metrics.height() + 1)
            for swatch in self._entries
        ]

    def paint_entry(self, painter: QPainter, index: int, box: QRect) -> None:
        swatch = self._entries[index]
        square = QRect(box.x(), box.center().y() - _SWATCH // 2, _SWATCH, _SWATCH)
        painter.save()
        swatch.draw(painter, square, self._theme.color(swatch.role))
        painter.restore()
        painter.setPen(self._theme.color("ui.muted"))
        left = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        painter.drawText(box.adjusted(_SWATCH + 5, 0, 0, 0), left, swatch.label)

    def entry_tip(self, index: int) -> str:
        return self._entries[index].tip

    @property
    def _entries(self) -> list[Swatch]:
        return [swatch for part in self._parts for swatch in part]
