"""Token drawing: every kind has a colour and a second mark that is visible without colour. Above
and below tokens: the selection, search hits, the current round and token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from PySide6.QtCore import QLine, QPoint, QPointF, QRect, QRectF, Qt
from PySide6.QtGui import QColor, QFont, QFontMetricsF, QPainter, QPen, QStaticText

from app.looks import Theme
from app.trace_models.token_stream import KIND, PLAIN
from engine.trace.records import TOKEN_KINDS

_ABOVE = 2
_BELOW = 5
_UNCOMPARED = KIND["ignored"], KIND["side"]


class TokenMetrics:
    """Widths of texts and the vertical measures of a row, for one font."""

    def __init__(self, font: QFont) -> None:
        self.font = font
        self.italic = QFont(font)
        self.italic.setItalic(True)
        self._metrics = QFontMetricsF(font)
        self._widths: dict[str, float] = {}
        self.uprights: dict[str, QStaticText] = {}
        """Texts prepared for painting, and the same in italics; `shaped` adds to them."""
        self.italics: dict[str, QStaticText] = {}
        self.ascent = self._metrics.ascent()
        self.strike = _ABOVE + round(self.ascent - self._metrics.strikeOutPos())
        self.tint_height = round(self.ascent + self._metrics.descent()) + 1
        self.under = _ABOVE + self.tint_height
        self.row_height = self.under + _BELOW

    def width(self, text: str) -> float:
        """Advance of a text in pixels; wide characters and emoji count as the font has them."""
        width = self._widths.get(text)
        if width is None:
            width = self._widths[text] = self._metrics.horizontalAdvance(text)
        return width

    def shaped(self, text: str, *, italic: bool) -> QStaticText:
        """A text prepared for painting; only ASCII texts are placed by the font's own ascent."""
        known = self.italics if italic else self.uprights
        ready = known.get(text)
        if ready is None:
            ready = known[text] = QStaticText(text)
            ready.setTextFormat(Qt.TextFormat.PlainText)
            ready.prepare(font=self.italic if italic else self.font)
        return ready


class PlacedToken(NamedTuple):
    """One token, or the part of it that lies in a row, at its place in the viewport."""

    text: str
    kind: int
    x: float
    y: int
    width: float
    replayed: bool = False


@dataclass(slots=True)
class _Batch:
    """Shapes of one style, collected so that each kind of shape is drawn in one call."""

    tints: list[QRect] = field(default_factory=list)
    bars: list[QRect] = field(default_factory=list)
    boxes: list[QRect] = field(default_factory=list)
    dotted: list[QLine] = field(default_factory=list)
    dashed: list[QLine] = field(default_factory=list)
    dots: list[QPoint] = field(default_factory=list)
    texts: list[tuple[float, int, str]] = field(default_factory=list)


