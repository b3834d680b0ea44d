"""One sequence as flowing text with a style for every token; paints only the rows in sight."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from PySide6.QtCore import QEvent, QPoint, QPointF, QRectF, Qt, QTimer, Signal
from PySide6.QtGui import (
    QFocusEvent,
    QGuiApplication,
    QHelpEvent,
    QKeyEvent,
    QKeySequence,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
)
from PySide6.QtWidgets import QAbstractScrollArea, QFrame, QToolTip, QWidget

from app.models import token_walk
from app.models.position import Position
from app.models.token_stream import GHOSTS, KIND, TokenStream
from app.models.token_walk import NOWHERE
from app.theme import Theme, fixed_font
from app.widgets.chip import Chip
from app.widgets.token_layout import Span, TokenLayout
from app.widgets.token_paint import Mark, TokenMetrics, TokenPainter, outline
from app.widgets.token_rows import TokenRows
from app.widgets.token_tip import token_summary, token_tip

_MARGIN = 10
_HIT_ALPHA = 80


class TokenArea(QAbstractScrollArea):
    """Shows a TokenStream, follows its end, and lets a reader walk and select its tokens.

    Laying out happens in slices of 8 ms. Until a new layout (other width, ghosts shown or
    hidden) has come as far as the place on show, a preview of just that place stands in.
    """

    position_selected = Signal(object)  # Position | None
    follow_changed = Signal(bool)
    inspect_asked = Signal()
    """Enter or a double click: show all about the round of the outlined token."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._stream: TokenStream | None = None
        self._metrics = TokenMetrics(fixed_font())
        self._painter = TokenPainter(theme, self._metrics)
        self._rows: TokenRows | None = None
        self._hidden: frozenset[int] = frozenset()
        self._follow = True
        self._moving_bar = False
        self._current = NOWHERE
        self._round: int | None = None
        self._selection = (0, 0)
        self._hits = np.zeros(0, np.int64)
        self._pressed_at = NOWHERE
        self._chip = Chip("↓ Jump to live", theme, self)
        self._chip.setToolTip("Follow the newest token again (End)")
        self._chip.hide()
        self._chip.clicked.connect(lambda: self.set_follow(True))
        self._work = QTimer(self)
        self._work.setSingleShot(True)
        self._work.timeout.connect(self._lay_out)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.viewport().setCursor(Qt.CursorShape.IBeamCursor)
        self.verticalScrollBar().valueChanged.connect(self._on_scrolled)
        self.setAccessibleName("Token stream")

    # -- what is shown ---------------------------------------------------------------------

    @property
    def stream(self) -> TokenStream | None:
        return self._stream

    @property
    def current(self) -> int:
        """Index of the outlined token, -1 without one."""
        return self._current

    @property
    def selection(self) -> tuple[int, int]:
        """First and one-past-last token of the dragged selection; equal when there is none."""
        return self._selection

    @property
    def follow(self) -> bool:
        return self._follow

    def set_stream(self, stream: TokenStream | None) -> None:
        """Show another stream from its newest token."""
        self._stream = stream
        self._current, self._round, self._selection = NOWHERE, None, (0, 0)
        self._hits = np.zeros(0, np.int64)
        self._follow = True
        title = "Token stream" if stream is None else f"Tokens of sequence {stream.seq_id}"
        self.setAccessibleName(title)
        self.setAccessibleDescription("")
        self._start_layout()

    def grow(self) -> None:
        """Show what has joined the stream since the last call."""
        self._lay_out()

    def set_ghosts(self, shown: bool) -> None:
        """Show or hide the rejected and ignored tokens, keeping the place in the text."""
        hidden = frozenset() if shown else GHOSTS
        if hidden != self._hidden:
            self._hidden = hidden
            self._start_layout()

    def set_follow(self, follow: bool) -> None:
        """Keep the newest token in sight, or stay where the reader is."""
        if follow != self._follow:
            top = None if follow else self._top_token()
            self._follow = follow
            if self._rows is not None and (follow or self._rows.preview is not None):
                self._rows.look_at(top)
                self._lay_out()
            self.follow_changed.emit(follow)
        if follow:
            self._move_bar(to_end=True)
        self._place_chip()
        self.viewport().update()

    def set_cursor(self, position: Position | None) -> None:
        """Outline the token at a position; in another sequence mark only its round."""
        stream = self._stream
        if stream is None or position is None or position.run_id != stream.run_id:
            self._round, self._current = None, NOWHERE
        else:
            self._round = position.round
            if position.seq_id != stream.seq_id:
                self._current = NOWHERE
            elif not token_walk.stands_at(stream, self._current, position):
                self._current = token_walk.find(stream, position, self._hidden)
                if self._current != NOWHERE:
                    self._reveal(self._current)
        self.viewport().update()

    def set_hits(self, hits: np.ndarray) -> None:
        """Mark the tokens that a search has found: indices, int64 [n] ascending."""
        self._hits = hits
        self.viewport().update()

    def copy_text(self) -> str:
        """The selected text, or all emitted text; ghosts only if nothing else is selected."""
        if self._stream is None:
            return ""
        start, stop = self._selection
        if start < stop:
            return self._stream.text(start, stop)
        return self._stream.text(prompt=False)

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._theme = theme
        self._painter = TokenPainter(theme, self._metrics)
        self._chip.retheme(theme)
        self.viewport().update()

    # -- walking ---------------------------------------------------------------------------

    def go_to(self, token: int) -> None:
        """Select a token, or the next one in sight if it is hidden."""
        self._walk(token_walk.next_shown, token, +1)

    def step_token(self, step: int) -> None:
        """Select the next (+1) or previous (-1) token in sight."""
        self._walk(token_walk.next_shown, self._current + step, step)

    def step_rejection(self, step: int) -> None:
        """Select the next (+1) or previous (-1) rejected token, or what replaced it."""
        self._walk(token_walk.next_rejection, self._current, step)

    def step_row(self, step: int) -> None:
        """Select the token above (-1) or below (+1)."""
        layout = None if self._rows is None else self._rows.layout
        if layout is None or not 0 <= self._current < layout.placed:
            self.step_token(step)
            return
        row = layout.row_of(self._current)
        here = next((s for s in layout.spans(row) if s.token == self._current), None)
        middle = 0.0 if here is None else here.x + here.width / 2
        row += step
        while 0 <= row < layout.n_rows:
            spans = list(layout.spans(row))
            if spans:
                self._select(min(spans, key=lambda s: abs(s.x + s.width / 2 - middle)).token)
                return
            row += step

    def _walk(self, find: token_walk.Finder, token: int, step: int) -> None:
        if self._stream is not None:
            self._select(find(self._stream, token, step, self._hidden))

    def _select(self, token: int) -> None:
        if token == NOWHERE or self._stream is None:
            return
        self._current = token
        self._round = self._stream.rounds[token]
        self._reveal(token)
        self.setAccessibleDescription(token_summary(self._stream, token))
        self.viewport().update()
        stream = self._stream
        pos = stream.position(token)
        self.position_selected.emit(Position(stream.run_id, stream.seq_id, self._round, pos))

    # -- layout and scrolling --------------------------------------------------------------

    def _start_layout(self) -> None:
        """Lay out everything anew, keeping the place: the end while following, else the top."""
        self._work.stop()
        anchor = None if self._follow else self._top_token()
        if self._stream is None:
            self._rows = None
            self._update_bar()
            self.viewport().update()
            return
        width = max(1, self.viewport().width() - 2 * _MARGIN)
        self._rows = TokenRows(self._stream, self._metrics.width, width, self._hidden)
        self._rows.look_at(anchor)
        self._lay_out()

    def _top_token(self) -> int | None:
        """The token that the first row in sight begins with."""
        view = self._in_sight()
        if view is None:
            return None
        layout, row, _ = view
        return layout.first_token(min(row, layout.n_rows - 1))

    def _lay_out(self) -> None:
        rows = self._rows
        if rows is None:
            return
        complete = rows.advance(self._rows_in_sight(), follow=self._follow)
        self._update_bar()
        if self._follow:
            self._move_bar(to_end=True)
        elif rows.anchor is not None and rows.preview is None:
            self._move_bar(rows.layout.row_of(rows.anchor) * self._metrics.row_height)
            rows.anchor = None
        self._place_chip()
        self.viewport().update()
        if not complete:
            self._work.start(0)

    def _rows_in_sight(self) -> int:
        return self.viewport().height() // self._metrics.row_height + 2

    def _in_sight(self) -> tuple[TokenLayout, int, int] | None:
        """The layout on show, its first visible row, and that row's y."""
        if self._rows is None:
            return None
        top, height = _MARGIN // 2, self._metrics.row_height
        preview = self._rows.preview
        if preview is None:
            above = self.verticalScrollBar().value() - top
            row = max(0, above // height)
            return self._rows.layout, row, row * height - above
        fitting = (self.viewport().height() - _MARGIN) // height
        return preview, max(0, preview.n_rows - fitting) if self._follow else 0, top

    def _update_bar(self) -> None:
        rows = 0 if self._rows is None else self._rows.layout.n_rows
        height = self.viewport().height()
        bar = self.verticalScrollBar()
        self._moving_bar = True
        bar.setRange(0, max(0, rows * self._metrics.row_height + _MARGIN - height))
        bar.setPageStep(height)
        bar.setSingleStep(self._metrics.row_height)
        self._moving_bar = False

    def _move_bar(self, value: int = 0, *, to_end: bool = False) -> None:
        bar = self.verticalScrollBar()
        self._moving_bar = True
        bar.setValue(bar.maximum() if to_end else value)
        self._moving_bar = False

    def _on_scrolled(self, value: int) -> None:
        if not self._moving_bar and self._rows is not None and self._rows.preview is None:
            at_end = value >= self.verticalScrollBar().maximum() and self._rows.layout.complete
            if at_end != self._follow:
                self.set_follow(at_end)
        self.viewport().update()

    def _reveal(self, token: int) -> None:
        """Scroll as little as needed to bring a token into sight."""
        if self._rows is None:
            return
        layout = self._rows.layout
        if token >= layout.placed:
            self.set_follow(False)
            self._rows.look_at(token)
            self._lay_out()
            return
        height = self._metrics.row_height
        top = layout.row_of(token) * height
        bar = self.verticalScrollBar()
        value = min(max(bar.value(), top + height + _MARGIN - bar.pageStep()), top)
        if value != bar.value():
            self._move_bar(value)
            self._leave_end()

    def _leave_end(self) -> None:
        if self._follow and self.verticalScrollBar().value() < self.verticalScrollBar().maximum():
            self.set_follow(False)

    def _place_chip(self) -> None:
        bar = self.verticalScrollBar()
        self._chip.setVisible(not self._follow and bar.value() < bar.maximum())
        view = self.viewport().geometry()
        self._chip.move(
            view.center().x() - self._chip.width() // 2,
            view.bottom() - self._chip.height() - _MARGIN,
        )

    # -- painting --------------------------------------------------------------------------

    def paintEvent(self, _event: QPaintEvent) -> None:
        painter = QPainter(self.viewport())
        painter.fillRect(self.viewport().rect(), self._theme.color("ui.panel"))
        stream = self._stream
        if stream is not None:
            placed = list(self._spans_in_sight())
            self._paint_selection(painter, placed)
            kinds, replayed = stream.kinds, stream.replayed
            self._painter.paint(
                painter,
                (
                    Mark(s.text, kinds[s.token], s.x + _MARGIN, y, s.width, bool(replayed[s.token]))
                    for s, y in placed
                ),
            )
            self._paint_hits(painter, placed)
            self._paint_cursor(painter, placed)
        if self.hasFocus():
            painter.setPen(QPen(self._theme.color("ui.focus"), 1.0))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRect(self.viewport().rect().adjusted(0, 0, -1, -1))
        painter.end()

    def _spans_in_sight(self) -> Iterator[tuple[Span, int]]:
        """Spans of the visible rows, each with the y of its row."""
        view = self._in_sight()
        if view is None:
            return
        layout, row, y = view
        bottom = self.viewport().height()
        while row < layout.n_rows and y < bottom:
            for span in layout.spans(row):
                yield span, y
            row += 1
            y += self._metrics.row_height

    def _paint_selection(self, painter: QPainter, placed: list[tuple[Span, int]]) -> None:
        start, stop = self._selection
        colour = self._theme.color("ui.selection")
        for span, y in placed:
            if start <= span.token < stop:
                painter.fillRect(self._box(span, y), colour)

    def _paint_hits(self, painter: QPainter, placed: list[tuple[Span, int]]) -> None:
        if not len(self._hits) or not placed:
            return
        first, last = placed[0][0].token, placed[-1][0].token
        start, stop = np.searchsorted(self._hits, (first, last + 1))
        found = set(self._hits[start:stop].tolist())
        colour = self._theme.color("ui.focus")
        colour.setAlpha(_HIT_ALPHA)
        for span, y in placed:
            if span.token in found:
                painter.fillRect(self._box(span, y), colour)

    def _paint_cursor(self, painter: QPainter, placed: list[tuple[Span, int]]) -> None:
        if self._round is None or self._stream is None:
            return
        colour = self._theme.color("ui.focus")
        first, stop = self._stream.round_span(self._round)
        painter.setPen(QPen(colour, 1.0))
        for span, y in placed:
            if first <= span.token < stop and self._stream.kinds[span.token] != KIND["prompt"]:
                box = self._box(span, y)
                painter.drawLine(box.topLeft(), box.topRight())
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        outline(painter, (self._box(s, y) for s, y in placed if s.token == self._current), colour)

    def _box(self, span: Span, y: int) -> QRectF:
        return QRectF(span.x + _MARGIN, y + 0.5, span.width, self._metrics.row_height - 2)

    # -- mouse, keys, events ---------------------------------------------------------------

    def token_at(self, point: QPoint | QPointF, *, nearest: bool = False) -> int:
        """Index of the token under a point of the viewport, -1 for none."""
        found, row_y = NOWHERE, None
        for span, y in self._spans_in_sight():
            if y > point.y():
                break
            if y + self._metrics.row_height <= point.y():
                found = span.token if nearest else NOWHERE
                continue
            left = span.x + _MARGIN
            if left <= point.x() < left + span.width:
                return span.token
            if nearest and (row_y != y or left <= point.x()):
                found, row_y = span.token, y
        return found

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self._pressed_at = self.token_at(event.position())
            self._selection = (0, 0)
            self.viewport().update()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if self._pressed_at == NOWHERE:
            return
        y = event.position().y()
        if not 0 <= y < self.viewport().height():
            bar = self.verticalScrollBar()
            bar.setValue(bar.value() + (bar.singleStep() if y > 0 else -bar.singleStep()))
        at = self.token_at(event.position(), nearest=True)
        if at not in (NOWHERE, self._pressed_at) or self._selection != (0, 0):
            ends = sorted((self._pressed_at, max(at, 0)))
            self._selection = (ends[0], ends[1] + 1)
            self.viewport().update()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton and self._selection == (0, 0):
            self._select(self._pressed_at)
        self._pressed_at = NOWHERE

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self._inspect()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            QGuiApplication.clipboard().setText(self.copy_text())
            return
        shift = bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier)
        actions: dict[int, Callable[[], None]] = {
            Qt.Key.Key_Left: lambda: self.step_token(-1),
            Qt.Key.Key_Right: lambda: self.step_token(+1),
            Qt.Key.Key_Up: lambda: self.step_row(-1),
            Qt.Key.Key_Down: lambda: self.step_row(+1),
            Qt.Key.Key_N: lambda: self.step_rejection(-1 if shift else +1),
            Qt.Key.Key_Home: lambda: self._walk(token_walk.next_shown, 0, +1),
            Qt.Key.Key_End: self._go_to_end,
            Qt.Key.Key_Return: self._inspect,
            Qt.Key.Key_Enter: self._inspect,
            Qt.Key.Key_Escape: self._clear,
        }
        act = actions.get(event.key())
        if act is None:
            super().keyPressEvent(event)
        else:
            act()

    def _inspect(self) -> None:
        if self._current != NOWHERE:
            self.inspect_asked.emit()

    def _go_to_end(self) -> None:
        if self._stream is not None:
            self._walk(token_walk.next_shown, len(self._stream) - 1, -1)
            self.set_follow(True)

    def _clear(self) -> None:
        self._selection = (0, 0)
        self.set_cursor(None)
        self.position_selected.emit(None)

    def viewportEvent(self, event: QEvent) -> bool:
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            token = self.token_at(event.pos())
            if token == NOWHERE or self._stream is None:
                QToolTip.hideText()
            else:
                tip = token_tip(self._stream, token)
                QToolTip.showText(event.globalPos(), tip, self.viewport())
            return True
        return super().viewportEvent(event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self._start_layout()
        else:
            self._lay_out()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.ApplicationFontChange):
            self._metrics = TokenMetrics(fixed_font())
            self._painter = TokenPainter(self._theme, self._metrics)
            self._start_layout()

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.viewport().update()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.viewport().update()
