"""What is drawn over and under tokens: selection, hits of a search, round and token in use."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QRectF
from PySide6.QtGui import QColor, QPainter, QPen

from app.widgets.token_paint import outline

Placed = list[tuple[int, QRectF]]
"""Tokens in sight in their order, each with its box; a wrapped token has several."""

_HIT_ALPHA = 80


def paint_selection(
    painter: QPainter, placed: Placed, selection: tuple[int, int], colour: QColor
) -> None:
    """Fill the boxes of the tokens from the first to before the second."""
    start, stop = selection
    for token, box in placed:
        if start <= token < stop:
            painter.fillRect(box, colour)


def paint_hits(painter: QPainter, placed: Placed, hits: np.ndarray, colour: QColor) -> None:
    """Tint the tokens of hits: indices, int64 [n] ascending."""
    if not len(hits) or not placed:
        return
    start, stop = np.searchsorted(hits, (placed[0][0], placed[-1][0] + 1))
    found = set(hits[start:stop].tolist())
    tint = QColor(colour)
    tint.setAlpha(_HIT_ALPHA)
    for token, box in placed:
        if token in found:
            painter.fillRect(box, tint)


def paint_cursor(
    painter: QPainter, placed: Placed, round_tokens: set[int], current: int, colour: QColor
) -> None:
    """A line over the tokens of a round, and a frame around the one in use."""
    painter.setPen(QPen(colour, 1.0))
    for token, box in placed:
        if token in round_tokens:
            painter.drawLine(box.topLeft(), box.topRight())
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    outline(painter, (box for token, box in placed if token == current), colour)