class TokenPainter:
    """Paints marks of all kinds in the colours of a theme.

    accepted: tint, solid underline · rejected: tint, struck out · ignored, side: hollow box,
    italic · replacement: double underline · bonus: dot · replayed: dotted underline · unknown:
    dashed underline · target: plain · prompt: muted.
    """

    def __init__(self, theme: Theme, metrics: TokenMetrics) -> None:
        self.metrics, self._theme = metrics, theme
        self._tint_height, self._under = metrics.tint_height, metrics.under
        self._strike = metrics.strike
        theme.apply(self._recolour)

    def _recolour(self) -> None:
        theme = self._theme
        self._text = [theme.color(f"{kind}.text") for kind in KIND]
        self._tint = {KIND[kind]: theme.color(f"{kind}.tint") for kind in ("accepted", "rejected")}
        self._line = {
            KIND[kind]: theme.color(f"{kind}.line")
            for kind in (
                "accepted",
                "rejected",
                "ignored",
                "side",
                "replacement",
                "bonus",
                "unknown",
            )
        }
        self._neutral = theme.color("replayed.line")

    def paint(self, painter: QPainter, marks: Iterable[PlacedToken]) -> None:
        """Draw the marks; the painter's pen, brush and font are not restored."""
        batches: dict[int, _Batch] = defaultdict(_Batch)
        for mark in marks:
            kind = mark.kind
            if mark.replayed or kind not in PLAIN:
                self._collect(batches[kind], mark)
            else:
                batches[kind].texts.append((mark.x, mark.y + _ABOVE, mark.text))
        painter.setPen(Qt.PenStyle.NoPen)
        for kind, batch in batches.items():
            if batch.tints:
                painter.setBrush(self._tint[kind])
                painter.drawRects(batch.tints)
        for kind, batch in batches.items():
            painter.setPen(self._text[kind])
            self._draw_texts(painter, batch, italic=kind in _UNCOMPARED)
        for kind, batch in batches.items():
            self._draw_lines(painter, batch, self._line.get(kind, self._neutral))

    def _draw_texts(self, painter: QPainter, batch: _Batch, *, italic: bool) -> None:
        metrics, draw = self.metrics, painter.drawStaticText
        shaped = metrics.italics if italic else metrics.uprights
        painter.setFont(metrics.italic if italic else metrics.font)
        for x, y, text in batch.texts:
            if text.isspace():
                continue
            if text.isascii():
                draw(QPointF(x, y), shaped.get(text) or metrics.shaped(text, italic=italic))
            else:
                # a fallback font would move the baseline of a QStaticText
                painter.drawText(QPointF(x, y + metrics.ascent), text)

    def _draw_lines(self, painter: QPainter, batch: _Batch, colour: QColor) -> None:
        if batch.bars:
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(colour)
            painter.drawRects(batch.bars)
        if batch.boxes:
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.setPen(QPen(colour, 1))
            painter.drawRects(batch.boxes)
        for lines, dash in ((batch.dotted, 1.0), (batch.dashed, 3.0)):
            if lines:
                pen = QPen(colour, 2)
                pen.setCapStyle(Qt.PenCapStyle.FlatCap)
                pen.setDashPattern([dash, dash])
                painter.setPen(pen)
                painter.drawLines(lines)
        if batch.dots:
            painter.setRenderHint(QPainter.RenderHint.Antialiasing)
            painter.setPen(QPen(colour, 3.5, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap))
            painter.drawPoints(batch.dots)
            painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)

    def _collect(self, batch: _Batch, mark: PlacedToken) -> None:
        text, kind, x, y, width_, replayed = mark
        # whole pixels, one of them left free as the border between two tokens
        left, top = round(x), y + _ABOVE
        width = max(1, round(x + width_) - left - 1)
        batch.texts.append((x, top, text))
        style = TOKEN_KINDS[kind]
        height, under = self._tint_height, y + self._under
        if style in ("accepted", "rejected"):
            batch.tints.append(QRect(left, top, width, height))
        if replayed or style == "replayed":
            batch.dotted.append(QLine(left, under + 1, left + width, under + 1))
        elif style == "unknown":
            batch.dashed.append(QLine(left, under + 1, left + width, under + 1))
        elif style == "accepted":
            batch.bars.append(QRect(left, under, width, 2))
        elif style == "rejected":
            batch.bars.append(QRect(left, y + self._strike, width, 1))
        elif kind in _UNCOMPARED:
            batch.boxes.append(QRect(left, top, width - 1, height - 1))
        elif style == "replacement":
            batch.bars.append(QRect(left, under, width, 1))
            batch.bars.append(QRect(left, under + 2, width, 1))
        elif style == "bonus":
            batch.dots.append(QPoint(left + width // 2, under + 1))


def outline(painter: QPainter, rects: Iterable[QRectF], colour: QColor) -> None:
    """The frame around the selected token, one rounded box for each row it lies in."""
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.setPen(QPen(colour, 1.5))
    for rect in rects:
        painter.drawRoundedRect(rect, 3.0, 3.0)


PlacedTokens = list[tuple[int, QRectF]]
"""Visible tokens in order, each with its box; a wrapped token has several."""

_HIT_ALPHA = 56


def paint_selection(
    painter: QPainter, placed: PlacedTokens, selection: tuple[int, int], colour: QColor
) -> None:
    """Fill the boxes of the tokens from the first to before the second."""
    start, stop = selection
    for token, box in placed:
        if start <= token < stop:
            painter.fillRect(box, colour)


def paint_hits(painter: QPainter, placed: PlacedTokens, hits: np.ndarray, colour: QColor) -> None:
    """Frame and tint the tokens of hits: indices, int64 [n] ascending. The frame distinguishes them
    from tokens tinted by their kind."""
    if not len(hits) or not placed:
        return
    start, stop = np.searchsorted(hits, (placed[0][0], placed[-1][0] + 1))
    found = set(hits[start:stop].tolist())
    tint = QColor(colour)
    tint.setAlpha(_HIT_ALPHA)
    for token, box in placed:
        if token in found:
            painter.fillRect(box, tint)
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.setPen(QPen(colour, 2.0))
            painter.drawRect(box.adjusted(1.0, 1.0, -1.0, -1.0))


def paint_cursor(
    painter: QPainter, placed: PlacedTokens, round_tokens: set[int], current: int, colour: QColor
) -> None:
    """A line over the tokens of a round, and a frame around the current one."""
    painter.setPen(QPen(colour, 1.0))
    for token, box in placed:
        if token in round_tokens:
            painter.drawLine(box.topLeft(), box.topRight())
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    outline(painter, (box for token, box in placed if token == current), colour)
